"""Information that ranks' gradients share over a recorded trace, and their cosine.

LGC (Abrahamyan et al.), sections III and VI-E, measures entropy and mutual information of one layer's gradient on two
nodes, over iterations (Figs. 3, 12) and by layer (Fig. 4), with a histogram. Beside it stand estimators that correct
their bias, and two nulls. Shuffled pairs show what an estimator finds where there is nothing. Pairs that are
`shift` iterations apart show what two gradients share by belonging to the same parameters; only the excess over that is
common to ranks in an iteration.

A sample of each layer's values, in contiguous stretches, is read at a sample of iterations and pairs of ranks. Each
gradient in it is sorted once for all its pairs. Nearest neighbours ("mixed") take longest: they look at every n-th of
these values first, and at more only while the interval over iterations is wide because of that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab.analysis.gradients import finite_positions, read_positions
from gradlab.analysis.intervals import SeriesMean, mean_interval
from gradlab.analysis.measure.agreement import rank_cosine, signal_to_noise
from gradlab.analysis.measure.information import (
    PAPER_BINS,
    Excess,
    NeighborEstimate,
    Variable,
    excess_information,
    mutual_information,
    neighbor_information,
    plug_in,
)
from gradlab.analysis.measure.spectrum import spread
from gradlab.analysis.parallel import share_out_layers
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceSource
FIRST, LAST = "first", "last"  # places that LGC's Fig. 4 marks
CORRECTED = ("copula", "mixed")
_STRETCHES = 8
_FEWEST_VALUES = 256  # of a layer: with fewer, estimates say nothing of one iteration
# Values that nearest neighbours look at: at first, and at most.
_FIRST_VALUES, _MOST_VALUES = 1024, 4096
# It is enough where half of the interval is at most so many bits, or where at most this share of the variance over
# iterations comes from the choice of values: with all values the interval would be at most a seventh narrower.
_NARROW, _MOST_OF_CHOICE = 0.02, 0.25


@dataclass(frozen=True)
class BetweenRanks:
    """How much of a trace is measured: at most so many iterations, pairs of ranks and values of a layer.

    shift: positions between the gradients of the shifted null. None: a quarter of the trace, at most 50.
    bins: number of bins of a second histogram beside LGC's 2^32.
    level: confidence of the intervals.
    """

    iterations: int = 32
    pairs: int = 3
    values: int = 8192
    shift: int | None = None
    bins: int = 1024
    level: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class HistogramSeries(Jsonable):
    """LGC's eq. (1) per iteration, means over pairs of ranks, in bits, (T,) each: see `PlugIn`; and the two nulls."""

    entropy: np.ndarray
    conditional: np.ndarray
    information: np.ndarray
    bias: np.ndarray
    shuffled: np.ndarray
    shifted: np.ndarray


@dataclass(frozen=True)
class EstimatorSeries(Jsonable):
    """A corrected estimator per iteration, (T,), means over pairs of ranks, in bits; shuffled: one shuffled pair.

    samples: values per estimate, which for nearest neighbours are as many as the interval needs.
    """

    samples: int
    paired: np.ndarray
    shifted: np.ndarray
    shuffled: float
    excess: Excess


@dataclass(frozen=True)
class LayerBetweenRanks(Jsonable):
    """One layer's measurements at T iterations.

    values: number of them that were sampled.
    iterations, cosine: (T,); the cosine is a mean over pairs.
    signal_to_noise: ratio in the mean over ranks. None: not known.
    place: marks of `layer_places`.
    """

    name: str
    role: str
    numel: int
    values: int
    iterations: np.ndarray
    pairs: list[tuple[int, int]]
    histograms: dict[int, HistogramSeries]
    estimators: dict[str, EstimatorSeries]
    cosine: np.ndarray
    mean_cosine: SeriesMean
    signal_to_noise: float | None
    place: list[str]


@dataclass(frozen=True)
class TraceBetweenRanks(Jsonable):
    """Measurements of layers, in bits per parameter; shift, shift_iterations: distances of the shifted null."""

    settings: BetweenRanks = field(metadata={"json": False})
    world_size: int
    shift: int
    shift_iterations: int
    skipped_layers: tuple[str, ...]
    layers: tuple[LayerBetweenRanks, ...]
    without_finite_iterations: tuple[str, ...]
    paper_bins: int = PAPER_BINS

    def to_json(self) -> dict[str, Any]:
        """The settings with the measurements."""
        return {**asdict(self.settings), **super().to_json()}


def measure_between_ranks(
    trace: Trace,
    settings: BetweenRanks | None = None,
    *,
    layers: Sequence[str] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> TraceBetweenRanks:
    """Measure what ranks share of each layer's gradient, in bits per parameter."""
    chosen = settings or BetweenRanks()
    shift = _require(trace, chosen)
    named = [trace.layer(name) for name in layers] if layers is not None else list(trace.layers)
    large = [x for x in named if x.numel >= _FEWEST_VALUES and (layers is not None or len(x.shape) > 1)]
    if not large:
        raise GradlabError(f"{trace.path}: no layer of {_FEWEST_VALUES} values or more to measure between ranks")
    given, sharing = (chosen, shift, layer_places(trace)), dict[str, Any](workers=workers, progress=progress)
    measured = share_out_layers(measure_layer, trace, large, *given, what="between ranks", **sharing)
    rows = {row.name: row for row in measured if row is not None}
    return TraceBetweenRanks(
        chosen,
        trace.world_size,
        shift,
        shift_iterations=int(np.median(trace.steps[shift:] - trace.steps[:-shift])),
        skipped_layers=tuple(x.name for x in trace.layers if x not in large),
        layers=tuple(rows[x.name] for x in large if x.name in rows),
        without_finite_iterations=tuple(x.name for x in large if x.name not in rows),
    )


def _require(trace: Trace, chosen: BetweenRanks) -> int:
    """The shift, in positions of the trace."""
    count = len(trace.steps)
    if trace.world_size < 2:
        raise GradlabError(f"{trace.path}: recorded on one rank: nothing to compare between ranks")
    if count < 8:
        raise GradlabError(f"{trace.path}: {count} iterations, expected at least 8 to compare ranks over")
    for name, least in (("iterations", 4), ("pairs", 1), ("values", _FEWEST_VALUES), ("bins", 2)):
        if getattr(chosen, name) < least:
            raise GradlabError(f"{name} = {getattr(chosen, name)}, expected at least {least}")
    shift = max(1, min(50, count // 4)) if chosen.shift is None else chosen.shift
    if not 1 <= shift <= count - 4:
        raise GradlabError(f"shift = {shift} recorded iterations, expected 1 to {count - 4} in this trace")
    return shift


def layer_places(trace: Trace) -> dict[str, list[str]]:
    """Marks by layer name: the first and the last of the matrices."""
    names = [layer.name for layer in trace.layers]
    matrices = [layer.name for layer in trace.layers if len(layer.shape) > 1] or names
    return {name: [FIRST] * (name == matrices[0]) + [LAST] * (name == matrices[-1]) for name in names}


def rank_pairs(world_size: int, most: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """At most `most` pairs of different ranks, drawn without replacement, in ascending order."""
    pairs = list(itertools.combinations(range(world_size), 2))
    if len(pairs) <= most:
        return pairs
    return [pairs[i] for i in sorted(generator.choice(len(pairs), most, replace=False))]


def sampled_columns(numel: int, values: int) -> list[slice]:
    """Choose stretches of equal length, evenly spread, that hold `values` elements, or the whole layer."""
    if numel <= values:
        return [slice(0, numel)]
    length = values // _STRETCHES
    starts = np.linspace(0, numel - length, _STRETCHES).astype(int)
    return [slice(int(first), int(first) + length) for first in starts]


def measure_layer(
    source: TraceSource, layer: Layer, chosen: BetweenRanks, shift: int, places: Mapping[str, list[str]]
) -> LayerBetweenRanks | None:
    """Measure one layer of a trace; None with fewer than 4 finite iterations."""
    generator = np.random.default_rng(chosen.seed)
    with source.open([layer.name]) as trace:
        positions = spread(len(trace.steps) - shift, chosen.iterations)
        pairs = rank_pairs(trace.world_size, chosen.pairs, generator)
        columns = sampled_columns(layer.numel, chosen.values)
        now = _read(trace, layer, positions, columns)
        later = _read(trace, layer, positions + shift, columns)
        whole = finite_positions(trace)
        finite = np.isin(positions, whole) & np.isin(positions + shift, whole)
        steps = np.asarray(trace.steps)[positions][finite]
    now, later = now[finite], later[finite]
    if len(steps) < 4:
        return None
    inner = np.einsum("tnc,tmc->tnm", now, now, dtype=np.float64)
    cosines = rank_cosine(inner)
    here, there = _variables(now, pairs), _variables(later, pairs)
    return LayerBetweenRanks(
        layer.name,
        layer.role,
        layer.numel,
        values=int(now.shape[2]),
        iterations=steps,
        pairs=pairs,
        histograms={bins: _by_histogram(here, there, pairs, bins, generator) for bins in (PAPER_BINS, chosen.bins)},
        estimators={
            "copula": _by_copula(here, there, pairs, chosen, generator),
            "mixed": _by_neighbors(now, later, pairs, chosen, generator),
        },
        cosine=cosines,
        mean_cosine=mean_interval(cosines, chosen.level),
        signal_to_noise=signal_to_noise(inner),
        place=places[layer.name],
    )


def _read(trace: Trace, layer: Layer, positions: np.ndarray, columns: Sequence[slice]) -> np.ndarray:
    """Sampled values (T, N, C) of every rank at positions (T,), float32."""
    ranks = [
        np.concatenate([read_positions(trace, layer.name, rank, positions, part) for part in columns], axis=1)
        for rank in range(trace.world_size)
    ]
    return np.stack(ranks, axis=1)


# The variables of the ranks that are in a pair, by rank, at each of several iterations.
_Sorted = list[dict[int, Variable]]


def _variables(values: np.ndarray, pairs: Sequence[tuple[int, int]]) -> _Sorted:
    """Sort gradients (T, N, C), each once."""
    ranks = sorted({rank for pair in pairs for rank in pair})
    return [{rank: Variable.of(row[rank]) for rank in ranks} for row in values]


def _by_histogram(
    now: _Sorted, later: _Sorted, pairs: Sequence[tuple[int, int]], bins: int, generator: np.random.Generator
) -> HistogramSeries:
    rows = []
    for here, there in zip(now, later, strict=True):
        by_pair = []
        for a, b in pairs:
            paired = plug_in(here[a], here[b], bins)
            shuffled = plug_in(here[a], here[b].permuted(generator), bins).information
            shifted = plug_in(here[a], there[b], bins).information
            values = (paired.entropy_y, paired.conditional, paired.information, paired.bias)
            by_pair.append((*values, shuffled, shifted))
        rows.append(np.mean(by_pair, axis=0))
    return HistogramSeries(*np.array(rows).T)


def _by_copula(
    now: _Sorted,
    later: _Sorted,
    pairs: Sequence[tuple[int, int]],
    chosen: BetweenRanks,
    generator: np.random.Generator,
) -> EstimatorSeries:
    paired, shifted = (
        np.array(
            [
                np.mean([mutual_information(x[a], y[b], "copula") for a, b in pairs])
                for x, y in zip(now, other, strict=True)
            ]
        )
        for other in (now, later)
    )
    return _series(now[0], pairs[0], "copula", (paired, shifted), chosen.level, generator)


def _series(
    first: dict[int, Variable],
    pair: tuple[int, int],
    method: str,
    series: tuple[np.ndarray, np.ndarray],
    level: float,
    generator: np.random.Generator,
) -> EstimatorSeries:
    """Put a result together; a pair of the first iteration is shuffled. series: paired and shifted, (T,) each."""
    x, y = (first[rank] for rank in pair)
    excess = excess_information(*series, level=level)
    return EstimatorSeries(len(x), *series, mutual_information(x, y.permuted(generator), method), excess)


def _by_neighbors(
    now: np.ndarray,
    later: np.ndarray,
    pairs: Sequence[tuple[int, int]],
    chosen: BetweenRanks,
    generator: np.random.Generator,
) -> EstimatorSeries:
    """By nearest neighbours, on as many of the values (T, N, C) as the interval of their excess needs."""
    values = _FIRST_VALUES
    while True:
        stride = -(-now.shape[2] // values)
        here, there = (_variables(part[:, :, ::stride], pairs) for part in (now, later))
        paired, shifted = (
            [[neighbor_information(x[a], y[b]) for a, b in pairs] for x, y in zip(here, other, strict=True)]
            for other in (here, there)
        )
        series = _means(paired), _means(shifted)
        needed = _needed(*series, len(here[0][pairs[0][0]]), _error_of_mean([*paired, *shifted]), chosen.level)
        if needed <= values or stride == 1 or values == _MOST_VALUES:
            return _series(here[0], pairs[0], "mixed", series, chosen.level, generator)
        values = min(_MOST_VALUES, max(2 * values, needed))


def _means(estimates: Sequence[Sequence[NeighborEstimate]]) -> np.ndarray:
    """Means over pairs, (T,)."""
    return np.array([np.mean([one.bits for one in row]) for row in estimates])


def _error_of_mean(estimates: Sequence[Sequence[NeighborEstimate]]) -> float:
    """The standard error that the choice of values gives the mean excess; estimates: paired and shifted, (2 T, P)."""
    squares = [one.error**2 for row in estimates for one in row]
    return 2 * math.sqrt(sum(squares)) / len(squares)


def _needed(paired: np.ndarray, shifted: np.ndarray, values: int, error: float, level: float) -> int:
    """Count the values after which more hardly narrow the interval: the error's square falls as their number grows."""
    excess = excess_information(paired, shifted, level=level)
    if excess.low is None or excess.high is None:
        return _MOST_VALUES
    varies = float((paired - shifted).var(ddof=1)) / len(paired)
    if (excess.high - excess.low) / 2 <= _NARROW or error**2 <= _MOST_OF_CHOICE * varies:
        return values
    # The variance that is left with all values; e^2 n / n' may be so much of it that the share is as above.
    own = varies - error**2
    allowed = own * _MOST_OF_CHOICE / (1 - _MOST_OF_CHOICE)
    return math.ceil(values * error**2 / allowed) if allowed > 0 else _MOST_VALUES
