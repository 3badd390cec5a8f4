"""Errors step by step, as a replay predicts them and a run observes them, brought onto the same iterations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

# Iterations (n,) and contribution errors (n,).
Series = tuple[np.ndarray, np.ndarray]


def predicted_series(replay: Mapping[str, Any]) -> Series:
    """Contribution errors in a replay's JSON after the last iteration that its plan was fitted on."""
    last = max(replay["fitted_on"], default=-1)
    return _series((s["iteration"], s["contribution_error"]) for s in replay["steps"] if s["iteration"] > last)


def in_sample_series(replay: Mapping[str, Any]) -> Series:
    """Contribution errors in a replay's JSON on the iterations that its plan was fitted on."""
    fitted = set(replay["fitted_on"])
    return _series((s["iteration"], s["contribution_error"]) for s in replay["steps"] if s["iteration"] in fitted)


def observed_series(run: Mapping[str, Any]) -> Series:
    """Errors in a run's JSON report; empty where it measured none."""
    errors = run.get("errors") or {"steps": [], "relative": []}
    return _series(zip(errors["steps"], errors["relative"], strict=True))


def median_or_none(values: np.ndarray) -> float | None:
    """The median; None for no value."""
    return float(np.median(values)) if len(values) else None


def common(predicted: Series, observed: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Iterations that both series have, predicted errors and observed errors there: (n,) each."""
    steps, first, second = np.intersect1d(predicted[0], observed[0], return_indices=True)
    return steps, predicted[1][first], observed[1][second]


def _series(pairs: Iterable[tuple[int, float | None]]) -> Series:
    kept = np.array([(step, value) for step, value in pairs if value is not None], dtype=float).reshape(-1, 2)
    return kept[:, 0].astype(int), kept[:, 1]
