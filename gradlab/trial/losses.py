"""A trial's losses: each rank appends a line of JSON per step to a file of its own, and the command reads all of them.

The first line says which rank of how many wrote the file, the others are a loss each. null stands for a loss that is
not finite. A line that is not ended yet does not count.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlab.errors import GradlabError
from gradlab.json_form import require_form

_MOST_BYTES = 2**24  # of a rank's file: 300,000 steps
_MOST_RANKS = 2**16
_HEAD, _LINE = {"rank": int, "world_size": int, "exchanging": int}, {"loss": (float, None)}


class LossFile:
    """A rank's file, while it trains.

    Args:
        folder: folder of the trial.
        rank, world_size: those of this process.
        exchanging: ranks between which the plan runs: of several on a node one.

    Raises:
        GradlabError: if the file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, exchanging: int) -> None:
        self._path = _path(folder, rank)
        self._write({"rank": rank, "world_size": world_size, "exchanging": exchanging}, "w")

    def add(self, loss: float) -> None:
        """Append a step's loss."""
        self._write({"loss": loss if math.isfinite(loss) else None}, "a")

    def _write(self, line: dict[str, Any], mode: str) -> None:
        try:  # not held open: one process may play a thousand ranks
            with open(self._path, mode, encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")
        except OSError as error:
            raise GradlabError(f"gradlab pilot: cannot write {self._path}: {error.strerror or error}") from None


@dataclass(frozen=True)
class Losses:
    """Losses that the ranks of a trial have written so far.

    Attributes:
        by_rank: losses by step, of each rank. NaN: not finite. Empty where a rank has not begun.
        exchanging: ranks between which the plan runs.
    """

    by_rank: tuple[tuple[float, ...], ...] = ()
    exchanging: int = 0

    @property
    def steps(self) -> int:
        """Steps that all ranks have."""
        return min(map(len, self.by_rank), default=0)

    @property
    def means(self) -> list[float]:
        """Mean over ranks of each step that all of them have."""
        steps = list(zip(*self.by_rank, strict=False))
        return [math.fsum(step) / len(step) if all(map(math.isfinite, step)) else math.nan for step in steps]

    def first(self, steps: int) -> list[tuple[float, ...]]:
        """Return the first losses of each rank."""
        return [losses[:steps] for losses in self.by_rank]


def read_losses(folder: Path) -> Losses:
    """Read what the ranks of a trial have written.

    Args:
        folder: folder of the trial.

    Returns:
        The losses; none before the first rank has begun.

    Raises:
        GradlabError: for a file that is not what a rank writes, naming the line.
        OSError: for one that cannot be read.
    """
    found: dict[int, tuple[float, ...]] = {}
    sizes: set[tuple[int, int]] = set()
    for path in sorted(folder.glob(_path(folder, 0).name.replace("00000", "*"))):
        lines = _lines(path)
        if not lines:
            continue
        head = require_form(lines[0], _HEAD, f"{path}, line 1")
        if not 0 <= head["rank"] < head["world_size"] <= _MOST_RANKS or path != _path(folder, head["rank"]):
            raise GradlabError(f"{path}, line 1: rank {head['rank']} of {head['world_size']}, which is not this file's")
        sizes.add((head["world_size"], head["exchanging"]))
        values = [require_form(line, _LINE, f"{path}, line {at}")["loss"] for at, line in enumerate(lines[1:], 2)]
        found[head["rank"]] = tuple(math.nan if value is None else float(value) for value in values)
    if len(sizes) > 1:
        raise GradlabError(f"{folder}: ranks of {sorted(sizes)} (all, exchanging) wrote here, expected one number")
    ranks, exchanging = max(sizes, default=(0, 0))
    return Losses(tuple(found.get(rank, ()) for rank in range(ranks)), exchanging)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"losses-{rank:05d}.jsonl"


def _lines(path: Path) -> list[Any]:
    """Parse the lines that are ended."""
    with open(path, "rb") as file:
        written = file.read(_MOST_BYTES + 1)
    if len(written) > _MOST_BYTES:
        raise GradlabError(f"{path}: larger than {_MOST_BYTES} bytes: expected losses of a trial")
    whole, _, _ = written.rpartition(b"\n")
    found = []
    for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
        try:
            found.append(json.loads(line.decode()))
        except (ValueError, RecursionError):
            raise GradlabError(f"{path}, line {number}: {line[:60]!r} is not JSON") from None
    return found
