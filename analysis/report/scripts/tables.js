// Tables of the page: a click on a head sorts, and long ones can be filtered.
"use strict";

(() => {
  const SCALES = { ns: 1e-9, "\u00b5s": 1e-6, ms: 1e-3, s: 1, min: 60, B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12,
    "bit/s": 1, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12 };
  const LONG = 10;

  // What a cell is sorted by: its first number in base units, or its words.
  function key(text) {
    const minutes = text.match(/^(\d+) min (\d+) s$/);
    if (minutes) return 60 * Number(minutes[1]) + Number(minutes[2]);
    const found = text.replace(/\u202f/g, "").match(/^\D{0,8}?([+-]?\d[\d.]*(?:e[+-]?\d+)?)\s*([^\s,;(]*)/);
    return found ? Number(found[1]) * (SCALES[found[2]] || 1) : null;
  }

  function sort(table, column, head) {
    const body = table.tBodies[0], rows = [...body.rows];
    const up = head.getAttribute("aria-sort") !== "ascending";
    table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const texts = new Map(rows.map((row) => [row, row.cells[column].textContent.trim()]));
    // Of leading columns, which hold words, those with nothing but numbers are sorted as numbers.
    const words = column < Number(table.dataset.words) && ![...texts.values()].every((text) => /^\d/.test(text));
    const keys = new Map(rows.map((row) => [row, words ? null : key(texts.get(row))]));
    rows.sort((one, other) => {
      const [first, second] = [keys.get(one), keys.get(other)];
      if (first === null && second === null) return texts.get(one).localeCompare(texts.get(other)) * (up ? 1 : -1);
      if (first === null || second === null) return first === null ? 1 : -1; // what is not known comes last
      return (first - second) * (up ? 1 : -1);
    });
    body.append(...rows);
  }

  document.querySelectorAll("table[data-words]").forEach((table) => {
    table.querySelectorAll("thead th").forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, column, head));
      head.append(button);
    });
    if (table.tBodies[0].rows.length <= LONG) return;
    const filter = document.createElement("input");
    filter.type = "search";
    filter.placeholder = "rows that contain \u2026";
    filter.setAttribute("aria-label", `Filter: ${table.parentElement.getAttribute("aria-label")}`);
    filter.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase();
      for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
    table.parentElement.before(filter);
  });
})();
