"""The metric that runs are judged by (accuracy, perplexity, ...), as it stands in their reports.

A run's report names it under `metric`, with its values while training (`scores`) and at the end (`final_score`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gradlab.formatting import format_number, format_percent

# Results of different seeds differ by about this much: percentages in points, other metrics relatively.
POINTS_NOISE, RELATIVE_NOISE = 0.02, 0.03


@dataclass(frozen=True)
class Metric:
    """The measure by which runs are judged.

    better: whether higher or lower values are better.
    form: "percent" if values are fractions that people read as percentages, else "number".
    """

    name: str
    better: Literal["higher", "lower"]
    form: Literal["percent", "number"]

    def to_json(self) -> dict[str, str]:
        """Write what a run's report keeps."""
        return {"name": self.name, "better": self.better, "form": self.form}

    def text(self, value: float | None) -> str:
        """Write a value as people read it."""
        return format_percent(value) if self.form == "percent" else format_number(value)

    @property
    def label(self) -> str:
        """The label of an axis."""
        return f"test {self.name}, %" if self.form == "percent" else f"test {self.name}"

    def drawn(self, values: Any) -> np.ndarray:
        """Convert values to an axis's scale; values that are not finite become NaN, which is not drawn."""
        numbers = np.asarray(values, dtype=float) * (100 if self.form == "percent" else 1)
        return np.where(np.isfinite(numbers), numbers, np.nan)

    def limit(self, reference: float) -> float:
        """Give the worst value that is as good as `reference` within noise."""
        noise = POINTS_NOISE if self.form == "percent" else RELATIVE_NOISE * abs(reference)
        return reference + noise if self.better == "lower" else reference - noise

    def worse(self, value: float | None, reference: float) -> bool:
        """Say whether a value is worse than `reference` beyond noise. A missing or infinite value is worse than any."""
        if not is_finite(value):
            return True
        limit = self.limit(reference)
        return float(value or 0.0) > limit if self.better == "lower" else float(value or 0.0) < limit


def is_finite(value: float | None) -> bool:
    """Say whether there is a value, and it is a finite number."""
    return value is not None and math.isfinite(value)


def metric_of(runs: Iterable[Mapping[str, Any]]) -> Metric:
    """Give the metric of the first run that names one; accuracy, if none does."""
    for run in runs:
        if metric := run.get("metric"):
            return Metric(metric["name"], metric["better"], metric["form"])
    return Metric("accuracy", "higher", "percent")


def scores(run: Mapping[str, Any]) -> list[Any]:
    """Return the metric while training as [step, value] pairs, None for values that were not finite; empty if not
    measured."""
    return run.get("scores") or []


def final_score(run: Mapping[str, Any]) -> float | None:
    """Give the metric at the end; None if it was not measured, or not finite."""
    value = run.get("final_score")
    return value if is_finite(value) else None
