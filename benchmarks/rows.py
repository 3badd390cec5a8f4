"""Command lines of benchmarks, their rows in files of one line of JSON each, and tables in Markdown."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def options(text: str | None, *places: tuple[str, Collection[str]], **named: Any) -> argparse.Namespace:
    """Read a benchmark's command line, with the text of --help.

    Args:
        places: names of arguments without a flag, each with the words that it may be.
        named: default of each option, which also says its type. A type: there is no default. False: a flag. A mapping:
            one of its keys, the first by default. A list: several of its words, or other numbers. A tuple: others too,
            or of a type none.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, words in places:
        parser.add_argument(name, choices=list(words))
    for name, default in named.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **_option(default))
    return parser.parse_args()


def _option(default: Any) -> dict[str, Any]:
    if default is False:
        return {"action": "store_true"}
    if isinstance(default, type):
        return {"type": default}
    if isinstance(default, Mapping):
        return {"choices": list(default), "default": next(iter(default))}
    if isinstance(default, tuple) and isinstance(default[0], type):
        return {"nargs": "+", "type": default[0], "default": []}
    if isinstance(default, list | tuple):
        kind = type(default[0])
        among = {"choices": default} if kind is str and isinstance(default, list) else {}
        return {"nargs": "+", "default": list(default), "type": kind, **among}
    return {"type": type(default), "default": default}


def read(path: Path | None) -> list[Row]:
    """Return the rows of a file; none if there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def has(rows: Sequence[Row], key: Row) -> bool:
    return any(key.items() <= row.items() for row in rows)


def missing(path: Path | None, keys: Iterable[Row]) -> Iterator[Row]:
    """Yield the keys of which a file has no row when their turn comes."""
    return (key for key in keys if not has(read(path), key))


def fill(path: Path | None, keys: Iterable[Row], make: Callable[[Row], Row], unshown: Collection[str] = ()) -> None:
    """Make the rows that a file lacks, add them to it, and print them. make: gives a key's other values."""
    for key in missing(path, keys):
        add(path, key | make(key), unshown)


def keep(path: Path | None, row: Row) -> Row:
    """Append a row to a file, if there is one, and return it."""
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def add(path: Path | None, row: Row, unshown: Collection[str] = ()) -> None:
    """Append a row to a file, and print it without what is too long for a line."""
    keep(path, row)
    print(json.dumps({key: value for key, value in row.items() if key not in unshown}), flush=True)


def finite(value: float | None) -> float | None:
    """Return the value; None if it is not finite, as JSON knows no NaN."""
    return value if value is not None and math.isfinite(value) else None


def mean(rows: Iterable[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return rows by what a key says of them, in order."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
