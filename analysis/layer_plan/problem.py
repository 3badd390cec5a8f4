"""Errors, costs and a uniform plan: the tables that a setting per layer is chosen from."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from gradlab.analysis.layer_plan.planners import Rows, total
from gradlab.analysis.replay.error_tables import ErrorTable
from gradlab.errors import GradlabError
from gradlab.knapsack import allocate


@dataclass(frozen=True)
class Problem:
    """Tables that a plan by layer is chosen from.

    costs: per layer (candidates,).
    reference: (layers,), index of the uniform plan's candidate.
    weights: (layers,), factors of the costs when a plan is chosen; None for 1.
    """

    table: ErrorTable
    costs: tuple[np.ndarray, ...]
    reference: np.ndarray
    weights: np.ndarray | None = None

    @property
    def objective(self) -> list[np.ndarray]:
        """Costs times weights, per layer (candidates,): what a plan makes small."""
        weights = np.ones(len(self.costs)) if self.weights is None else self.weights
        return [row * weight for row, weight in zip(self.costs, weights, strict=True)]

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
                best[name] = total(self.costs, allocate(kept, self.objective, budget).choice)
        return best
