// Filters for the table of all symptoms; without this script it is a plain table.
(function () {
  "use strict";
  const box = document.querySelector(".symptom-table");
  if (!box) return;
  const rows = [...box.querySelectorAll("tbody tr")];
  const column = (row, number) => row.cells[number].textContent.trim();
  const bar = document.createElement("div");
  bar.className = "filters";
  const text = document.createElement("input");
  text.type = "search";
  text.placeholder = "words, or a part of the name";
  text.setAttribute("aria-label", "Filter by words");
  bar.append(text);
  const choices = [[1, "what you see"], [2, "effect"], [4, "phase"]].map(([number, name]) => {
    const select = document.createElement("select");
    select.setAttribute("aria-label", "Filter by " + name);
    select.append(new Option(name + ": all", ""));
    const values = rows.map((row) => column(row, number).split(":")[0]);
    for (const value of [...new Set(values)].sort()) select.append(new Option(value, value));
    bar.append(select);
    return [number, select];
  });
  const count = document.createElement("output");
  bar.append(count);
  box.prepend(bar);

  function update() {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const content = row.textContent.toLowerCase();
      row.hidden = !(
        words.every((word) => content.includes(word)) &&
        choices.every(([number, select]) => !select.value || column(row, number).split(":")[0] === select.value)
      );
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = shown + " of " + rows.length;
  }
  bar.addEventListener("input", update);
  update();
})();
