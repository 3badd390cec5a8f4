"""Find every figure of the docs' measured tables in the rows of benchmarks/results.

    python benchmarks/figures_check.py [PAGE.md ...]

A table of measured figures, or a block of them, stands below a comment that names what prints it from kept rows:

    <!-- printed by: benchmarks/papers/accuracy.py --out benchmarks/results/accuracy-16.jsonl --table -->

Several commands are parted by semicolons. A block has to consist of lines that they print. Every number of a table
outside its header and first column has to be among the numbers that they print, rounded as it is in the table. A table
without measurements or rows says so:

    <!-- not measured -->          settings, rules, formulas, names
    <!-- no rows: WHY -->          figures of which no rows were kept

The last line counts figures found, figures missing, and tables without rows. The exit code is 1 if a figure is missing,
or a table has no comment.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

# What most commands import, so that their forks have it already.
_FOR_ALL = (
    *("matplotlib.figure", "scipy.stats", "torch.nn.parallel"),
    *(f"gradlab.{name}" for name in ("analysis.layer_plan.lgreco", "analysis.report.examine", "plan", "runtime")),
)
FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).resolve().parent.parent
# Written by commands of gradlab and held by tests of their own, or prose about names alone.
GENERATED = ("methods.md", "glossary.md", "add-a-codec.md")
_COMMENT = re.compile(r"<!-- (printed by|not measured|no rows)(?:: (.*?))? -->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
_FIGURES_OF_A_BLOCK = 12  # decimal numbers from which on a block counts as one of figures


@dataclass(frozen=True)
class Table:
    """A table, or a block, of a page.

    line: of its first line, from 1; comment: the kind and text of the comment above it, None without one.
    """

    page: str
    line: int
    lines: tuple[str, ...]
    block: bool
    comment: tuple[str, str] | None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def figures(self) -> list[str]:
        """Numbers outside the header and the first column; of a block its lines."""
        if self.block:
            return [line for line in self.lines if line.strip()]
        cells = [line.strip().strip("|").split("|")[1:] for line in self.lines[2:]]
        return [number for row in cells for cell in row for number in _NUMBER.findall(cell)]


def tables(page: Path) -> Iterator[Table]:
    """Yield a page's tables and blocks of figures, with the comment right above each."""
    lines = page.read_text(encoding="utf-8").split("\n")
    at = 0
    while at < len(lines):
        first, text, at = at, lines[at].strip(), at + 1
        if text.startswith("|"):
            while at < len(lines) and lines[at].strip().startswith("|"):
                at += 1
            yield Table(page.name, first + 1, tuple(lines[first:at]), False, _above(lines, first))
        elif text.startswith("```"):
            while not lines[at].strip().startswith("```"):
                at += 1
            inside, at = tuple(lines[first + 1 : at]), at + 1
            if len(re.findall(r"\.\d", "\n".join(inside))) >= _FIGURES_OF_A_BLOCK:
                yield Table(page.name, first + 1, inside, True, _above(lines, first))


def _above(lines: Sequence[str], first: int) -> tuple[str, str] | None:
    end = first - 1 if first and lines[first - 1].strip() else first - 2
    start = end
    while start >= 0 and "<!--" not in lines[start] and end - start < 6:
        start -= 1
    match = _COMMENT.fullmatch(" ".join(line.strip() for line in lines[max(0, start) : end + 1]))
    return (match[1], match[2] or "") if match else None


class Printed:
    """Output of commands, each run once, in a fork of this process, which imports for all."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def by(self, command: str) -> str:
        if command not in self._known:
            here, there = FORK.Pipe(duplex=False)
            child = FORK.Process(target=_run, args=(command, there))
            child.start()
            there.close()
            try:
                self._known[command] = here.recv()
            except EOFError:
                raise SystemExit(f"{command}: failed, see above") from None
            finally:
                child.join()
        return self._known[command]


def _run(command: str, there: Connection) -> None:
    script, *arguments = shlex.split(command)
    sys.argv = [script, *(str(ROOT / word) if word.startswith("benchmarks/") else word for word in arguments)]
    folders = [path for path in (ROOT / "benchmarks").iterdir() if path.is_dir()]
    sys.path[:0] = map(str, [(ROOT / script).parent, *folders])
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        try:
            importlib.import_module(Path(script).stem).main()
        except SystemExit as stop:
            if stop.code:
                raise
    there.send(told.getvalue())


def missing(table: Table, printed: str) -> list[str]:
    if table.block:
        known = {" ".join(line.split()) for line in printed.split("\n")}
        return [line for line in table.figures if " ".join(line.split()) not in known]
    numbers = sorted({float(number.replace(",", "")) for number in _NUMBER.findall(printed)})
    return [figure for figure in table.figures if not _is_among(figure.replace(",", ""), numbers)]


def _is_among(figure: str, numbers: Sequence[float]) -> bool:
    """Whether a number, rounded to the figure's digits, gives the figure. A sign that it lacks does not count."""
    decimals = len(figure.partition(".")[2])
    value, signed = float(figure), figure[0] in "+-"
    half = 0.5 * 10.0**-decimals * (1 + 1e-6)
    return any(abs((number if signed else abs(number)) - abs(value) * (value >= 0 or -1)) <= half for number in numbers)


def main() -> int:
    """Check pages, all by default, and print one line per table."""
    for name in _FOR_ALL:
        importlib.import_module(name)
    every = (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    paths = [Path(page) for page in sys.argv[1:]] or every
    printed, found, lost, without = Printed(), 0, 0, 0
    for table in (one for page in paths if page.name not in GENERATED for one in tables(page)):
        if table.comment is None:
            lost += 1
            print(f"{table.place}: no comment says what prints it")
        elif table.comment[0] == "no rows":
            without += 1
            print(f"{table.place}: no rows: {table.comment[1]}")
        elif table.comment[0] == "printed by":
            text = "\n".join(printed.by(command.strip()) for command in table.comment[1].split(";"))
            absent = missing(table, text)
            found, lost = found + len(table.figures) - len(absent), lost + len(absent)
            print(f"{table.place}: {len(table.figures) - len(absent)} found, {len(absent)} missing")
            for figure in absent:
                print(f"    {figure}")
    print(f"{found} figures found, {lost} missing, {without} tables without rows")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
