"""Plain JSON: the one way in which results, settings and reports are written, and files of it are read."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from gradlab.errors import GradlabError

_MOST_BYTES = 2**27
_MOST_VALUES = 2**22  # a few characters of JSON may stand for an object of a hundred bytes


def read_json(
    path: str | os.PathLike[str], expected: str, most_bytes: int = _MOST_BYTES, most_values: int = _MOST_VALUES
) -> Any:
    """Read a JSON file that may hold anything, in memory that its size bounds; `expected` is in words. A larger file,
    more than about `most_values` values, and what is not JSON are refused. A name that ends in .gz is unpacked."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise GradlabError(f"{path} is no file: expected {expected}")
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            written = file.read(most_bytes + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise GradlabError(f"{path} is not gzip, or cut off: expected {expected}") from None
    if len(written) > most_bytes:
        raise GradlabError(f"{path}: larger than {most_bytes} bytes: expected {expected}")
    if sum(map(written.count, b"[{:,")) > most_values:
        raise GradlabError(f"{path}: more than {most_values} values: expected {expected}")
    try:
        return json.loads(written.decode())
    except (ValueError, RecursionError):
        raise GradlabError(f"{path} is not JSON: expected {expected}") from None


class Jsonable:
    """A base of frozen dataclasses: `to_json` writes every field, but those marked with the metadata json=False."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, by field."""
        assert is_dataclass(self)
        written = (item for item in fields(self) if item.metadata.get("json", True))
        return {item.name: plain(getattr(self, item.name)) for item in written}


def plain(value: Any) -> Any:
    """Return the value in terms of dict, list, str, int, float, bool and None: of `to_json`, fields or elements, else
    its text. Numbers that are not finite become None."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, type):  # it has the methods of its instances
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if is_dataclass(value):
        return Jsonable.to_json(value)  # type: ignore[arg-type]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
