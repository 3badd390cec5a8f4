"""Judge what a group without error feedback sends: no residual shows there what goes wrong.

The applied mean D is compared with the inputs x_i of which it is the mean, m. ||D - m||^2 > ||m||^2 says the same as
||D||^2 > 2 <D, m>, and <D, m> is the mean over ranks of <D, x_i>. So the error of the mean is known to be above 1
without m itself, and without a further collective.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gradlab.executor.rules import Finding, finding

LASTING = 5  # measured steps, over which a median is taken
MEAN_ERROR = 1.0  # error of the mean over the mean
LEAST_SHARE = 0.5  # of the gradient, below which more is lost than sent


@dataclass(frozen=True)
class Sent:
    """The contribution C(x) that a group without feedback makes of its compressor input x, with the mean D over ranks.

    energy: ||x||^2.
    contributed: <C(x), x>.
    mean_energy: ||D||^2; None where the mean is no mean of contributions, as under momentum after averaging. With a
        server's residual in D: <D, x> and the squared error of the mean if the ranks' errors are independent.
    mean_product: <D, x>, of this rank or the mean over ranks; None as `mean_energy`.
    """

    energy: float
    contributed: float
    mean_energy: float | None = None
    mean_product: float | None = None

    @property
    def share(self) -> float:
        """The share <C(x), x> / ||x||^2 of x that is sent: 1 without bias, the share of energy for a sparsifier."""
        return self.contributed / self.energy

    @property
    def mean_error(self) -> float | None:
        """Estimate ||D - m|| / ||m|| as sqrt(||D||^2 / <D, m> - 1), m the mean of the ranks' inputs. It is above 1
        where the error is, and equal to it where the error is orthogonal to m, as without bias."""
        if self.mean_energy is None or self.mean_product is None:
            return None
        return error_of(self.mean_energy, self.mean_product)


def error_of(energy: float, product: float) -> float:
    """Return sqrt(||D||^2 / <D, m> - 1) of ||D||^2 and <D, m>: 1 if D is zero, infinity if it points away from m."""
    if not energy:
        return 1.0
    ratio = energy / product if product > 0 else math.inf
    return math.sqrt(max(0.0, ratio - 1.0))


def error_over_ranks(windows: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """Return the median error of the mean over steps, from each rank's (||D||^2, <D, x_i>); None below `LASTING` steps.
    A rank's own <D, x_i> is <D, m> in the mean over ranks alone."""
    if min(map(len, windows)) < LASTING:
        return None
    steps = zip(*(window[-LASTING:] for window in windows), strict=True)
    return median(error_of(*map(sum, zip(*step, strict=True))) for step in steps)


def mean_error(group: str | None, step: int | None, error: float | None) -> Finding | None:
    """Judge the median error of the mean, over the mean."""
    if error is None or error <= MEAN_ERROR:
        return None
    seen = f"the error of the mean is {error:.3g} times the mean, expected at most {MEAN_ERROR:g}"
    return finding("mean_error", seen, error, MEAN_ERROR, group=group, step=step)


class SentWatch:
    """The last measured steps of a group without feedback."""

    def __init__(self, group: str) -> None:
        self.group = group
        self._means: deque[tuple[float, float]] = deque(maxlen=LASTING)
        self._shares: deque[float] = deque(maxlen=LASTING)

    def add(self, step: int, sent: Sent) -> list[Finding]:
        """Judge a measured step; one without a gradient is not judged."""
        if not sent.energy > 0:
            return []
        self._shares.append(sent.share)
        if sent.mean_energy is not None and sent.mean_product is not None:
            self._means.append((sent.mean_energy, sent.mean_product))
        where, found = {"group": self.group, "step": step}, []
        if (one := mean_error(self.group, step, error_over_ranks([self.means]))) is not None:
            found.append(one)
        if len(self._shares) == LASTING and (share := median(self._shares)) < LEAST_SHARE:
            seen = f"{share:.1%} of the gradient is sent, and the rest is never sent, as the codec has no feedback"
            found.append(finding("never_sent", seen, 1 - share, 1 - LEAST_SHARE, **where))
        return found

    @property
    def means(self) -> list[tuple[float, float]]:
        """(||D||^2, <D, x>) of the last measured steps; zeros where they are not finite."""
        return [pair if all(map(math.isfinite, pair)) else (0.0, 0.0) for pair in self._means]
