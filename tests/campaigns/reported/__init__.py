"""Cases of tests/campaigns/reports.py: public reports of other tools, and what the same does here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.process_pool import ProcessPool


@dataclass(frozen=True)
class Workplace:
    """What a case may use.

    Attributes:
        folder: an empty one of its own.
        pool: two real ranks that run `"module:function"` of tests.
    """

    folder: Path
    pool: ProcessPool


@dataclass(frozen=True)
class Case:
    """A report.

    Attributes:
        where: repository and number, "h5py/h5py#2289".
        met: what its author met, in some words.
        tried: does the same here; returns what came, raises where that is not right.
    """

    where: str
    met: str
    tried: Callable[[Workplace], str]

    @property
    def address(self) -> str:
        """Where the report is."""
        repository, _, number = self.where.partition("#")
        return f"https://github.com/{repository}/issues/{number}"

    @property
    def name(self) -> str:
        """What was tried, as the first line of the function's docstring says."""
        return (self.tried.__doc__ or "").strip().splitlines()[0].rstrip(".")


CASES: list[Case] = []


def report(where: str, met: str) -> Callable[[Callable[[Workplace], str]], Callable[[Workplace], str]]:
    """Add a case to the table."""

    def added(tried: Callable[[Workplace], str]) -> Callable[[Workplace], str]:
        CASES.append(Case(where, met, tried))
        return tried

    return added
