"""Accordion's critical regimes, against its Algorithm 1 written out for one layer."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from gradlab.plan.refresh import is_critical
from support.laws import law

NORMS = st.sampled_from([0.0, 0.5, 0.75, 1.0, 1.5, 2.0, math.nan])
RATES = st.sampled_from([0.01, 0.069, 0.07, 0.099, 0.1, math.nan])


def by_hand(before: float, now: float, rate_before: float, rate: float, eta: float, least_decay: float) -> bool:
    """One layer, case by case."""
    if math.isnan(before) or math.isnan(now):
        return True
    if not math.isnan(rate) and not math.isnan(rate_before) and rate < (1 - least_decay) * rate_before:
        return True
    if before == 0:
        return now != 0
    return abs(before - now) / before >= eta


@law(
    st.lists(st.tuples(NORMS, NORMS, RATES, RATES), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.sampled_from([0.0, 0.3, 0.5]),
)
def test_each_layer_is_judged_for_itself(layers: list[tuple[float, ...]], eta: float, least_decay: float) -> None:
    flags = is_critical(*np.array(layers).T, eta=eta, least_decay=least_decay)
    assert flags.tolist() == [by_hand(*layer, eta, least_decay) for layer in layers]
