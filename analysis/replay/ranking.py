"""Whether the order of plans by error is the same all through a run, or a matter of when one looks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from gradlab.analysis.intervals import rank_correlation
from gradlab.analysis.replay.result import Replay
from gradlab.jsonable import Jsonable

_MOST_WINDOWS = 12
_FEWEST_STEPS = 3  # in a window


@dataclass(frozen=True)
class Ranking(Jsonable):
    """How plans rank in windows of a run; 1 is the best.

    windows: first and last iteration of each, (w,); ranks: by plan, (w,); whole: by plan, over all windows; agreement:
    Spearman's rho of each window's order with that of all, (w,); agreement_intervals: of each, (w,), its low and high
    end at 95 %, None for fewer than 5 plans (`gradlab.analysis.intervals.rank_correlation`).
    """

    measure: str
    windows: list[tuple[int, int]]
    ranks: dict[str, list[float]]
    whole: dict[str, float]
    agreement: list[float]
    agreement_intervals: list[tuple[float, float] | None]


def ranking_stability(replays: Mapping[str, Replay]) -> Ranking | None:
    """Rank plans by windows of the run, on iterations later than any fit; None for fewer than 2 plans or windows."""
    series = {name: _series(replay) for name, replay in replays.items()}
    common = sorted(set.intersection(*(set(values) for values in series.values()))) if series else []
    count = min(_MOST_WINDOWS, len(common) // _FEWEST_STEPS)
    if len(series) < 2 or count < 2:
        return None
    table = -np.array([[values[step] for step in common] for values in series.values()])  # (P, T)
    parts = np.array_split(np.arange(len(common)), count)
    by_window = np.array([np.median(table[:, part], axis=1) for part in parts])  # (W, P)
    whole = np.median(table, axis=1)
    ranks = np.array([rankdata(row) for row in by_window])
    agreement = [rank_correlation(row, whole) for row in by_window]
    return Ranking(
        "cosine",
        windows=[(common[part[0]], common[part[-1]]) for part in parts],
        ranks={name: ranks[:, i].tolist() for i, name in enumerate(series)},
        whole=dict(zip(series, rankdata(whole).tolist(), strict=True)),
        agreement=[one.rho for one in agreement],
        agreement_intervals=[one.interval for one in agreement],
    )


def _series(replay: Replay) -> dict[int, float]:
    """Finite cosines by iteration, over the judged steps."""
    values = {step.iteration: step.cosine for step in replay.judged}
    return {iteration: value for iteration, value in values.items() if value is not None and math.isfinite(value)}
