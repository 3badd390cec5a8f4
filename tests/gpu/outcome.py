"""What a check finds, and where it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

PASSED, FAILED, MEASURED, NOT_RUN = "passed", "FAILED", "measured", "not run"


@dataclass(frozen=True)
class Outcome:
    """status: one of the four above; found: what came out; expected: what was allowed."""

    status: str
    found: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Place:
    """Where a check runs.

    device: of this rank; group: the ranks' process group, and spare: a second one, for a `CompressionState`; both None
    where one process runs alone; folder: for files, shared by the ranks; numel: elements of what is timed.
    """

    rank: int
    world_size: int
    device: torch.device
    folder: Path
    numel: int
    group: dist.ProcessGroup | None = None
    spare: dist.ProcessGroup | None = None


Check = Callable[[Place], Outcome]


@dataclass
class Difference:
    """The largest difference seen so far, ||a - b|| / ||b|| in each layer, and whether all were equal bit for bit."""

    largest: float = 0.0
    where: str = ""
    bitwise: bool = True
    compared: int = field(default=0)

    def add(self, name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        got, expected = got.detach().cpu(), expected.detach().cpu()
        self.compared += 1
        if got.shape == expected.shape and got.dtype == expected.dtype and torch.equal(got, expected):
            return
        self.bitwise = False
        gap = float("inf")
        if got.shape == expected.shape:
            norm = float(expected.double().norm())
            gap = float((got.double() - expected.double()).norm()) / (norm or 1.0)
        if not gap <= self.largest:  # NaN too
            self.largest, self.where = gap, name

    def add_all(self, prefix: str, got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
        """Compare by name. A name that one side lacks is an infinite difference."""
        if different := set(got) ^ set(expected):
            self.bitwise, self.largest, self.where = False, float("inf"), f"{prefix} {min(different)}"
        for name in set(got) & set(expected):
            self.add(f"{prefix} {name}", got[name], expected[name])

    def outcome(self, tolerance: float) -> Outcome:
        """Passed if nothing differs by more than `tolerance`; 0: bit for bit."""
        sound = self.compared > 0 and (self.bitwise or self.largest <= tolerance)
        found = "bit for bit" if self.bitwise else f"{self.largest:.1e} ({self.where})"
        expected = f"<= {tolerance:.0e}" if tolerance else "bit for bit"
        return Outcome(PASSED if sound else FAILED, found if self.compared else "nothing was compared", expected)


def all_true(facts: Mapping[str, bool]) -> Outcome:
    """Passed if every one of the named facts holds."""
    wrong = [name for name, holds in facts.items() if not holds]
    return Outcome(FAILED if wrong else PASSED, "not so: " + "; ".join(wrong) if wrong else "; ".join(facts))


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """One check's outcome from those of all ranks; the first, of several that are as bad."""
    order = [FAILED, NOT_RUN, MEASURED, PASSED]
    return min(outcomes, key=lambda outcome: (order.index(outcome.status), outcome.found == "bit for bit"))
