// Controls over gradlabForecast: the reader's own nodes and link recompute the answer, the table and the curve.
"use strict";

(() => {
  const source = document.getElementById("play-data"), place = document.getElementById("play");
  if (!source || !place) return;
  const data = JSON.parse(source.textContent);
  const names = Object.keys(data.plans);
  const counts = Object.keys(data.plans[names[0]].tapes).map(Number)
    .filter((count) => names.every((name) => count in data.plans[name].tapes));
  const { formatSeconds, formatPercent, spellRate, significant } = gradlabForecast;
  // Three to one against light and dark paper; of lines with the same dashes colours that the colour-blind can tell.
  const COLOURS = ["#0072B2", "#D55E00", "#C0609A", "#7A6FE0", "#009E73", "#B07C00"];
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "14 4", "6 2 2 2 2 2", "1 4"];
  const POINTS = 33, SHOWN = 4;

  // --- controls: positions of sliders, and what they mean ----------------------------------------------------------

  const choices = (values, text) => ({ least: 0, most: values.length - 1, step: 1, value: (at) => values[at], text,
    at: (value) => values.reduce((best, one, index) =>
      Math.abs(Math.log(one / value)) < Math.abs(Math.log(values[best] / value)) ? index : best, 0) });
  // A tenth of a decade has 20 positions; marks have three digits, so that what is shown is what is computed with.
  // Both ends are reached, and the report's own value lies between them.
  const STEP = 0.005;
  const decades = (lowest, highest, given, text, zero = false) => {
    const low = given > 0 ? Math.min(lowest, given) : lowest, high = Math.max(highest, given);
    const least = Math.floor(Math.log10(low) / STEP + 1e-6) * STEP, most = Math.ceil(Math.log10(high) / STEP - 1e-6) * STEP;
    const value = (at) => (zero && at <= least + STEP / 2 ? 0 :
      Number(Math.min(Math.max(10 ** at, low), high).toPrecision(3)));
    return { least, most, step: STEP, text, value, at: (one) => Math.log10(Math.min(Math.max(one, low), high)) };
  };

  const ascending = (values) => [...new Set(values)].sort((one, other) => one - other);

  const begins = {
    nodes: data.nodes, local: data.node ? data.node.local_ranks : 1, rate: data.bits_per_second,
    inside: data.node ? data.node.inside.bits_per_second : 4e11, latency: data.link.latency_seconds,
    compute: data.compute_seconds || 0.1, every: data.every,
  };
  const CONTROLS = {
    nodes: { label: "Nodes", ...choices(counts, String) },
    local: { label: "Ranks per node", ...choices(ascending([1, 2, 4, 8, begins.local]), String) },
    rate: { label: "Link of a node", ...decades(1e7, 4e11, begins.rate, spellRate) },
    inside: { label: "Link inside a node, per rank", ...decades(1e8, 1e13, begins.inside, spellRate) },
    latency: { label: "Latency", ...decades(1e-6, 1e-1, begins.latency, formatSeconds, true) },
    compute: { label: "Computing time of a step", ...decades(1e-4, 1e2, begins.compute, formatSeconds) },
    every: { label: "Local steps between exchanges",
      ...choices(ascending([1, 2, 4, 8, 15, 30, 50, 100, 200, 500, begins.every]), String) },
  };
  const chosen = { ...begins };
  const inputs = {};
  const shown = new Set();
  let moved = false; // as in the report, whose first line says the answer
  let timed = data.compute_seconds !== null; // whether the computing time is the reader's own

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function slider(name) {
    const control = CONTROLS[name], id = `play-${name}`;
    const input = element("input", { type: "range", id, min: control.least, max: control.most, step: control.step });
    const output = element("output", { for: id });
    const show = () => {
      output.textContent = name === "compute" && !timed ? "not known" : control.text(chosen[name]);
      input.setAttribute("aria-valuetext", output.textContent);
      input.classList.toggle("unknown", name === "compute" && !timed); // no thumb that looks like a value
    };
    input.addEventListener("input", () => {
      chosen[name] = control.value(Number(input.value));
      moved = true;
      timed = timed || name === "compute";
      show();
      later();
    });
    inputs[name] = { set: (value) => { chosen[name] = value; input.value = control.at(value); show(); } };
    return element("div", { class: "control", id: `${id}-control` },
      element("label", { for: id }, control.label), output, input);
  }

  const streaming = element("input", { type: "checkbox", id: "play-streaming" });
  streaming.addEventListener("change", () => { moved = true; later(); });
  const reset = element("button", { type: "button" }, "As in this report");
  reset.addEventListener("click", () => { begin(); later(); });

  // --- what is computed ---------------------------------------------------------------------------------------------

  function network(bits_per_second = chosen.rate) {
    const link = { ...data.link, latency_seconds: chosen.latency, bits_per_second };
    // As `gradlab predict --inside` has a link that the report was not told of.
    const inside = data.node ? data.node.inside : { latency_seconds: 0, header_share: 0.06, host_seconds_per_byte: 0,
      collective_seconds: 0, gather_factor: 1 };
    const node = chosen.local === 1 ? null : {
      local_ranks: chosen.local,
      inside: { ...inside, bits_per_second: chosen.inside },
    };
    return { compute: chosen.compute, link, nodes: chosen.nodes, cores: data.cores, node,
      segmentBytes: data.segment_bytes };
  }

  const tapes = () => Object.fromEntries(names.map((name) => [name, data.plans[name].tapes[chosen.nodes]]));
  const times = (on) => gradlabForecast.stepTimes(tapes(), on, chosen.every, streaming.checked);

  function lines(here) {
    const rows = [["dense", here.dense, here.way], ["16 bits", here.half, "half the bytes"]];
    return [...rows, ...names.map((name) => [name, here.plans[name], data.plans[name].ended])];
  }

  // --- what is shown ------------------------------------------------------------------------------------------------

  const answer = element("p", { class: "verdict", id: "play-answer", "aria-live": "polite" });
  const body = element("tbody");
  const drawing = element("div", { class: "scroll", id: "play-drawing" });
  const command = element("code", { id: "play-command" });
  const tip = element("div", { class: "tip", hidden: "" });
  const results = element("div");
  const style = (index) => ({ colour: index < 2 ? "var(--soft)" : COLOURS[(index - 2) % COLOURS.length],
    dash: index < 2 ? ["", "3 3"][index] : DASHES[(index - 2) % DASHES.length] });

  function showTable(here) {
    const focused = document.activeElement && document.activeElement.getAttribute("aria-label");
    const rows = lines(here).map((line, index) => [...line, index]).sort((one, other) => one[1] - other[1]);
    body.replaceChildren(...rows.map(([name, seconds, beside, index]) => {
      const box = element("input", { type: "checkbox", "aria-label": `draw ${name}` });
      box.checked = shown.has(name);
      box.addEventListener("change", () => {
        if (box.checked) shown.add(name); else shown.delete(name);
        later();
      });
      const { colour, dash } = style(index);
      const sample = `<svg width="26" height="8" aria-hidden="true"><path d="M0 4H26" style="stroke:${colour}" ` +
        `stroke-width="2.5" stroke-dasharray="${dash}"/></svg>`;
      const mark = element("span", { class: "mark" });
      mark.innerHTML = sample;
      const waits = Math.max(0, 1 - chosen.compute / seconds);
      const cells = [formatSeconds(seconds), `${significant(here.dense / seconds)}x`,
        `${significant(here.half / seconds)}x`, formatPercent(waits)];
      return element("tr", {}, element("th", { scope: "row" }, box, mark, name),
        ...cells.map((text) => element("td", {}, text)), element("td", { class: "text" }, beside));
    }));
    // The box that was ticked keeps the focus in its new row.
    const again = [...body.querySelectorAll("input")].find((box) => box.getAttribute("aria-label") === focused);
    if (again) again.focus();
  }

  function showCurve(here) {
    const low = Math.log10(chosen.rate) - 1.5, rates = [];
    for (let point = 0; point < POINTS; point++) rates.push(10 ** (low + (3 * point) / (POINTS - 1)));
    const along = rates.map((rate) => lines(times(network(rate))));
    const picked = along[0].map(([name], index) => [name, index]).filter(([name]) => shown.has(name));
    if (!picked.length) return drawing.replaceChildren(element("p", { class: "note" }, "Tick plans to draw them."));
    const values = picked.flatMap(([, index]) => along.map((line) => line[index][1]));
    const bottom = Math.log10(Math.min(...values) * 0.93), top = Math.log10(Math.max(...values) * 1.08);
    const [left, right, width, height] = [62, 8, 640, 300];
    const x = (rate) => left + ((Math.log10(rate) - low) / 3) * (width - left - right);
    const y = (seconds) => 8 + ((top - Math.log10(seconds)) / (top - bottom)) * (height - 48);
    const parts = [];
    for (let decade = Math.ceil(low); decade <= low + 3; decade++) {
      const at = x(10 ** decade).toFixed(1);
      parts.push(`<path class="grid" d="M${at} 8V${height - 40}"/>`,
        `<text x="${at}" y="${height - 24}" text-anchor="middle">${spellRate(10 ** decade)}</text>`);
    }
    for (const mark of ticks(bottom, top)) {
      const at = y(mark).toFixed(1);
      parts.push(`<path class="grid" d="M${left} ${at}H${width - right}"/>`,
        `<text x="${left - 6}" y="${Number(at) + 4}" text-anchor="end">${formatSeconds(mark)}</text>`);
    }
    parts.push(`<path class="here" d="M${x(chosen.rate).toFixed(1)} 8V${height - 40}"/>`,
      `<text x="${(left + width - right) / 2}" y="${height - 6}" text-anchor="middle">link of a node</text>`);
    for (const [name, index] of picked) {
      const { colour, dash } = style(index);
      const path = along.map((line, point) => `${x(rates[point]).toFixed(1)} ${y(line[index][1]).toFixed(1)}`);
      parts.push(`<path d="M${path.join("L")}" style="stroke:${colour}" stroke-width="2.5" ` +
        `stroke-dasharray="${dash}"><title></title></path>`);
    }
    drawing.innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img" ` +
      `aria-label="Step time over link speed">${parts.join("")}</svg>`;
    // Names come from files: as text, never as markup.
    drawing.querySelectorAll("title").forEach((title, index) => { title.textContent = picked[index][0]; });
    readValues(rates, along, picked, (rate) => x(rate));
  }

  // Under the pointer: every drawn plan's step at that link speed, the shortest first.
  function readValues(rates, along, picked, x) {
    const svg = drawing.querySelector("svg");
    svg.addEventListener("pointermove", (event) => {
      const matrix = svg.getScreenCTM();
      if (!matrix) return;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse()).x;
      const point = rates.reduce((best, rate, index) =>
        Math.abs(x(rate) - at) < Math.abs(x(rates[best]) - at) ? index : best, 0);
      const steps = picked.map(([name, index]) => [name, along[point][index][1]]).sort((one, other) => one[1] - other[1]);
      const lines = [spellRate(rates[point]), ...steps.map(([name, seconds]) => `${name}: ${formatSeconds(seconds)}`)];
      tip.replaceChildren(...lines.map((text) => element("div", {}, text)));
      tip.hidden = false;
      const frame = tip.parentElement.getBoundingClientRect();
      tip.style.left = `${Math.max(0, Math.min(event.clientX - frame.left + 12, frame.width - tip.offsetWidth - 4))}px`;
      tip.style.top = `${event.clientY - frame.top + 14}px`;
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  function ticks(bottom, top) {
    const marks = [];
    for (let decade = Math.floor(bottom); decade <= top; decade++) {
      for (const digit of top - bottom > 2.5 ? [1] : [1, 2, 5]) marks.push(digit * 10 ** decade);
    }
    const inside = marks.filter((mark) => Math.log10(mark) >= bottom && Math.log10(mark) <= top);
    return inside.length > 1 ? inside : [0.1, 0.5, 0.9].map((share) => 10 ** (bottom + share * (top - bottom)));
  }

  function showCommand() {
    const where = chosen.local === 1 ? String(chosen.nodes) : `${chosen.nodes}x${chosen.local}`;
    const spelled = (speed) => spellRate(speed).replace("bit/s", "bit").replace(" ", "").toLowerCase();
    const time = (seconds) => `${Number(seconds.toPrecision(4))}s`;
    const inside = chosen.local === 1 ? "" : `--inside ${spelled(chosen.inside)} `;
    // It chooses among plans for an exchange in every step.
    command.parentElement.hidden = chosen.every > 1 || data.every > 1;
    command.textContent = `gradlab recommend ${data.trace} --out plan.safetensors --nodes ${where} ` +
      `--bandwidth ${spelled(chosen.rate)} ${inside}--latency ${time(chosen.latency)} --compute-seconds ${time(chosen.compute)} --max-loss ${data.max_loss}`;
  }

  let waiting = false;
  function later() {
    if (!waiting) requestAnimationFrame(update);
    waiting = true;
  }

  // What the report says beside: how far its recording carries, and what local steps cost.
  function cautions() {
    if (chosen.every === 1) return data.cautions;
    const known = data.every > 1 ? `${data.every} local steps` : "single steps";
    return [`Savings are over uncompressed training with as many local steps. Errors of plans are known for ${known} ` +
      "alone, and every local step costs accuracy of its own (docs/local-steps.md).", ...data.cautions];
  }

  let drawn = null;
  function update() {
    waiting = false;
    document.getElementById("play-inside-control").hidden = chosen.local === 1;
    streaming.closest(".control").hidden = chosen.every === 1;
    results.hidden = !timed;
    answer.hidden = timed && !moved;
    if (!timed) {
      answer.textContent = "Set the computing time of a step, which this recording does not say, for an answer here.";
      return;
    }
    const on = network(), here = times(on);
    const assumed = `Computing a step is taken to last ${formatSeconds(chosen.compute)}.`;
    const said = gradlabForecast.verdict(here, on, data.words, data.plans, data.limit, chosen.every);
    answer.textContent = [said, assumed, ...cautions()].join(" ");
    showTable(here);
    showCommand();
    clearTimeout(drawn); // the curve, which takes a while, once a slider rests
    drawn = setTimeout(() => showCurve(here), 80);
  }

  function begin() {
    moved = false;
    timed = data.compute_seconds !== null;
    for (const [name, value] of Object.entries(begins)) inputs[name].set(value);
    streaming.checked = false;
  }

  const heads = ["plan", "step", "speed-up", "vs 16 bits", "waits", "similar methods ended"];
  place.append(
    element("form", { class: "controls", "aria-label": "Your nodes and your link" },
      ...Object.keys(CONTROLS).map(slider),
      element("div", { class: "control" },
        element("label", { for: "play-streaming" }, streaming, " local steps go on during an exchange")),
      reset),
    answer,
    results,
  );
  results.append(
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Steps on your link" },
      element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((head, index) =>
        element("th", { scope: "col", ...(index === 0 || index === 5 ? { class: "text" } : {}) }, head)))), body)),
    element("div", { class: "pointed" }, drawing, tip),
    element("p", { class: "note" },
      "Choose, write the artifact and get the lines that train with it (--plan: artifacts of your own): ", command),
  );
  begin();
  ["dense", "16 bits"].forEach((name) => shown.add(name));
  const first = times(network());
  [...names].sort((one, other) => first.plans[one] - first.plans[other]).slice(0, SHOWN).forEach((name) => shown.add(name));
  place.hidden = false;
  update();
})();
