"""Pages of `gradlab watch --serve` in a real browser, at a desk, in the dark and on a phone, while their files grow.

    make watched [ARGS="--browser /usr/bin/chromium --keep FOLDER"]

needs Chromium and the package playwright, as `make played`. What the page shows is compared with the last line of the
log and with the recording's trace. Exit codes: 0 all held; 1 something did not; 3 there is no browser.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradlab.cli.watch.log import WatchedLog
from gradlab.cli.watch.recording import WatchedTrace
from gradlab.cli.watch.server import ADDRESS, listen
from gradlab.cli.watch.view import Watched, written
from gradlab.trace import Trace
from support.browser import VIEWS, browser_at, browser_options, take_picture
from support.recorded import random_gradients, record

HOSTILE = '<img src=x onerror="console.error(1)">'
STEPS, LAYERS = 300, 12
DARK = "rgb(22, 25, 29)"
PATIENCE = 10_000  # milliseconds until a page has followed its file


def line(step: int) -> dict[str, Any]:
    """What a training logs: a loss that falls, bytes that fall after a dense start, errors and residuals by layer."""
    dense, sent = 44_700_000.0, 44_700_000.0 if step <= 20 else 2_300_000.0
    numbers: dict[str, Any] = {
        **{"step": step, "time": 1.7e9 + 0.21 * step + 0.05 * math.sin(step), "loss": 2.3 * math.exp(-step / 90) + 0.2},
        **{"payload_bytes": sent, "wire_bytes": 1.5 * sent, "finite": 1.0, "compression_ratio": dense / sent},
        **{"ratio_to_16_bits": dense / sent / 2, "wait_seconds": 0.012, HOSTILE: 1.0},
    }
    for layer in range(LAYERS if step > 20 else 0):
        name = f"blocks.{layer}.attention.output_projection.weight"
        numbers[f"relative_error/{name}"] = 0.9 - layer / 40
        numbers[f"residual_norm/{name}"] = 0.4 + layer / 10 + math.log(step) / 20
    if step == 150:
        numbers["rules"] = [f"never_sent: {HOSTILE}: less than half of the gradient is sent (0.31 in the median)"]
    return numbers


def append(log: Path, *lines: Mapping[str, Any]) -> None:
    """Add lines to a log."""
    with open(log, "a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in lines)


@contextmanager
def served(watched: Watched, title: str) -> Iterator[str]:
    """The address of a server."""
    with listen(watched, 0, title) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{ADDRESS}:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def wait_for_head(page: Any, words: str) -> None:
    """Wait until the page's first line has these words. The policy forbids functions that are sent in to look."""
    page.locator("#head", has_text=words).wait_for(timeout=PATIENCE)


def numbers_of(page: Any) -> dict[str, str]:
    """The last numbers, as the page writes them, by name."""
    rows = page.eval_on_selector_all(
        "#numbers-rows tr", "rows => rows.map(row => [row.cells[0].textContent, row.cells[1].textContent])"
    )
    return dict(rows)


def layout(page: Any, dark: bool) -> Iterator[str]:
    """What every page is held to: nothing runs off, colours are those of the view, curves lie inside their frames."""
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        yield "the page runs off sideways"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    if (background == DARK) != dark:
        yield f"the background is {background}"
    outside = page.eval_on_selector_all(
        "#curves svg",
        """drawings => drawings.filter((svg) => {
            const [frame, box] = [svg.getBoundingClientRect(), svg.querySelector("path").getBBox()];
            return frame.width < 100 || box.x < 0 || box.y < 0 || box.x + box.width > 300 || box.y + box.height > 88;
        }).length""",
    )
    if outside:
        yield f"{outside} curves leave their frames"


def of_a_log(page: Any, log: Path) -> Iterator[str]:
    """The page of a log beside the log's last line, before and after it has grown."""
    for step in (STEPS, STEPS + 1):
        if step > STEPS:
            append(log, line(step))
        wait_for_head(page, f"step {step},")
        last, shown = json.loads(log.read_text(encoding="utf-8").splitlines()[-1]), numbers_of(page)
        for name, value in last.items():
            if name in ("step", "time", "rules") or "/" in name:
                continue
            if shown.get(name.replace("_", " ")) != written(name, value):
                yield f"step {step}: {name} is {shown.get(name.replace('_', ' '))}, the log has {value}"
        norms = [value for name, value in last.items() if name.startswith("residual_norm/")]
        if shown.get("residual norm") != written("residual_norm", math.hypot(*norms)):
            yield f"step {step}: the norm of all residuals is {shown.get('residual norm')}"
    figures, curves = page.locator("#curves figure").count(), page.locator("#curves svg").count()
    if curves < 5:
        yield f"{curves} curves are drawn"
    bare = page.locator("#curves figure:not(:has(svg))").all_inner_texts()
    if len(bare) != figures - curves or not bare or any("constant" not in text for text in bare):
        yield f"without a curve are {bare}"
    rules = page.locator("#rules-list li").all_inner_texts()
    if len(rules) != 1 or HOSTILE not in rules[0]:
        yield f"the rules that fired are {rules}"
    if page.locator("img").count():
        yield "a name of the file became an element"


def of_a_recording(page: Any, folder: Path) -> Iterator[str]:
    """The page of a recording beside its trace."""
    wait_for_head(page, "closed")
    with Trace(folder) as trace:
        head, loss = f"{len(trace.steps)} steps on all {trace.world_size} ranks", float(trace.scalars(0)["loss"][-1])
        if not page.inner_text("#head").startswith(head):
            yield f"its first line is {page.inner_text('#head')!r}, the trace has {head}"
        if numbers_of(page).get("loss") != written("loss", loss):
            yield f"the loss is {numbers_of(page).get('loss')}, the trace has {loss}"
        if page.locator("#tables tbody tr").count() != trace.world_size:
            yield f"{page.locator('#tables tbody tr').count()} ranks are listed, the trace has {trace.world_size}"


def session(context: Any, address: str, checks: Any, dark: bool, keep: Path | None, name: str) -> Iterator[str]:
    """Open one page, say what is not as it should be, and keep a picture under a name."""
    page, errors = context.new_page(), []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    yield from checks(page)
    yield from layout(page, dark)
    take_picture(page, keep, name)
    yield from (f"the console says: {error}" for error in errors)
    page.close()


def main() -> int:
    """Open both pages in every view, and print what was found."""
    options = browser_options(__doc__)
    failed = 0
    with browser_at(options.browser) as browser, tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace"
        record(trace, random_gradients(0, 40, 4), metadata={"budget": 10**9}).close()
        for view, settings in VIEWS.items():
            log = Path(place) / f"{view}.jsonl"
            append(log, *map(line, range(1, STEPS + 1)))
            dark, context = settings.get("color_scheme") == "dark", browser.new_context(**settings)
            for what, watched, checks in (
                ("log", WatchedLog(log), lambda page, log=log: of_a_log(page, log)),
                ("recording", WatchedTrace(trace), lambda page: of_a_recording(page, trace)),
            ):
                with served(watched, "run.jsonl" if what == "log" else "trace") as address:
                    found = list(session(context, address, checks, dark, options.keep, f"{what}-{view}"))
                print(f"{view}, {what}: {'all held' if not found else f'{len(found)} did not hold'}")
                for one in found:
                    print(f"  {one}")
                failed += bool(found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
