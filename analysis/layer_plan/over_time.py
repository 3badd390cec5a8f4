"""What adaptive planners would choose window by window of a trace: compression over time, and in each bucket.

Alimohammadi et al., "L-GreCo", MLSys 2024, Figs. 9, 12 and 13 and section 5.3: uniform, L-GreCo, CGX's k-means,
Accordion, and L-GreCo with Accordion's choice as its reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradlab.analysis.layer_plan.bucket_time import bucket_of_layers, bytes_by_bucket
from gradlab.analysis.layer_plan.planners import accordion, cgx_kmeans, total
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.knapsack import allocate
from gradlab.layout import Layer
from gradlab.plan.accordion import DECAY, ETA

if TYPE_CHECKING:
    from gradlab.analysis.layer_plan.problem import Problem
    from gradlab.trace import Trace


@dataclass(frozen=True)
class PlannerOverTime(Jsonable):
    """What one planner reaches window by window.

    Args:
        ratio: (windows,), compression ratio of the layers planned.
        mean_ratio: over all windows.
        bytes_by_bucket: (buckets,), mean over windows.
        error: (windows,), in the uniform plan's.
    """

    ratio: np.ndarray
    mean_ratio: float
    bytes_by_bucket: np.ndarray
    error: np.ndarray


@dataclass(frozen=True)
class CompressionOverTime(Jsonable):
    """What every planner reaches.

    Args:
        windows: first and last iteration of each.
        planners: by name.
    """

    windows: tuple[tuple[int, int], ...]
    planners: Mapping[str, PlannerOverTime]


@dataclass(frozen=True)
class PlansOverTime:
    """What each planner chooses window by window.

    Args:
        problem: the tables that planners choose from.
        choices: by planner (windows, layers), indices of candidates.
        critical: (windows, layers), where Accordion sees a critical regime.
        metric: "l2", the paper's, or "squared-l2".
    """

    problem: Problem
    choices: dict[str, np.ndarray]
    critical: np.ndarray
    metric: str

    def compression(self, layers: Sequence[Layer], bucket_cap_mb: float | None = None) -> CompressionOverTime:
        """Measure what each planner reaches.

        Args:
            layers: all of the model, which DDP makes buckets of.
            bucket_cap_mb: DDP's bucket size in MiB; None: DDP's default.
        """
        numbers = bucket_of_layers(layers, bucket_cap_mb)
        planners = {name: self._planner(choices, numbers) for name, choices in self.choices.items()}
        return CompressionOverTime(self.problem.table.windows, planners)

    def _planner(self, choices: np.ndarray, numbers: Mapping[str, int]) -> PlannerOverTime:
        tables, costs = self.problem.table.layers, self.problem.costs
        dense = 4.0 * sum(table.layer.numel for table in tables)
        sizes = np.array([[row[c] for row, c in zip(costs, choice, strict=True)] for choice in choices])
        return PlannerOverTime(
            ratio=dense / sizes.sum(1),
            mean_ratio=dense / float(sizes.sum(1).mean()),
            bytes_by_bucket=bytes_by_bucket([t.layer.name for t in tables], sizes.mean(0).tolist(), numbers),
            error=self._errors(choices),
        )

    def _errors(self, choices: np.ndarray) -> np.ndarray:
        """Errors (windows,) in units of the uniform plan's in the same window."""
        tables = self.problem.table.layers
        rows = [table.errors(self.metric) for table in tables]
        sums = [sum(row[w, c] for row, c in zip(rows, choice, strict=True)) for w, choice in enumerate(choices)]
        units = self.problem.table.by_window(self.problem.reference, self.metric)
        return np.array(sums) / np.where(units > 0, units, 1.0)


def plan_over_time(
    problem: Problem,
    learning_rates: np.ndarray,
    *,
    metric: str = "l2",
    alpha: float = 1.0,
    eta: float = ETA,
    least_decay: float = DECAY,
) -> PlansOverTime:
    """Choose for every window from that window alone, as if planned anew at its end.

    Accordion switches between the most compressed candidate and the least. L-GreCo after Accordion gets the error of
    Accordion's choice as its budget.

    Args:
        problem: errors and costs.
        learning_rates: (windows,), NaN where unknown.
        metric: "l2", the paper's, or "squared-l2".
        alpha: the error allowed, in the uniform plan's.
        eta, least_decay: see `gradlab.plan.accordion.is_critical`.
    """
    table, costs = problem.table, problem.costs
    norms = np.sqrt(np.stack([t.squared_norm for t in table.layers], axis=1))
    critical = accordion(norms, learning_rates, eta=eta, least_decay=least_decay)
    most, least = (np.array([pick(row) for row in costs]) for pick in (np.argmin, np.argmax))
    switched = np.where(critical, least, most)
    choices: dict[str, list[np.ndarray]] = {}
    for place in range(len(table.windows)):
        errors = table.errors(metric, slice(place, place + 1))
        budget = alpha * total(errors, problem.reference)
        choices.setdefault("uniform", []).append(problem.reference)
        choices.setdefault("L-GreCo", []).append(allocate(errors, problem.objective, budget).choice)
        choices.setdefault("Accordion", []).append(switched[place])
        after = allocate(errors, problem.objective, total(errors, switched[place])).choice
        choices.setdefault("L-GreCo + Accordion", []).append(after)
        with suppress(GradlabError):  # clusters need one set of settings for all layers
            choices.setdefault("CGX, k-means", []).append(cgx_kmeans(errors, problem.objective, budget).choice)
    whole = {name: np.array(rows) for name, rows in choices.items() if len(rows) == len(table.windows)}
    return PlansOverTime(problem, whole, critical, metric)


def learning_rates_of(trace: Trace, windows: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Look up the learning rate at the end of each window, (windows,); windows are first and last iterations."""
    recorded = trace.scalars(0)
    rate = dict(zip(recorded["index"].tolist(), recorded["learning_rate"].tolist(), strict=True))
    return np.array([rate.get(last, np.nan) for _, last in windows])
