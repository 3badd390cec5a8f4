"""A damaged file, and the damages that do not depend on the format."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One file.

    kind: of damage.
    data: the file's bytes.
    altered: whether the content was altered and sealed again, so that it may be taken.
    expected: what `read` returns for the file before it was damaged.
    read: reads a file, uses what it holds, and returns it as something that can be compared.
    """

    kind: str
    data: bytes
    altered: bool
    expected: Any
    read: Callable[[Path], Any]


class Format(ABC):
    """A kind of file. file_name: under which it is read."""

    file_name = "file"

    def close(self) -> None:  # noqa: B027 - most formats have nothing to close
        """Give back what reading needs, such as a process group."""

    @abstractmethod
    def case(self, draw: np.random.Generator) -> Case:
        """Make a case from random numbers."""


def damaged(data: bytes, draw: np.random.Generator) -> tuple[str, bytes]:
    """Damage bytes in one of several ways."""
    kind = str(draw.choice(["flip", "flips", "cut", "splice", "zeros", "insert", "append"]))
    content, size = bytearray(data), len(data)
    at, run = int(draw.integers(size)), int(draw.integers(1, 200))
    if kind in ("flip", "flips"):
        for place in draw.integers(size, size=1 if kind == "flip" else int(draw.integers(2, 40))):
            content[place] ^= 1 << int(draw.integers(8))
    elif kind == "cut":
        del content[at:]
    elif kind == "splice":
        other = int(draw.integers(size))
        content[at : at + run] = data[other : other + run]
    elif kind == "zeros":
        content[at : at + run] = bytes(len(content[at : at + run]))
    elif kind == "insert":
        content[at:at] = draw.bytes(run)
    else:
        content += draw.bytes(run)
    return kind, bytes(content)


ODD = (
    *(None, True, -1, 0, 1, 2, 10**30, 2**63, 0.5, -0.0, 1e308, 1e-320, "", "x" * 1000, "nan", "1", [], {}, [[]]),
    *({"a": 1}, [0] * 1000, "\ud800", "\x1b[31m", "$\\frac{$", "0", [1, 2], [-1], [2**40], "topk", "gradiveq"),
)


def odd(draw: np.random.Generator) -> Any:
    """Return a value of its own."""
    return copy.deepcopy(ODD[int(draw.integers(len(ODD)))])


def altered_json(value: Any, draw: np.random.Generator) -> Any:
    """Alter one to three places of plain JSON: another value, none at all, a neighbour's, or one twice."""
    value = copy.deepcopy(value)
    for _ in range(int(draw.integers(1, 4))):
        places = list(_places(value))
        if not places:
            return odd(draw)
        holder, key = places[int(draw.integers(len(places)))]
        what = int(draw.integers(5))
        if what == 0 and isinstance(holder, dict):
            del holder[key]
        elif what == 1:
            other, name = places[int(draw.integers(len(places)))]
            holder[key] = copy.deepcopy(other[name])
        elif what == 2 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif what == 3 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * int(draw.choice([-1, 2, 1000, 10**12])) + int(draw.integers(-1, 2))
        else:
            holder[key] = odd(draw)
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)
