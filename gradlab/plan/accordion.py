"""Accordion's critical regimes: there little is compressed, elsewhere much.

Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Adaptive gradient communication via critical learning regime
identification" (Accordion), MLSys 2021, Algorithm 1. A layer is in a critical regime while the norm of its accumulated
gradient changes fast from one window of iterations to the next, | ||g_t|| - ||g_(t-1)|| | / ||g_(t-1)|| >= eta, and
after its learning rate has fallen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradlab.errors import GradlabError

ETA = 0.5  # as Accordion's authors suggest, and L-GreCo takes (section 5.3)
# Share that a learning rate falls by. Published is any fall: under a schedule that falls all the time every window is
# critical then.
DECAY = 0.3


def is_critical(
    before: np.ndarray,
    now: np.ndarray,
    rate_before: np.ndarray,
    rate: np.ndarray,
    *,
    eta: float = ETA,
    least_decay: float = DECAY,
) -> np.ndarray:
    """Return which layers, (layers,), are in a critical regime: their norms change by `eta` or more, or rates fall by
    `least_decay`. A norm that is not known (NaN) makes one critical; from zero every change is fast."""
    unknown = np.isnan(before) | np.isnan(now)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.abs(now - before) / before
    fast = np.where(before > 0, change >= eta, now > 0)
    return np.asarray(unknown | fast | (rate < (1 - least_decay) * rate_before))


@dataclass(frozen=True)
class Accordion:
    """Two settings for each group that a plan is chosen anew for, one for critical regimes (Alimohammadi et al.,
    "L-GreCo", MLSys 2024, section 5.3: Accordion's choice is the default whose error is the budget of the search).

    least: index of the least compressed setting by group name, for critical regimes.
    most: index of the most compressed setting by group name, for all others.
    eta: the least relative change of a norm in a critical regime.
    least_decay: the share that a learning rate has to fall by for one.
    """

    least: Mapping[str, int]
    most: Mapping[str, int]
    eta: float = ETA
    least_decay: float = DECAY

    def __post_init__(self) -> None:
        for name, high in (("eta", float("inf")), ("least_decay", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < high:
                raise GradlabError(f"accordion: {name} = {str(value)[:80]}, expected a number from 0, below {high:g}")

    def to_json(self) -> dict[str, Any]:
        return {
            "least": dict(self.least),
            "most": dict(self.most),
            "eta": self.eta,
            "least_decay": self.least_decay,
        }

    @classmethod
    def from_json(cls, value: Any) -> Accordion:
        """Raises GradlabError for anything but what `to_json` writes."""
        sound = isinstance(value, dict) and set(value) == {"least", "most", "eta", "least_decay"}
        if not sound or not all(isinstance(value[key], dict) for key in ("least", "most")):
            raise GradlabError(f"not the Accordion of a refresh: {str(value)[:200]}")
        return cls(**value)
