"""How heavy the house is: counted from the tree, beside the figures of `tests/budget.toml`, which may only fall.

    python tests/support/budget.py            every count beside its figure
    python tests/support/budget.py --write    lower the figures to the counts of today, and raise none

A line of code is neither blank, comment, import nor a docstring's. Members of a class are the functions and the names
that its body defines, public and private.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from typer.main import get_command

from gradlab import codecs, wrappers
from gradlab.cli.main import app
from gradlab.codec.settings import fields_of

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
from support import prose  # noqa: E402

BUDGET = ROOT / "tests" / "budget.toml"
SOURCES = ("gradlab", "capture", "analysis", "runtime", "datasets")
CLASSES = {
    "Codec": "gradlab/codec/contract.py",
    "Compressor": "gradlab/codec/compressor.py",
    "Context": "gradlab/codec/context.py",
    "Exchange": "runtime/exchange.py",
    "Method": "gradlab/codec/method.py",
    "Plan": "gradlab/plan/plan.py",
    "Wrapper": "gradlab/codec/wrapper.py",
}
MOST_ARGUMENTS = 9
MOST_LINES = 60
_FIGURE = re.compile(r"^([\w-]+) = (\d+)$")
Figures = dict[tuple[str, str], int]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def counted() -> Figures:
    """Every count of today, by section and name of `tests/budget.toml`."""
    counts: Counter[tuple[str, str]] = Counter()
    for folder in (*SOURCES, "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            room, text = room_of(path), path.read_text(encoding="utf-8")
            nodes = prose.nodes_of(ast.parse(text))
            docstrings, texts = docstring_lines(nodes), prose.docstrings(nodes)
            counts["code", room] += code_lines(text, docstrings | import_lines(nodes))
            counts["docstrings", room] += len(docstrings)
            counts["files", room] += 1
            counts["arguments", room] += sum(1 for _ in prose.arguments(nodes, texts))
            counts["inversions", room] += sum(1 for _ in prose.inversions(texts))
            for function in (node for node in nodes if folder in SOURCES and isinstance(node, FUNCTIONS)):
                counts["functions", "of_more_than_60_lines"] += len(lines_of(function)) > MOST_LINES
                counts["functions", "of_10_arguments_outside_cli"] += (
                    room != "cli" and arguments(function) > MOST_ARGUMENTS
                )
    return {**counts, **members(), **settings(), **options(), **pages()}


def room_of(path: Path) -> str:
    """The folder of `gradlab/` that a file is in, or the folder of the tree."""
    first, second, *_ = path.relative_to(ROOT).parts
    return second if first == "gradlab" and not second.endswith(".py") else first


def lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def docstring_lines(nodes: Iterable[ast.AST]) -> set[int]:
    """Numbers of the lines that docstrings take."""
    owners = (node for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)))
    return {line for owner in owners if ast.get_docstring(owner, clean=False) for line in lines_of(owner.body[0])}


def import_lines(nodes: Iterable[ast.AST]) -> set[int]:
    """Numbers of the lines that imports take."""
    return {line for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for line in lines_of(node)}


def code_lines(text: str, left_out: set[int]) -> int:
    """Number of lines of code."""
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in left_out for number, line in lines)


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of arguments, self aside."""
    taken = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return sum(argument.arg not in ("self", "cls") for argument in taken)


def members() -> Figures:
    found: Figures = {}
    for name, file in CLASSES.items():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        found["members", name] = sum(isinstance(one, (*FUNCTIONS, ast.Assign, ast.AnnAssign)) for one in body)
    return found


def settings() -> Figures:
    methods = [kind.get(name) for kind in (codecs, wrappers) for name in kind.names()]
    return {("settings", "of_codecs_and_wrappers"): sum(len(fields_of(method.Settings)) for method in methods)}


def options() -> Figures:
    """Options of all commands, `--help` aside, and of the one that has most."""
    each = [sum(one.param_type_name == "option" for one in command.params) for command in commands(get_command(app))]
    return {("options", "of_all_commands"): sum(each), ("options", "of_any_command"): max(each)}


def commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from commands(command.get_command(None, name))


def pages() -> Figures:
    return {
        ("pages", "markdown_bytes_of_docs"): sum(path.stat().st_size for path in (ROOT / "docs").rglob("*.md")),
        ("pages", "lines_of_changelog"): len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()),
    }


def read(text: str) -> Figures:
    """The figures of `tests/budget.toml`: the larger one where a merge left two."""
    section, figures = "", Figures()
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif found := _FIGURE.match(line):
            figures[section, found[1]] = max(int(found[2]), figures.get((section, found[1]), 0))
    return figures


def excesses(counts: Figures, figures: Figures) -> list[str]:
    """A line for each count above its figure; one that has no figure is above it, too."""
    return [
        f"[{section}] {name}: {count:,}, {count - figures.get((section, name), 0):,} above its figure"
        for (section, name), count in sorted(counts.items())
        if count > figures.get((section, name), 0)
    ]


def lowered(text: str, counts: Figures) -> str:
    """The text of `tests/budget.toml` with each figure that is above its count lowered to it."""
    section, lines, figures = "", list[str](), read(text)
    for line in text.splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        if found := _FIGURE.match(line):
            figure = figures.pop((section, found[1]), None)
            if figure is None:  # the second of two
                continue
            line = f"{found[1]} = {min(figure, counts.get((section, found[1]), 0))}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    text, counts = BUDGET.read_text(encoding="utf-8"), counted()
    if "--write" in sys.argv[1:]:
        BUDGET.write_text(lowered(text, counts), encoding="utf-8")
        return
    figures = read(text)
    for (section, name), count in sorted(counts.items()):
        print(f"{section:12} {name:30} {count:>8,} of {figures.get((section, name), 0):>8,}")
    print(*excesses(counts, figures), sep="\n")


if __name__ == "__main__":
    main()
