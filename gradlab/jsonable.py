"""Plain JSON: the one way in which results, settings and reports are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


class Jsonable:
    """A base of frozen dataclasses: `to_json` writes every field, but those marked with the metadata json=False."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, by field."""
        assert is_dataclass(self)
        written = (item for item in fields(self) if item.metadata.get("json", True))
        return {item.name: plain(getattr(self, item.name)) for item in written}


def plain(value: Any) -> Any:
    """The value in terms of dict, list, str, int, float, bool and None.

    Numbers that are not finite become None. A value with `to_json` writes itself, a dataclass its fields, an array or
    a tensor its elements, and anything else its text.
    """
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
