"""The glossary has an entry for every column of a table that the code prints."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from gradlab.runtime.engine.statistics import StepRecord

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"
PACKAGES = (
    "gradlab",
    "gradlab.analysis.corpus",
    "gradlab.cli",
    "gradlab.cli.fit",
    "gradlab.analysis.questions",
    "gradlab.analysis.report",
    "gradlab.runtime",
)
# The argument that holds a table's columns, by the function that makes one.
MAKERS = {"print_table": 1, "Table": 1, "_table": 0}
COLUMNS = re.compile(r"columns|header|head|\w*_COLUMNS|HEADER")
# Column heads that mean what a dictionary says.
PLAIN = {
    "changed", "closed", "computed", "counted", "elements", "lost", "paper", "problems", "shape",
    "time", "what it does", "what it is", "what was found",
}  # fmt: skip


def rows() -> list[list[str]]:
    """Cells of the glossary's table: term, meaning, where it appears."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def explained() -> set[str]:
    """Everything that has an entry: terms, and the column heads and keys that show them."""
    names = set()
    for term, _, where in rows():
        names |= {term, re.sub(r" \(.*\)", "", term)}
        names |= {*re.findall(r'"([^"]+)"', where), *re.findall("`([^`]+)`", where)}
    return names


def heads() -> dict[str, str]:
    """Column heads of all tables, each with a module that prints it."""
    result = {}
    for package in PACKAGES:
        (folder,) = importlib.import_module(package).__path__
        for path in sorted(Path(folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                result |= {head: f"{package}.{path.stem}" for columns in _columns(node) for head in _texts(columns)}
    return result


def _columns(node: ast.AST) -> Iterator[ast.expr]:
    """What a node names as the columns of a table."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and COLUMNS.fullmatch(target.id) for target in targets):
            yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        place = MAKERS.get(node.func.id, len(node.args))
        if place < len(node.args):
            columns = node.args[place]
            assert not isinstance(columns, ast.Name) or COLUMNS.fullmatch(columns.id), f"{columns.id}: name it columns"
            yield columns


def _texts(columns: ast.expr) -> Iterator[str]:
    """Strings of a tuple or list; of one that is put together, what it begins with."""
    for element in getattr(columns, "elts", ()):
        parts = element.values if isinstance(element, ast.JoinedStr) else [element]
        texts = [part.value.strip(" ,") for part in parts if isinstance(part, ast.Constant)]
        yield from [text for text in texts if text][:1]


def test_every_column_of_a_table_has_an_entry_and_no_other() -> None:
    seen = heads()
    assert {"error of the mean", "payload/step", "delta", "loss, random basis", "held out"} <= set(seen)
    missing = {head: module for head, module in seen.items() if head not in explained() | PLAIN}
    assert not missing, f"{GLOSSARY.name}: explain them, or say that they are plain words"
    quoted = {head for row in rows() for head in re.findall(r'"([^"]+)"', re.sub("`[^`]+`", "", row[2]))}
    assert quoted | PLAIN <= set(seen), "no table has these columns now"


def test_what_the_runtime_measures_of_a_step_has_an_entry() -> None:
    assert not {field.name for field in fields(StepRecord)} - explained()


def test_entries_are_in_order_each_one_sentence_with_a_place() -> None:
    terms = [row[0] for row in rows()]
    assert terms == sorted(set(terms), key=str.casefold)
    for row in rows():
        assert len(row) == 3, row
        assert all(row), row
        assert row[1].endswith("."), row
        assert ". " not in row[1], row
