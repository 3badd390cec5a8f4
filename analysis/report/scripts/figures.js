// Figures of the page: the pointer reads values off their lines and points, and series can be switched off.
"use strict";

(() => {
  const NEAR = 14, MOST_BOXES = 14; // in the figure's units; series that get a box to switch them off

  const place = (axis, value) => (axis.scale === "log" ? Math.log10(value) : value);
  const back = (axis, at) => (axis.scale === "log" ? 10 ** at : at);
  // The value at a share of the axis, from its first end to its second.
  function value(axis, share) {
    const [low, high] = [place(axis, axis.low), place(axis, axis.high)];
    return back(axis, low + share * (high - low));
  }

  function spell(number) {
    if (number === 0 || !Number.isFinite(number)) return String(number);
    const size = Math.abs(number);
    return size >= 1e5 || size < 1e-3 ? number.toExponential(2) : String(Number(number.toPrecision(4)));
  }

  // The points that a series is drawn through, read off its path or its marks.
  function points(group) {
    const found = [];
    for (const path of group.querySelectorAll(":scope > path, :scope > g > path")) {
      if (path.closest("defs")) continue;
      for (const part of path.getAttribute("d").matchAll(/[ML]\s*(-?[\d.]+)[ ,]+(-?[\d.]+)/g)) {
        found.push([Number(part[1]), Number(part[2])]);
      }
    }
    for (const mark of group.querySelectorAll("use")) {
      found.push([Number(mark.getAttribute("x")), Number(mark.getAttribute("y"))]);
    }
    return found;
  }

  function seriesOf(holder, panels) {
    return panels.flatMap((panel) => Object.entries(panel.series).map(([id, label]) => (
      { panel, label, group: document.getElementById(`${holder.dataset.figure}-${id}`) }
    ))).filter((one) => one.group);
  }

  function watch(holder, series) {
    const svg = holder.querySelector("svg"), figure = holder.parentElement, tip = document.createElement("div");
    for (const one of series) one.points = points(one.group);
    tip.className = "tip";
    tip.hidden = true;
    figure.append(tip);
    svg.addEventListener("pointermove", (event) => {
      const matrix = svg.getScreenCTM();
      if (!matrix) return;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      const best = nearest(series, at);
      tip.hidden = best === null;
      if (best) show(best, event);
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });

    function show({ panel, label, point }, event) {
      const [left, top, right, bottom] = panel.box;
      const x = spell(value(panel.x, (point[0] - left) / (right - left)));
      const y = spell(value(panel.y, (bottom - point[1]) / (bottom - top)));
      const lines = [label, `${panel.x.label || "x"}: ${x}`, `${panel.y.label || "y"}: ${y}`].filter(Boolean);
      tip.replaceChildren(...lines.map((text) => {
        const line = document.createElement("div");
        line.textContent = text;
        return line;
      }));
      const frame = figure.getBoundingClientRect(), room = frame.width - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(0, Math.min(event.clientX - frame.left + 12, room))}px`;
      tip.style.top = `${event.clientY - frame.top + 14}px`;
    }
  }

  function nearest(series, at) {
    let best = null, least = NEAR * NEAR;
    for (const one of series) {
      if (one.group.style.display === "none") continue;
      for (const point of one.points) {
        const distance = (point[0] - at.x) ** 2 + (point[1] - at.y) ** 2;
        if (distance < least) [best, least] = [{ ...one, point }, distance];
      }
    }
    return best;
  }

  // A box for each name among the figure's series, which shows and hides all of that name.
  function switches(holder, series) {
    const names = [...new Set(series.map((one) => one.label).filter(Boolean))];
    if (names.length < 2 || names.length > MOST_BOXES) return;
    const boxes = document.createElement("div");
    boxes.className = "switches";
    boxes.setAttribute("role", "group");
    boxes.setAttribute("aria-label", "Series that are shown");
    boxes.append(...names.map((name) => {
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.checked = true;
      box.addEventListener("change", () => {
        for (const one of series) if (one.label === name) one.group.style.display = box.checked ? "" : "none";
      });
      label.append(box, ` ${name}`);
      return label;
    }));
    holder.after(boxes);
  }

  const source = document.getElementById("figure-data");
  if (!source) return;
  const described = JSON.parse(source.textContent);
  document.querySelectorAll("[data-figure]").forEach((holder) => {
    const panels = described[holder.dataset.figure];
    if (!panels || !panels.length) return;
    const series = seriesOf(holder, panels);
    switches(holder, series);
    holder.addEventListener("pointerenter", () => watch(holder, series), { once: true }); // which reads all its points
  });
})();
