"""Errors, costs and a uniform plan: the tables that a setting per layer is chosen from, and the ways to choose."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from gradlab.analysis.layer_plan.planners import Rows, cgx_kmeans, global_threshold, total, uniform
from gradlab.analysis.replay.error_tables import ErrorTable
from gradlab.errors import GradlabError
from gradlab.knapsack import Allocation, allocate, allocate_discretised

Planner = Callable[..., Allocation]


@dataclass(frozen=True)
class Problem:
    """What a plan by layer is chosen from.

    Args:
        table: errors.
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
        """Mean errors over windows, per layer (candidates,), in units of the uniform plan's error in each window.

        A budget of alpha is then the paper's E_max times alpha, and all windows weigh the same.
        """
        units = self.table.by_window(self.reference, metric)
        return self.table.errors(metric, windows, np.where(units > 0, units, 1.0))

    def planners(self) -> dict[str, Planner]:
        """The planners that these tables allow, by name."""
        planners: dict[str, Planner] = {"L-GreCo, exact": allocate, "L-GreCo, Algorithm 1": allocate_discretised}
        tables = self.table.layers
        one_codec = len({candidate.codec for t in tables for candidate in t.candidates}) == 1
        if not one_codec or len({tuple(map(str, t.candidates)) for t in tables}) > 1:
            return planners
        planners |= {"uniform": uniform, "CGX, k-means": cgx_kmeans}
        if all(candidate.codec == "topk" for t in tables for candidate in t.candidates):
            counts = [np.array([c.build().count(t.layer.numel) for c in t.candidates]) for t in tables]  # type: ignore[attr-defined]
            planners["one threshold"] = partial(global_threshold, counts)
        return planners

    def alone(self, errors: Rows, budget: float) -> dict[str, float]:
        """Cost of the best plan within the budget of one codec and dense layers, by codec.

        A codec that cannot keep the budget is left out. Where there is but one codec, nothing is returned.
        """
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
