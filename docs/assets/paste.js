// The page "Paste a log": reads what is pasted or dropped, entirely here, and shows the verdict.
(function () {
  "use strict";
  const box = document.getElementById("paste");
  if (!box) return;
  const text = document.getElementById("paste-text");
  const result = document.getElementById("paste-result");
  const note = document.getElementById("paste-note");
  const picker = document.getElementById("paste-file");
  const pages = new URL(box.dataset.pages, document.baseURI);
  const SHOWN = 200000; // characters of a dropped log that are put into the field
  let turn = 0; // the newest request wins

  const ready = fetch(new URL(box.dataset.catalogue, document.baseURI))
    .then((answer) => answer.json())
    .then((data) => new Diagnose.Catalogue(data));
  ready.catch(() => { note.textContent = "The catalogue could not be loaded."; });

  function element(name, attributes, ...children) {
    const node = Object.assign(document.createElement(name), attributes);
    node.append(...children);
    return node;
  }

  const link = (entry) => element("a", { href: new URL(entry.slug + "/", pages).href }, entry.title);
  const place = (match) => (match.log ? match.log + ", " : "") + "line " + match.line.toLocaleString("en") +
    (match.count > 1 ? " (and " + (match.count - 1).toLocaleString("en") + " more)" : "");

  function fixes(causes) {
    return causes.flatMap((cause) => {
      const tied = cause.package && cause.versions ? " (" + cause.package + " " + cause.versions + ")" : "";
      const parts = [element("p", {}, element("strong", {}, cause.fix), element("br"), "If: " + cause.when + tied)];
      for (const code of [cause.command, cause.config]) if (code) parts.push(element("pre", {}, code.trimEnd()));
      return parts;
    });
  }

  function follower(match) {
    return element("li", {}, link(match.entry), " ", element("small", {}, place(match)), element("br"),
      element("code", {}, match.text.slice(0, 200)));
  }

  function show(scans, verdict) {
    const lines = scans.reduce((sum, one) => sum + one.lines, 0);
    const nodes = [];
    const first = verdict.first;
    if (first) {
      const card = element("div", { className: "verdict " + first.entry.severity });
      card.dataset.slug = first.entry.slug;
      card.append(
        element("h2", {}, "First cause: ", link(first.entry)),
        element("p", {}, place(first)), element("pre", {}, first.text),
        element("h3", {}, "What to do"), ...fixes(verdict.causes(first.entry)),
        element("p", {}, element("a", { href: new URL(first.entry.slug + "/", pages).href }, "The whole page")),
      );
      nodes.push(card);
    } else {
      const card = element("div", { className: "verdict clean" });
      const broken = scans.find((one) => one.traceback);
      const maybe = broken && !verdict.follows(broken.traceback);
      card.append(element("h2", {}, verdict.consequences.length && maybe ? "No known cause, but a traceback that may be it"
        : verdict.consequences.length ? "Only consequences: the cause is not in this text"
        : "No known fault in " + lines.toLocaleString("en") + (lines === 1 ? " line" : " lines")));
      if (verdict.consequences.length && !maybe) {
        card.append(element("p", {}, "It stands before the first of the lines below: give the log from its beginning, " +
          "or all logs of the run together."));
      }
      if (broken) {
        const query = verdict.search(broken.traceback);
        card.append(
          element("p", {}, "There is a traceback that the catalogue does not know (line " +
            broken.tracebackLine.toLocaleString("en") + "). It ends with:"),
          element("pre", { className: "paste-traceback" }, broken.traceback),
          element("p", {}, "To search for it elsewhere:"), element("pre", { className: "paste-query" }, query),
        );
      } else if (!verdict.found.length) {
        card.append(element("p", {}, "No traceback either. A run can be wrong without a line that says so: look at its " +
          "metrics with mmqa diagnose RUN."));
      }
      nodes.push(card);
    }
    const groups = [["What followed", verdict.consequences], ["Found as well", verdict.others],
      ["Worth knowing (healthy logs have these too)", verdict.notes]];
    for (const [heading, matches] of groups) {
      if (!matches.length) continue;
      nodes.push(element("h3", {}, heading), element("ul", { className: "paste-followers" }, ...matches.map(follower)));
    }
    result.replaceChildren(...nodes);
    result.dataset.first = first ? first.entry.slug : "";
    result.dataset.done = String(turn);
    note.textContent = lines.toLocaleString("en") + " lines read";
  }

  async function run(sources) {
    const mine = ++turn;
    delete result.dataset.done;
    try {
      const catalogue = await ready;
      const scans = [];
      for (const source of sources) {
        scans.push(await Diagnose.scanFile(catalogue, source, (share) => {
          if (mine === turn) note.textContent = (source.name || "log") + ": " + Math.round(share * 100) + " %";
        }));
        if (mine !== turn) return;
      }
      if (scans.every((one) => one.lines === 0)) {
        result.replaceChildren();
        note.textContent = "";
        return;
      }
      show(scans, catalogue.verdict(scans));
    } catch (error) {
      if (mine === turn) note.textContent = error.message;
    }
  }

  async function files(list) {
    const all = [...list];
    if (!all.length) return;
    const head = await all[0].slice(0, SHOWN).text();
    text.value = all.length === 1 && all[0].size <= SHOWN ? head
      : all.map((one) => one.name + ": " + (one.size / 1e6).toFixed(1) + " MB").join("\n");
    run(all);
  }

  let timer = 0;
  text.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => run([Object.assign(new Blob([text.value]), { name: "" })]), 250);
  });
  picker.addEventListener("change", () => files(picker.files));
  document.getElementById("paste-clear").addEventListener("click", () => {
    text.value = "";
    picker.value = "";
    run([]);
    text.focus();
  });
  box.addEventListener("dragover", (event) => { event.preventDefault(); box.classList.add("over"); });
  box.addEventListener("dragleave", () => box.classList.remove("over"));
  box.addEventListener("drop", (event) => {
    box.classList.remove("over");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    files(event.dataTransfer.files);
  });
  if (text.value) text.dispatchEvent(new Event("input"));
})();
