"""Fit a link's costs beside bandwidth and latency to measured collectives on a network whose speed is known.

No data sheet has the bytes that the ranks' processors can send per second, or the cost of starting a collective. Times
on a rate-limited network show both. A byte takes as long as the slower of link and processors.

Between two neighbouring measured speeds it is known which of them is slower, and the time of an all-reduce is linear
in both costs. Linear least squares within bounds (Stark, Parker 1995, "Bounded-variable least squares") gives the
costs for each such stretch. The stretch with the smallest error is kept. The time per byte of all-gathers, over
that of all-reduces, is the geometric mean over those that were measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from gradlab.analysis.forecast.link import (
    Link,
    Transfer,
    all_gather,
    all_reduce,
    json_rate,
    parse_bandwidth,
    spell_rate,
)
from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, format_counted, format_percent, format_seconds
from gradlab.jsonable import read_json

_FORM = (
    "a JSON list of measured all-reduces, such as "
    '[{"nodes": 4, "bytes": 44700000, "bandwidth": "200mbit", "seconds": 2.95}]'
)
COLLECTIVES = ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"
# Whole numbers beyond this are not exact in a float.
_MOST = 2**53
# A measured time may be shorter than the link allows by this share before a remark asks whether the link was another.
_NOISE = 0.05
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Observation:
    """One measured collective, by nccl-tests or by a loop of dist.all_reduce.

    nodes: number of ranks, at least 2.
    nbytes: bytes on each rank; of an all-gather, those that it sends.
    collective: one of `COLLECTIVES`.
    """

    nodes: int
    nbytes: int
    bits_per_second: float
    seconds: float
    collective: str = ALL_REDUCE

    def __post_init__(self) -> None:
        if self.collective not in COLLECTIVES:
            known = " or ".join(COLLECTIVES)
            raise GradlabError(f"collective = {str(self.collective)[:80]!r}, expected {known}")
        for name, value, least in (("nodes", self.nodes, 2), ("bytes", self.nbytes, 1)):
            if type(value) is not int or not least <= value <= _MOST:
                raise GradlabError(f"{name} = {str(value)[:80]}, expected a whole number from {least}")
        if not self.bits_per_second > 0:
            raise GradlabError(f"bandwidth = {self.bits_per_second:g} bit/s, expected above 0")
        if not 0 < self.seconds < math.inf:
            raise GradlabError(f"seconds = {self.seconds:g}, expected a number above 0")

    def on(self, link: Link) -> Link:
        """Return a copy of the link at this observation's speed. The link at `bits_per_second`."""
        return replace(link, bits_per_second=self.bits_per_second)

    @property
    def transfer(self) -> Transfer:
        """The collective as the link sees it."""
        if self.collective == ALL_GATHER:
            return all_gather(self.nbytes, self.nodes)
        return all_reduce(self.nbytes, self.nodes)

    def relative_error(self, link: Link) -> float:
        """Compute predicted seconds over the measured ones, less 1."""
        tried, transfer = self.on(link), self.transfer
        return (tried.busy_seconds(transfer) + tried.delay_seconds(transfer)) / self.seconds - 1

    def __str__(self) -> str:
        what = f"{self.collective} of " if self.collective != ALL_REDUCE else ""
        return f"{what}{format_bytes(self.nbytes)} at {self.nodes} nodes over {spell_rate(self.bits_per_second)}"


@dataclass(frozen=True)
class Calibration:
    """Fitted costs of a link, and how well they predict the observations.

    host_seconds_per_byte, collective_seconds: costs, see `Link`.
    observations: collectives that the costs were fitted to.
    relative_errors: predicted over measured seconds, less 1, of each observation.
    collective_fitted: whether the observations' sizes differ, so that the cost per collective could be fitted.
    host_seen: whether processors slowed any observation. If not, their cost is 0.
    too_fast: the first observation that took less time than its link alone needs.
    gather_factor: factor, see `Link`; 1 if no all-gather was measured.
    """

    host_seconds_per_byte: float
    collective_seconds: float
    observations: tuple[Observation, ...]
    relative_errors: tuple[float, ...]
    collective_fitted: bool = True
    host_seen: bool = True
    too_fast: Observation | None = None
    gather_factor: float = 1.0

    def applied(self, link: Link) -> Link:
        """Return a copy of a link with the fitted costs."""
        return replace(
            link,
            host_seconds_per_byte=self.host_seconds_per_byte,
            collective_seconds=self.collective_seconds,
            gather_factor=self.gather_factor,
        )

    @property
    def remark(self) -> str:
        """The costs, their error and their limits, in words."""
        worst = max(range(len(self.observations)), key=lambda i: abs(self.relative_errors[i]))
        gathers = sum(seen.collective == ALL_GATHER for seen in self.observations)
        count = len(self.observations) - gathers
        also = f" and {format_counted(gathers, 'all-gather')}" if gathers else ""
        slower = f", and {self.gather_factor:.2f} times as much time per byte of a gather" if gathers else ""
        text = (
            f"Links are calibrated on {format_counted(count, 'measured all-reduce')}{also}: "
            f"{format_seconds(self.host_seconds_per_byte)} per byte on the ranks' processors and "
            f"{format_seconds(self.collective_seconds)} per collective{slower}; predicted times are off by "
            f"{format_percent(abs(self.relative_errors[worst]))} at most ({self.observations[worst]})."
        )
        if not self.collective_fitted:
            text += " All move the same bytes per rank, so that the cost per collective was not fitted."
        if not self.host_seen:
            text += " None was held up by processors: what a byte costs them would show on a faster link alone."
        if self.too_fast is not None:
            text += (
                f" {self.too_fast} took less than its bandwidth, with these headers and latency, allows: "
                "was another link measured?"
            )
        return text

    def to_json(self) -> dict[str, Any]:
        """Write seconds, bytes and bits per second. An infinite speed is the text "unlimited"."""
        return {
            "host_seconds_per_byte": self.host_seconds_per_byte,
            "collective_seconds": self.collective_seconds,
            "gather_factor": self.gather_factor,
            "collective_fitted": self.collective_fitted,
            "host_seen": self.host_seen,
            "observations": [
                {
                    "nodes": seen.nodes,
                    "bytes": seen.nbytes,
                    "bits_per_second": json_rate(seen.bits_per_second),
                    "seconds": seen.seconds,
                    "collective": seen.collective,
                    "relative_error": error,
                }
                for seen, error in zip(self.observations, self.relative_errors, strict=True)
            ],
        }


def calibrate_link(link: Link, observations: Sequence[Observation]) -> Calibration:
    """Fit `host_seconds_per_byte` and `collective_seconds` to all-reduces, then `gather_factor` to all-gathers.
    Squares of relative errors are minimised, as times span orders of magnitude.
    """
    every, observations = observations, [seen for seen in observations if seen.collective == ALL_REDUCE]
    if not observations:
        raise GradlabError(f"no all-reduce to calibrate a link by: expected {_FORM}")
    several = len({seen.transfer.path_bytes for seen in observations}) > 1
    bare = replace(link, host_seconds_per_byte=0.0, collective_seconds=0.0 if several else link.collective_seconds)
    wires = sorted({seen.on(bare).seconds_per_byte for seen in observations})
    fits = [
        _fit(bare, observations, low, high, several) for low, high in pairwise([0.0, *wires, math.inf]) if low < high
    ]
    best = min(fits, key=lambda fit: sum(seen.relative_error(fit) ** 2 for seen in observations))
    host_seen = best.host_seconds_per_byte > (1 + _ROUNDING) * wires[0]
    fitted = best if host_seen else replace(best, host_seconds_per_byte=0.0)
    fitted = replace(fitted, gather_factor=_gather_factor(fitted, every))
    return Calibration(
        fitted.host_seconds_per_byte,
        fitted.collective_seconds,
        tuple(every),
        tuple(seen.relative_error(fitted) for seen in every),
        several,
        host_seen,
        next((seen for seen in every if seen.relative_error(bare) > _NOISE), None),
        fitted.gather_factor,
    )


def _gather_factor(fitted: Link, observations: Sequence[Observation]) -> float:
    """Compute how much longer a byte of an all-gather takes than costs fitted to all-reduces say; 1 if unknown."""
    ratios = []
    for seen in observations:
        if seen.collective == ALL_GATHER:
            link, transfer = seen.on(replace(fitted, gather_factor=1.0)), seen.transfer
            fixed = link.collective_seconds + link.delay_seconds(transfer)
            if seen.seconds > fixed and (expected := link.busy_seconds(transfer) - link.collective_seconds) > 0:
                ratios.append(math.log((seen.seconds - fixed) / expected))
    return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0


def _fit(bare: Link, observations: Sequence[Observation], low: float, high: float, collective: bool) -> Link:
    """Fit the costs with `host_seconds_per_byte` from low to high. No observation's link lies between the two.

    Processors slow the observations on links faster than `low`. Links slow the others.
    """
    start = replace(bare, host_seconds_per_byte=low)
    held_up = [seen.on(bare).seconds_per_byte <= low for seen in observations]
    per_byte = [
        held * seen.transfer.path_bytes / seen.seconds for held, seen in zip(held_up, observations, strict=True)
    ]
    fixed = [collective / seen.seconds for seen in observations]
    more, also = _least_squares([per_byte, fixed], [-seen.relative_error(start) for seen in observations], high - low)
    return replace(bare, host_seconds_per_byte=low + more, collective_seconds=bare.collective_seconds + also)


def _least_squares(columns: Sequence[Sequence[float]], wanted: Sequence[float], most: float) -> tuple[float, float]:
    """Find two factors whose weighted sum of columns is nearest to `wanted`.

    The first factor is from 0 to `most`, the second at least 0. The factor of a column of zeros is 0.
    """
    from scipy.optimize import lsq_linear  # which takes long to import, and few need

    matrix, right = np.array(columns, dtype=float).T, np.array(wanted, dtype=float)
    if not (np.isfinite(matrix).all() and np.isfinite(right).all()):
        raise GradlabError("measured times and link are out of all proportion: look at seconds, bandwidth and headers")
    # Seconds per byte are nine orders of magnitude below those per collective.
    scale = np.where(matrix.any(axis=0), matrix.max(axis=0), 1.0)
    factors = lsq_linear(matrix / scale, right, ([0.0, 0.0], [most * scale[0], math.inf]), method="bvls").x / scale
    return float(factors[0]), float(factors[1])


def read_observations(path: str | os.PathLike[str]) -> list[Observation]:
    """Read measured collectives from a JSON list of objects with nodes, bytes, bandwidth and seconds."""
    entries = read_json(path, _FORM)
    if not isinstance(entries, list) or not entries:
        raise GradlabError(f"{path}: expected {_FORM}")
    return [_observation(entry, f"{path}: entry {number}") for number, entry in enumerate(entries, 1)]


def _observation(entry: object, where: str) -> Observation:
    if not isinstance(entry, dict):
        raise GradlabError(f"{where} is no object: expected {_FORM}")
    missing = [key for key in ("nodes", "bytes", "bandwidth", "seconds") if key not in entry]
    if missing:
        raise GradlabError(f"{where} has no {', '.join(missing)}: expected {_FORM}")
    seconds, bandwidth = entry["seconds"], entry["bandwidth"]
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or abs(seconds) > _MOST:
        raise GradlabError(f"{where}: seconds = {str(seconds)[:80]!r}, expected a number above 0")
    if not isinstance(bandwidth, str):
        raise GradlabError(f'{where}: bandwidth = {str(bandwidth)[:80]}, expected a text such as "200mbit"')
    try:
        kind = entry.get("collective", ALL_REDUCE)
        return Observation(entry["nodes"], entry["bytes"], parse_bandwidth(bandwidth), float(seconds), kind)
    except GradlabError as error:
        raise GradlabError(f"{where}: {error}") from None
