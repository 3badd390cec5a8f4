"""The figure that runs are judged by (accuracy, perplexity, ...), as it stands in their reports.

A run's report names it under `metric`, with its values while training (`scores`) and at the end (`final_score`).
Reports from before that have `accuracies` and `final_accuracy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gradlab.formatting import format_number, format_percent

# One seed's results differ by about this much for no reason: percentages in points, other figures relatively.
POINTS_NOISE, RELATIVE_NOISE = 0.02, 0.03


@dataclass(frozen=True)
class Metric:
    """A metric's name, whether higher or lower is better, and its form: "percent" of a fraction, or "number"."""

    name: str
    better: Literal["higher", "lower"]
    form: Literal["percent", "number"]

    def to_json(self) -> dict[str, str]:
        """What a run's report keeps."""
        return {"name": self.name, "better": self.better, "form": self.form}

    def text(self, value: float | None) -> str:
        """The value as people read it."""
        return format_percent(value) if self.form == "percent" else format_number(value)

    @property
    def label(self) -> str:
        """What an axis says."""
        return f"test {self.name}, %" if self.form == "percent" else f"test {self.name}"

    def drawn(self, values: Any) -> np.ndarray:
        """Values as an axis shows them; what is not finite becomes NaN, which is not drawn."""
        numbers = np.asarray(values, dtype=float) * (100 if self.form == "percent" else 1)
        return np.where(np.isfinite(numbers), numbers, np.nan)

    def limit(self, reference: float) -> float:
        """The worst value that is still as good as `reference`, but for noise."""
        noise = POINTS_NOISE if self.form == "percent" else RELATIVE_NOISE * abs(reference)
        return reference + noise if self.better == "lower" else reference - noise

    def worse(self, value: float | None, reference: float) -> bool:
        """Whether a value is worse than `reference` beyond noise. No finite number is worse than any."""
        if not is_finite(value):
            return True
        limit = self.limit(reference)
        return float(value or 0.0) > limit if self.better == "lower" else float(value or 0.0) < limit


def is_finite(value: float | None) -> bool:
    """Whether there is a value, and it is a finite number."""
    return value is not None and math.isfinite(value)


def metric_of(runs: Iterable[Mapping[str, Any]]) -> Metric:
    """The metric of the first run that names one; accuracy, if none does."""
    for run in runs:
        if found := run.get("metric"):
            return Metric(found["name"], found["better"], found["form"])
    return Metric("accuracy", "higher", "percent")


def scores(run: Mapping[str, Any]) -> list[Any]:
    """The metric while training: [step, value] each, None for what was not finite; empty if it was not measured."""
    return run.get("scores") or run.get("accuracies") or []


def final_score(run: Mapping[str, Any]) -> float | None:
    """The metric at the end; None if it was not measured, or not finite."""
    value = run.get("final_score", run.get("final_accuracy"))
    return value if is_finite(value) else None
