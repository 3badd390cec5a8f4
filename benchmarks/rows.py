"""Rows of a campaign, one line of JSON each, in a file that a later run goes on with."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path | None) -> list[Row]:
    """Return the rows of a file; none if there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def has(rows: Sequence[Row], key: Row) -> bool:
    """Say whether a row has all values of a key."""
    return any(key.items() <= row.items() for row in rows)


def keep(path: Path | None, row: Row) -> Row:
    """Append a row to a file, if there is one, and return it."""
    if path:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def add(path: Path, row: Row, unshown: Collection[str] = ()) -> None:
    """Append a row to a file, and print it without what is too long for a line."""
    keep(path, row)
    print(json.dumps({key: value for key, value in row.items() if key not in unshown}), flush=True)
