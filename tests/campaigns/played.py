"""A session with a report in a real browser, at a desk, in the dark and on a phone.

Every slider, sorting, filtering, folding out, layers, values under the pointer, and two reports side by side.

    make campaign NAME=played [ARGS="--browser /usr/bin/chromium --keep FOLDER"]

needs Chromium and the package playwright (`pip install playwright`); CI has neither. The numbers that the page shows
after a slider has moved are compared with what `gradlab predict` computes for the same network. Exit codes: 0 all
held; 1 something did not; 3 there is no browser.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.local_steps import LocalSteps
from gradlab.analysis.forecast.profile import NOT_MEASURED, Profile
from gradlab.analysis.forecast.simulator import Node
from gradlab.analysis.forecast.step_time import Job, compare
from gradlab.analysis.report.beside import write_beside
from gradlab.analysis.report.examine import examine
from gradlab.analysis.report.look import QUICK
from gradlab.analysis.report.trace_report import Examination, write_trace_report
from gradlab.formatting import format_bytes, format_percent, format_seconds
from gradlab.layout import Layer
from gradlab.trace import Trace
from support.browser import VIEWS, browser_at, browser_options, take_picture
from support.recorded import random_gradients, record

LAYERS = (
    *(Layer(f"blocks.{n}.weight", (160, 128), "linear") for n in range(12)),
    Layer("head.weight", (40, 160), "linear"),
)
NODES, COMPUTE, LATENCY = (2, 4, 8), 0.02, 1e-4
# Sliders that are moved, one after another from where the one before left them, and what they then mean.
MOVES: list[tuple[str, float]] = [
    ("nodes", 4), ("rate", 3e7), ("rate", 2.5e9), ("compute", 0.004), ("compute", 0.25), ("latency", 2e-3),
    ("local", 4), ("inside", 3e10), ("nodes", 2), ("local", 1), ("every", 30), ("rate", 1e7), ("every", 1),
]  # fmt: skip
START: dict[str, float] = {
    **{"nodes": NODES[0], "local": 1, "rate": 1e9, "inside": 4e11},
    **{"latency": LATENCY, "compute": COMPUTE, "every": 1},
}


def written(folder: Path, seed: int = 0, profile: Profile | None = None) -> tuple[Path, Examination]:
    """A report of a small recording, and what was measured for it."""
    record(folder / "trace", random_gradients(seed, 12, 4, LAYERS), LAYERS)
    with Trace(folder / "trace") as trace:
        network = Network([Link(1e9, LATENCY)], NODES, profile or Profile(COMPUTE, "as given"))
        examination = examine(trace, network=network, parts=["payoff", "between"], look=QUICK, for_page=True)
        return write_trace_report(trace, folder / "report", examination), examination


def expected(examination: Examination, chosen: Mapping[str, float]) -> dict[str, str]:
    """Every line's step time for a network, as the page should write it, by Python's own formulas."""
    assert examination.speed is not None
    link = Link(chosen["rate"], chosen["latency"])
    inside = Link(chosen["inside"])  # as `gradlab predict --inside` has it
    node = Node(int(chosen["local"]), inside) if chosen["local"] > 1 else None
    every, lines = int(chosen["every"]), {}
    for name, forecast in examination.speed.forecasts.items():
        [job] = [one.job for one in forecast.nodes if one.job.world_size == chosen["nodes"]]
        pair = compare(with_compute(job, chosen["compute"] if every == 1 else 0.0), link, node=node)
        steps = {name: pair.compressed, "dense": pair.dense, "16 bits": pair.half}
        for line, step in steps.items():
            local = LocalSteps(job.world_size, link.bits_per_second, chosen["compute"], 0, 0, step.seconds, 0)
            lines[line] = format_seconds(step.seconds if every == 1 else local.seconds(every))
    return lines


def with_compute(job: Job, seconds: float) -> Job:
    """The same step of another computing time."""

    def moved(buckets: Any) -> Any:
        return tuple(replace(one, ready_seconds=one.ready_seconds / COMPUTE * seconds) for one in buckets)

    return replace(job, compute_seconds=seconds, buckets=moved(job.buckets), dense_buckets=moved(job.dense_buckets))


def shown(page: Any) -> dict[str, str]:
    """Every line's step time, as the page writes it."""
    rows = page.eval_on_selector_all(
        "#play tbody tr", "rows => rows.map(row => [row.cells[0].textContent.trim(), row.cells[1].textContent])"
    )
    return dict(rows)


def move(page: Any, name: str, value: float) -> None:
    """Move a slider to a value."""
    script = """([name, value]) => {
        const input = document.getElementById(`play-${name}`), count = Number(input.max) + 1;
        const at = Number(input.step) === 1
            ? [...Array(count).keys()].find((position) => {
                input.value = position;
                input.dispatchEvent(new Event("input"));
                return Number(input.previousElementSibling.textContent) === value;
              })
            : Math.log10(value);
        input.value = at;
        input.dispatchEvent(new Event("input"));
    }"""
    page.evaluate(script, [name, value])
    page.wait_for_timeout(120)


def session(page: Any, examination: Examination) -> Iterator[str]:
    """Move every slider, then sort, filter and fold out; a line for each thing that is not as it should be."""
    chosen = dict(START)
    for name, value in [("", 0.0), *MOVES]:
        if name:
            move(page, name, value)
            # Positions of a slider with decades lie 0.005 apart, and mean three digits.
            whole = name in ("nodes", "local", "every")
            chosen[name] = value if whole else float(f"{10 ** (round(math.log10(value) * 200) / 200):.3g}")
        got, wanted = shown(page), expected(examination, chosen)
        for line in wanted:
            if got.get(line) != wanted[line]:
                yield f"{name} = {value:g}: {line} is {got.get(line)}, predict says {wanted[line]}"
    page.click("#play .controls button")
    page.wait_for_timeout(120)
    if shown(page) != {**shown(page), **expected(examination, START)}:
        yield "the button does not bring back the report's own numbers"
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    table = page.locator("table[data-words]").first
    before = column(table, 3)
    table.locator("thead button").nth(3).click()
    ascending = column(table, 3)
    table.locator("thead button").nth(3).click()
    if sorted(before) != sorted(ascending) or column(table, 3) != ascending[::-1]:
        yield f"sorted by its fourth column a table has {ascending}, and the other way {column(table, 3)}"
    part = page.locator(".part:has(input[type=search])").first
    first, count = part.locator("tbody tr th").first.inner_text(), part.locator("tbody tr").count()
    part.locator("input[type=search]").fill(first.upper())
    visible = part.locator("tbody tr:visible").all_inner_texts()
    if not 0 < len(visible) < count or any(first.lower() not in text.lower() for text in visible):
        yield f"filtered by {first!r} a table of {count} rows shows {visible[:3]}"
    yield from looked_at_closely(page, examination)
    yield from ends(page)
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        yield "the page runs off sideways"


def ends(page: Any) -> Iterator[str]:
    """Push the link's slider to both ends, which are 10 Mbit/s and 400 Gbit/s, and look for the assumed computing."""
    for end, wanted in (("min", "10 Mbit/s"), ("max", "400 Gbit/s")):
        page.evaluate(
            "(end) => { const input = document.getElementById('play-rate'); input.value = input[end];"
            " input.dispatchEvent(new Event('input')); }",
            end,
        )
        page.wait_for_timeout(120)
        got = page.locator("#play-rate-control output").inner_text()
        if got != wanted:
            yield f"the link's slider ends at {got}, expected {wanted}"
    assumed = f"Computing a step is taken to last {format_seconds(COMPUTE)}."
    if assumed not in (said := page.locator("#play-answer").inner_text()):
        yield f"the answer {said!r} does not say {assumed!r}"
    page.click("#play .controls button")
    page.wait_for_timeout(120)
    if page.locator("#play-answer").is_visible():
        yield "the report's own answer stands twice"


def unknown_computing(page: Any, path: Path) -> Iterator[str]:
    """Without a computing time its slider has no value until it is moved."""
    page.goto(path.as_uri())
    page.wait_for_timeout(200)
    known, thumb = page.locator("#play-compute-control output"), page.locator("#play-compute.unknown")
    if (known.inner_text(), thumb.count()) != ("not known", 1):
        yield f"a computing time that is not known is shown as {known.inner_text()}"
    move(page, "compute", COMPUTE)
    assumed = f"Computing a step is taken to last {known.inner_text()}."
    said = page.locator("#play-answer").inner_text()
    if thumb.count() or assumed not in said:
        yield f"once moved the slider says {known.inner_text()}, the answer {said!r}"


def looked_at_closely(page: Any, examination: Examination) -> Iterator[str]:
    """Choose a measure of the layers, drill down to one, read values under the pointer, and switch a series off."""
    page.locator("#layer-matrix select").select_option("payload")
    shown = page.locator("#layer-matrix [data-turn]:visible h4").all_inner_texts()
    if shown != ["payload"]:
        yield f"asked for payloads, the layers' table shows {shown}"
    page.locator("#layer-matrix select").select_option("error of a rank")
    page.evaluate("document.querySelector('#layer-0 details').open = false")
    page.locator("#layer-matrix a[href='#layer-0']:visible").click()
    page.wait_for_timeout(200)
    name, replay = next(iter(examination.replays.items()))
    wanted = format_percent(replay.layer_errors[LAYERS[0].name])
    own = page.locator("#layer-0 tbody tr:visible").all_inner_texts()
    if not any(name in row and wanted in row for row in own):
        yield f"{LAYERS[0].name}'s own page shows {own}, expected {name} with {wanted}"
    page.mouse.move(0, 0)
    curve = page.locator("#play-drawing svg")
    curve.scroll_into_view_if_needed()
    # The dashed line stands at the link of the sliders, whose steps the table has.
    line = page.locator("#play-drawing .here").bounding_box()
    box = curve.bounding_box()
    page.mouse.move(line["x"], box["y"] + box["height"] / 2)
    read = dict(row.rsplit(": ", 1) for row in page.locator("#play .tip").inner_text().split("\n")[1:])
    steps = {line: time for line, time in expected(examination, START).items() if line in read}
    if not read or any(not near(read[line], time) for line, time in steps.items()):
        yield f"under the pointer stand {read}, predict says {steps}"
    yield from series_switched(page)


def side_by_side(page: Any, beside: Path) -> Iterator[str]:
    """Choose every measure of two reports that stand side by side; a line for each number that is not the reports'."""
    page.goto((beside / "report.html").as_uri())
    page.wait_for_timeout(200)
    plans: dict[str, dict[str, list[float]]] = json.loads((beside / "report.json").read_text())["plans"]
    texts = {
        "payload": format_bytes,
        "cosine of the update": lambda value: f"{value:.3f}",
        "codec time": format_seconds,
    }
    for measure, pairs in plans.items():
        text = texts.get(measure, format_seconds if measure.startswith("step") else format_percent)
        if not pairs:
            continue
        page.locator("#plans select").select_option(measure)
        rows = page.locator("#plans tbody tr:visible").all()
        got = {row.locator("th").inner_text(): row.locator("td").all_inner_texts()[:2] for row in rows}
        if got != {name: [text(value) for value in pair] for name, pair in pairs.items()}:
            yield f"{measure} of two reports is {got}, report.json says {pairs}"
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        yield "the page of two reports runs off sideways"


def near(one: str, other: str) -> bool:
    """Whether two times are within a quarter of each other: points of the curve lie a tenth of a decade apart."""
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
    first, second = (float(text.split()[0]) * units[text.split()[1]] for text in (one, other))
    return abs(math.log(first / second)) < 0.25


def series_switched(page: Any) -> Iterator[str]:
    """Switch the first series of a figure off and on."""
    box = page.locator(".switches:visible input").first
    if not box.count():
        yield "no figure has series to switch off"
        return
    hidden = "[...document.querySelectorAll('[id*=-series-]')].filter((one) => one.style.display === 'none').length"
    before = page.evaluate(hidden)
    box.click()
    off = page.evaluate(hidden)
    box.click()
    if not off > before == page.evaluate(hidden):
        yield f"switching a series off hides {off - before} lines"


def column(table: Any, number: int) -> list[str]:
    """A column's cells, from above."""
    return [str(text) for text in table.locator(f"tbody tr > :nth-child({number + 1})").all_inner_texts()]


def main() -> int:
    """Run the session in every view, and print what was found."""
    options = browser_options(__doc__)
    failed = 0
    with browser_at(options.browser) as browser, tempfile.TemporaryDirectory() as folder:
        path, examination = written(Path(folder) / "one")
        other, _ = written(Path(folder) / "other", seed=1)
        unknown, _ = written(Path(folder) / "unknown", profile=NOT_MEASURED)
        beside = write_beside(path.parent, other.parent, Path(folder) / "beside").parent
        print(f"report.html: {path.stat().st_size / 1e6:.2f} MB")
        for view, settings in VIEWS.items():
            page, errors = browser.new_context(**settings).new_page(), []
            page.on("console", lambda message, errors=errors: errors.append(message.text))
            page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
            page.goto(path.as_uri())
            page.wait_for_timeout(300)
            found = list(session(page, examination))
            take_picture(page, options.keep, view)
            found += [
                *side_by_side(page, beside),
                *unknown_computing(page, unknown),
                *(f"the console says: {line}" for line in errors),
            ]
            print(f"{view}: {len(MOVES)} moves, {'all held' if not found else f'{len(found)} did not hold'}")
            for line in found:
                print(f"  {line}")
            failed += bool(found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
