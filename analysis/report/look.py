"""How much of a recording a report measures: as much as an interval needs, or as little as a first look does."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gradlab.analysis.measure.between_ranks import BetweenRanks
from gradlab.analysis.measure.limits import LimitExtent
from gradlab.jsonable import Jsonable


@dataclass(frozen=True)
class Bounded(Jsonable):
    """A number of iterations that follows from `values` over all ranks, between `fewest` and `most`."""

    fewest: int
    most: int
    values: int

    def iterations(self, values: int) -> int:
        """The number of iterations where one holds so many values over all ranks."""
        return int(np.clip(self.values // max(1, values), self.fewest, self.most))


@dataclass(frozen=True)
class Look(Jsonable):
    """The extent of a report's measurements.

    spectrum, signs, replays: iterations of spectra, of signs and of replays.
    search_seconds: budget of the search for settings.
    samples: GradiVeQ's L_t. Half of a shorter trace is fitted, so that the other half can be held out.
    fitted: parameters up to which a GradiVeQ fit of the whole model is made.
    between, limits: extents of the pages of ranks, and of codecs beside their limit.
    figures: number of figures of a section; None: all.
    layer_figures: layers, the largest, that have figures of their own: drawing one takes about as long as measuring it.
    """

    quick: bool = False
    spectrum: Bounded = Bounded(32, 200, 2**31)
    signs: Bounded = Bounded(4, 400, 2**27)
    replays: Bounded = Bounded(8, 40, 4 * 10**8)
    search_seconds: float = 600.0
    samples: int = 100
    fitted: int = 4 * 10**6
    between: BetweenRanks = field(default_factory=BetweenRanks)
    limits: LimitExtent = field(default_factory=LimitExtent)
    figures: int | None = None
    layer_figures: int = 12
    formats: tuple[str, ...] = ("svg", "pdf")


THOROUGH = Look()
QUICK = Look(
    quick=True,
    spectrum=Bounded(4, 32, 2**26),
    signs=Bounded(2, 12, 2**24),
    replays=Bounded(8, 8, 2**24),  # fewer say nothing of a plan with feedback
    search_seconds=120.0,
    samples=24,
    fitted=0,
    between=BetweenRanks(iterations=12, pairs=1, values=1024),
    limits=LimitExtent(positions=8, windows=1, settings=1, layers=8),
    figures=1,
    layer_figures=0,
    formats=("svg",),
)
