/* Stepper of the page "Four records of one image": recorded traces, nothing fetched. */
"use strict";
(() => {
  const root = document.getElementById("four-records");
  const data = window.FOUR_RECORDS;
  if (!root || !data || !data.length) return;

  const RECORDS = [
    ["front_end", "Front end's list", "front end process"],
    ["engine_core", "Engine core's copy", "engine core process"],
    ["scheduler", "Scheduler's encoder list", "engine core process"],
    ["worker", "Worker's encoder outputs", "worker process"],
  ];
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const choose = (label, id) => {
    const list = make("select", { id });
    return [make("label", { for: id }, label + " ", list), list];
  };
  const [versionLabel, version] = choose("vLLM", "four-records-version");
  const [pathLabel, path] = choose("Path", "four-records-path");
  const back = make("button", { type: "button", class: "md-button" }, "Back");
  const next = make("button", { type: "button", class: "md-button md-button--primary" }, "Next step");
  const status = make("p", { "aria-live": "polite", class: "four-records-status" });
  const table = make("table");
  const outcome = make("p", { class: "four-records-outcome" });
  root.replaceChildren(make("p", {}, versionLabel), make("p", {}, pathLabel),
    make("p", {}, back, " ", next), status, table, outcome);

  let step = 0;
  for (const release of data) version.append(make("option", {}, release.version));
  const release = () => data[version.selectedIndex];
  const trace = () => release().paths[path.selectedIndex];

  function fillPaths(keep) {
    path.replaceChildren(...release().paths.map((item) =>
      make("option", {}, `${item.title} · settings: ${item.settings} · ${item.outcome}`)));
    const same = release().paths.findIndex((item) => keep && item.title === keep.title && item.settings === keep.settings);
    path.selectedIndex = Math.max(same, 0);
    step = 0;
    show();
  }
  function cell(value, before) {
    if (value === null || value === undefined) return "not readable: the engine is gone";
    const ids = Array.isArray(value) ? value : Object.keys(value).map((id) => `${id} → ${value[id]}`);
    const text = ids.length ? ids.join(", ") : "empty";
    return JSON.stringify(value) === JSON.stringify(before) ? text : make("strong", {}, text);
  }
  function show() {
    const steps = trace().steps;
    const now = steps[step];
    const before = step ? steps[step - 1].records : {};
    status.textContent = `Step ${step + 1} of ${steps.length}: ${now.label}${now.result ? " — " + now.result : ""}`;
    table.replaceChildren(make("tbody", {}, ...RECORDS.map(([key, name, where]) =>
      make("tr", {}, make("th", { scope: "row" }, name, make("br"), make("small", {}, where)),
        make("td", {}, cell(now.records[key], before[key]))))));
    back.disabled = step === 0;
    next.disabled = step === steps.length - 1;
    outcome.textContent = next.disabled ? `Outcome: ${trace().outcome}${trace().detail ? ". " + trace().detail : ""}` : "";
  }
  version.addEventListener("change", () => fillPaths(trace.last));
  path.addEventListener("change", () => { trace.last = trace(); step = 0; show(); });
  back.addEventListener("click", () => { step -= 1; show(); });
  next.addEventListener("click", () => { step += 1; show(); });
  const first = data.findIndex((item) => item.paths.some((way) => way.outcome === "crash" && way.settings === "default" && way.title.startsWith("same image")));
  version.selectedIndex = Math.max(first, 0);
  fillPaths(null);
  trace.last = trace();
})();
