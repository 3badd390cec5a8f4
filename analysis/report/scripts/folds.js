// What folds and what takes turns: a link unfolds what it leads to, and tables that share a place are chosen from.
"use strict";

(() => {
  function unfold() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    const own = target.querySelector(":scope > details");
    if (own) own.open = true;
    target.scrollIntoView();
  }

  // Tables of one section that take turns: the reader chooses which is shown.
  function takeTurns(parts) {
    const label = document.createElement("label"), select = document.createElement("select");
    label.className = "turn";
    for (const part of parts) select.add(new Option(part.dataset.turn));
    const show = () => parts.forEach((part, index) => { part.hidden = index !== select.selectedIndex; });
    select.addEventListener("change", show);
    label.append("Show: ", select);
    parts[0].before(label);
    show();
  }

  for (const holder of new Set([...document.querySelectorAll("[data-turn]")].map((part) => part.parentElement))) {
    const parts = [...holder.querySelectorAll(":scope > [data-turn]")];
    if (parts.length > 1) takeTurns(parts);
  }
  addEventListener("hashchange", unfold);
  unfold();
})();
