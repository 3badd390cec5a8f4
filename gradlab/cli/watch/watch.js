// Asks for the numbers once a second and shows them. All of them come as text, and are set as text: names and rules are
// from files. What did not change is not drawn anew, so that what the reader selected or scrolled stays.
"use strict";

(() => {
  const SOURCE = "/numbers.json", EVERY = 1000, AFTER_A_FAILURE = 5000; // milliseconds
  const WIDTH = 300, HEIGHT = 88, MARGIN = 4; // of a curve, in its own units
  const SVG = "http://www.w3.org/2000/svg";
  const place = (id) => document.getElementById(id);
  let shown = "";

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  // --- curves --------------------------------------------------------------------------------------------------------

  // Where nothing is known the line breaks. A point between two breaks is a dot: a line of no length with round ends.
  function pathOf(points) {
    const across = (position) => MARGIN + (WIDTH - 2 * MARGIN) * (points.length > 1 ? position / (points.length - 1) : 0.5);
    const down = (height) => HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * height;
    let path = "";
    points.forEach((height, position) => {
      if (height === null) return;
      const begins = position === 0 || points[position - 1] === null;
      const at = `${across(position).toFixed(1)} ${down(height).toFixed(1)}`;
      path += begins ? `M${at}L${at}` : `L${at}`;
    });
    return path;
  }

  function drawing(curve) {
    const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label",
      `${curve.name}: ${curve.last}; from ${curve.low} to ${curve.high} over ${stepsOf(curve)}`);
    path.setAttribute("d", pathOf(curve.points));
    svg.append(path);
    return svg;
  }

  const stepsOf = ({ first_step: first, last_step: last }) => first === last ? `step ${first}` : `steps ${first} to ${last}`;

  function figure(curve) {
    const bare = curve.without_line !== "";
    return element("figure", { class: "curve" },
      element("h2", {}, element("span", {}, curve.name), element("span", { class: "last" }, curve.last)),
      ...(bare ? [] : [drawing(curve)]),
      element("figcaption", {}, element("span", {}, bare ? curve.without_line : `${curve.low} to ${curve.high}`),
        element("span", {}, stepsOf(curve))));
  }

  // --- tables and lists ----------------------------------------------------------------------------------------------

  const row = ([first, ...others]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...others.map((cell) => element("td", {}, cell)));

  function table({ title, columns, rows }) {
    const heads = columns.map((column) => element("th", { scope: "col" }, column));
    const scroll = { class: "scroll", tabindex: "0", role: "region", "aria-label": title };
    return element("div", { class: "part" }, element("h2", {}, title),
      element("div", scroll, element("table", {},
        element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows.map(row)))));
  }

  function fill(id, children, whole = id) {
    place(id).replaceChildren(...children);
    place(whole).hidden = children.length === 0;
  }

  const items = (lines) => lines.map((line) => element("li", {}, line));

  function show(view) {
    document.title = `${view.head}: ${view.title}`;
    place("title").textContent = view.title;
    place("head").textContent = view.head;
    fill("problems", items(view.problems));
    fill("facts", view.facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
    fill("rules-list", items(view.rules), "rules");
    fill("curves", view.curves.map(figure));
    fill("numbers-rows", view.numbers.map(row), "numbers");
    fill("tables", view.tables.map(table));
  }

  // --- asking --------------------------------------------------------------------------------------------------------

  const now = () => new Date().toLocaleTimeString([], { hour12: false });
  let asked = "";

  async function ask() {
    try {
      const answer = await fetch(SOURCE, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const text = await answer.text();
      if (text !== shown) show(JSON.parse(text));
      shown = text;
      asked = now();
      place("as-of").textContent = `As of ${asked}.`;
      setTimeout(ask, EVERY);
    } catch (error) {
      place("as-of").textContent = `gradlab watch does not answer; these are the numbers of ${asked || "no time"}.`;
      setTimeout(ask, AFTER_A_FAILURE);
    }
  }

  ask();
})();
