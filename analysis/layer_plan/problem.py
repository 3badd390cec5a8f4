"""Errors, costs and a uniform plan: the tables that a setting per layer is chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from gradlab.analysis.replay.error_tables import ErrorTable
from gradlab.errors import GradlabError
from gradlab.knapsack import allocate

Rows = Sequence[np.ndarray]
Choice = Sequence[int] | np.ndarray


def total(rows: Rows, choice: Choice) -> float:
    """Sum over layers the value of each one's chosen setting."""
    return float(np.array([row[index] for row, index in zip(rows, choice, strict=True)]).sum())


@dataclass(frozen=True)
class Problem:
    """Tables that a plan by layer is chosen from.

    costs: per layer (candidates,).
    reference: (layers,), index of the uniform plan's candidate.
    """

    table: ErrorTable
    costs: tuple[np.ndarray, ...]
    reference: np.ndarray

    def errors(self, metric: str, windows: slice) -> list[np.ndarray]:
        """Compute mean errors per layer (candidates,), in units of the uniform plan's error in each window.
        A budget of alpha is then the paper's E_max times alpha, and all windows weigh the same.
        """
        units = self.table.by_window(self.reference, metric)
        return self.table.errors(metric, windows, np.where(units > 0, units, 1.0))

    def alone(self, errors: Rows, budget: float) -> dict[str, float]:
        """Compute the cost of the best plan of one codec and dense layers, by codec; empty for one codec."""
        kinds = [np.array([candidate.codec for candidate in t.candidates]) for t in self.table.layers]
        names = sorted({str(name) for row in kinds for name in row} - {"identity"})
        best: dict[str, float] = {}
        for name in names if len(names) > 1 else ():
            kept = [
                np.where((kind == name) | (kind == "identity"), row, np.inf)
                for kind, row in zip(kinds, errors, strict=True)
            ]
            with suppress(GradlabError):
                best[name] = total(self.costs, allocate(kept, self.costs, budget).choice)
        return best
