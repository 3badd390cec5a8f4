"""A variable whose samples are sorted once, for estimators of information that compare many pairs of few variables."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import ndtri

from gradlab.errors import GradlabError

# With the place of a variable in its pair. Samples of a caller that draws from a seed of one number are others.
_TIE_SEED = (2017, 1709, 6212)


@lru_cache(maxsize=8)
def normal_grid(count: int) -> np.ndarray:
    """Return the normal quantiles of ranks 1 to n over n + 1, rising, (n,), read-only."""
    scores = np.asarray(ndtri(np.arange(1, count + 1) / (count + 1)))
    scores.flags.writeable = False
    return scores


@dataclass(frozen=True)
class Levels:
    """Samples on a grid: the number of each one's level, (n,), and the samples in each, (levels,), none of them 0."""

    number: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, eq=False)
class Variable:
    """Samples of one variable, sorted once: all that estimators take from one variable is computed once and kept.

    kinds: (k,), the different values, rising; place: (n,), the kind of each sample; counts: (k,), samples of each kind.
    """

    kinds: np.ndarray
    place: np.ndarray
    counts: np.ndarray
    _scores: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    _levels: dict[int, Levels] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, values: np.ndarray | Variable) -> Variable:
        """Sort values (n,); a variable is returned as it is."""
        if isinstance(values, Variable):
            return values
        values = np.asarray(values, np.float64).ravel()
        if not np.isfinite(values).all():
            raise GradlabError("mutual information: values must be finite")
        return cls(*np.unique(values, return_inverse=True, return_counts=True))

    def __len__(self) -> int:
        return len(self.place)

    @property
    def values(self) -> np.ndarray:
        """The samples, (n,)."""
        return self.kinds[self.place]

    @property
    def constant(self) -> bool:
        """Whether all samples are equal."""
        return len(self.kinds) == 1

    @property
    def distinct(self) -> bool:
        """Whether no two samples are equal."""
        return len(self.kinds) == len(self.place)

    def permuted(self, generator: np.random.Generator) -> Variable:
        """The same samples in a random order."""
        return Variable(self.kinds, generator.permutation(self.place), self.counts)

    @cached_property
    def ends(self) -> np.ndarray:
        """How many samples are at most each kind, (k,)."""
        return np.cumsum(self.counts)

    @cached_property
    def centres(self) -> np.ndarray:
        """The middle of each kind's normal scores, (k,): samples that are tied have one place."""
        grid = normal_grid(len(self))
        return (grid[self.ends - self.counts] + grid[self.ends - 1]) / 2

    def scores(self, place: int) -> np.ndarray:
        """Compute normal scores (n,), with ties in a random order fixed by `place`, the variable's place in the pair.
        The scores hold the same information as the values (distributional transform: Rueschendorf, JSPI 139, 2009).
        """
        place = 0 if self.distinct else place
        if place not in self._scores:
            drawn = np.random.default_rng([*_TIE_SEED, place]).permutation(len(self))
            rank = np.empty(len(self), np.int64)
            rank[drawn[np.argsort(self.place[drawn], kind="stable")]] = np.arange(len(self))
            self._scores[place] = normal_grid(len(self))[rank]
        return self._scores[place]

    def equal_bins(self, bins: int) -> Levels:
        """Levels of equal width, over the samples' own range."""
        if bins not in self._levels:
            _, number = np.unique(_bins_of(self.kinds, bins), return_inverse=True)
            counts = np.bincount(number, weights=self.counts).astype(np.int64)
            self._levels[bins] = Levels(number[self.place], counts)
        return self._levels[bins]


def _bins_of(values: np.ndarray, bins: int) -> np.ndarray:
    """The bin of equal width, over their own range, that each of rising values falls into: int64 (k,)."""
    low, high = float(values[0]), float(values[-1])
    # Halves, because the width of the whole range may overflow.
    width = high / 2 - low / 2
    if not width > 0:
        return np.zeros(len(values), np.int64)
    places = (values / 2 - low / 2) / width * bins
    return np.minimum(places.astype(np.int64), bins - 1)
