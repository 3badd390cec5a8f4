"""Whether the order of plans by error is the same all through a run, or a matter of when one looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import rankdata

_MOST_WINDOWS = 12
_FEWEST_STEPS = 3  # in a window


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rho of two rows of values (P,), ties at their mean rank; 1 where neither tells any apart, 0 where one
    does not."""
    a, b = (rankdata(values) - (len(values) + 1) / 2 for values in (first, second))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    if scale > 0:
        return float(a @ b) / scale
    return float(not a.any() and not b.any())


def ranking_stability(replays: Mapping[str, Mapping[str, Any]], measure: str = "cosine") -> dict[str, Any] | None:
    """How plans replayed side by side (`Replay.to_json()` by name) rank in windows of the run.

    measure: "cosine" of the update with the true mean, larger is better, or "contribution_error" or "aggregate_error",
    smaller is. Only iterations that all plans have, later than what any was fitted on.

    Returns:
        windows: first and last iteration of each; ranks: by name, one per window, 1 the best; whole: over all;
        agreement: Spearman's rho of each window's order with that of all. None for fewer than 2 plans, or windows.
    """
    series = {name: _series(found, measure) for name, found in replays.items()}
    common = sorted(set.intersection(*(set(values) for values in series.values()))) if series else []
    count = min(_MOST_WINDOWS, len(common) // _FEWEST_STEPS)
    if len(series) < 2 or count < 2:
        return None
    sign = -1.0 if measure == "cosine" else 1.0
    table = sign * np.array([[values[step] for step in common] for values in series.values()])  # (P, T)
    parts = np.array_split(np.arange(len(common)), count)
    by_window = np.array([np.median(table[:, part], axis=1) for part in parts])  # (W, P)
    whole = np.median(table, axis=1)
    ranks = np.array([rankdata(row) for row in by_window])
    return {
        "measure": measure,
        "windows": [[int(common[part[0]]), int(common[part[-1]])] for part in parts],
        "ranks": {name: ranks[:, i].tolist() for i, name in enumerate(series)},
        "whole": dict(zip(series, rankdata(whole).tolist(), strict=True)),
        "agreement": [rank_correlation(row, whole) for row in by_window],
    }


def _series(found: Mapping[str, Any], measure: str) -> dict[int, float]:
    last = max(found["fitted_on"], default=-1)
    return {
        step["iteration"]: step[measure]
        for step in found["steps"]
        if step[measure] is not None and step["iteration"] > last
    }
