"""What nodes' gradients share, over a recorded trace: information, cosine, and which of their values are largest.

LGC (Abrahamyan et al.), sections III and VI-E: entropy and mutual information of one layer's gradient on two nodes,
over iterations (Figs. 3, 12) and by layer (Fig. 4), by the paper's histogram; beside it estimators that correct their
bias, and two nulls. Shuffled pairs show what an estimator finds where there is nothing. Pairs that are `shift`
iterations apart show what two gradients share by belonging to the same parameters; only what exceeds that is common to
nodes in an iteration. ScaleCom's CLT-k (Chen et al., NeurIPS 2020) relies on the overlap of top-k positions instead.

Of each layer a sample of values in contiguous stretches is looked at, at a sample of iterations and pairs of nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab.analysis.gradients import read_unscaled
from gradlab.analysis.measure.agreement import index_overlap, rank_cosine, signal_to_noise
from gradlab.analysis.measure.information import (
    PAPER_BINS,
    block_bootstrap,
    block_length,
    bootstrap_interval,
    excess_information,
    mutual_information,
    plug_in,
)
from gradlab.analysis.measure.layer_places import layer_places
from gradlab.analysis.measure.spectrum import spread
from gradlab.analysis.parallel import share_out
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

DENSITIES = (0.001, 0.01, 0.1)
CORRECTED = ("copula", "equal_mass", "ksg")
_STRETCHES = 8
_FEWEST_VALUES = 256  # of a layer: with fewer, estimates say nothing of one iteration
_KSG_VALUES = 4096  # nearest neighbours take longest
_TOPK_STEPS, _TOP_VALUES = 4, 2**20  # iterations of lags and largest values, values of the latter
_LAGS = (0, 1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class BetweenNodes:
    """How much of a trace is looked at.

    iterations, pairs, values: at most so many; shift: positions between the gradients of the shifted null, None: a
    quarter of the trace, at most 50; bins: of a histogram fine enough to show LGC's claim and its bias, beside 2^32.
    """

    iterations: int = 24
    pairs: int = 3
    values: int = 8192
    shift: int | None = None
    bins: int = 1024
    level: float = 0.95
    seed: int = 0


def measure_between_nodes(
    trace: Trace,
    settings: BetweenNodes | None = None,
    *,
    layers: Sequence[str] | None = None,
    after_addition: Sequence[str] = (),
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Everything above for each layer, as plain JSON; information in bits per parameter.

    layers: names, None for all of two or more dimensions and at least 256 values. after_addition: names of layers that
    read the sum of a residual connection; none: those that the trace's metadata tells. workers: processes.

    Raises:
        GradlabError: for a trace of one rank, fewer than 8 recorded iterations, settings out of range, an unknown
            layer, or no layer large enough.
    """
    chosen = settings or BetweenNodes()
    shift = _require(trace, chosen)
    named = [trace.layer(name) for name in layers] if layers is not None else list(trace.layers)
    large = [x for x in named if x.numel >= _FEWEST_VALUES and (layers is not None or len(x.shape) > 1)]
    if not large:
        raise GradlabError(f"{trace.path}: no layer of {_FEWEST_VALUES} values or more to measure between nodes")
    path, order = str(trace.path.resolve()), sorted(range(len(large)), key=lambda i: -large[i].numel)
    places = layer_places(trace, after_addition)
    trace.close()  # HDF5 keeps what is read of a file until nobody has it open; reading on opens it again
    calls = [(path, large[i], chosen, shift) for i in order]
    measured = share_out(measure_layer, calls, workers=workers, what="between nodes", progress=progress)
    found = dict(zip(order, measured, strict=True))
    rows = [{**found[i], "place": places[large[i].name]} for i in range(len(large))]
    return {
        **asdict(chosen),
        "world_size": trace.world_size,
        "shift": shift,
        "shift_iterations": int(np.median(trace.steps[shift:] - trace.steps[:-shift])),
        "paper_bins": PAPER_BINS,
        "skipped_layers": [x.name for x in trace.layers if x not in large],
        "layers": [row for row in rows if row["iterations"]],
        "without_finite_iterations": [row["name"] for row in rows if not row["iterations"]],
    }


def _require(trace: Trace, chosen: BetweenNodes) -> int:
    count = len(trace.steps)
    if trace.world_size < 2:
        raise GradlabError(f"{trace.path}: recorded on one rank: nothing to compare between nodes")
    if count < 8:
        raise GradlabError(f"{trace.path}: {count} iterations, expected at least 8 to compare nodes over")
    for name, least in (("iterations", 4), ("pairs", 1), ("values", _FEWEST_VALUES), ("bins", 2)):
        if getattr(chosen, name) < least:
            raise GradlabError(f"{name} = {getattr(chosen, name)}, expected at least {least}")
    shift = max(1, min(50, count // 4)) if chosen.shift is None else chosen.shift
    if not 1 <= shift <= count - 4:
        raise GradlabError(f"shift = {shift} recorded iterations, expected 1 to {count - 4} in this trace")
    return shift


def node_pairs(world_size: int, most: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """At most `most` pairs of different nodes, drawn without replacement, in ascending order."""
    pairs = list(itertools.combinations(range(world_size), 2))
    if len(pairs) <= most:
        return pairs
    return [pairs[i] for i in sorted(generator.choice(len(pairs), most, replace=False))]


def sampled_columns(numel: int, values: int) -> list[slice]:
    """Stretches of equal length, evenly spread over a layer, of `values` elements together; all of a smaller one."""
    if numel <= values:
        return [slice(0, numel)]
    length = values // _STRETCHES
    starts = np.linspace(0, numel - length, _STRETCHES).astype(int)
    return [slice(int(first), int(first) + length) for first in starts]


def measure_layer(path: str, layer: Layer, chosen: BetweenNodes, shift: int) -> dict[str, Any]:
    """One layer of the trace at `path`."""
    from gradlab.trace import Trace

    generator = np.random.default_rng(chosen.seed)
    with Trace(Path(path)) as trace:
        positions = spread(len(trace.steps) - shift, chosen.iterations)
        pairs = node_pairs(trace.world_size, chosen.pairs, generator)
        columns = sampled_columns(layer.numel, chosen.values)
        now = _read(trace, layer, positions, columns)
        later = _read(trace, layer, positions + shift, columns)
        whole = finite_positions(trace)  # the sample's alone would say nothing of the largest values
        finite = np.isin(positions, whole) & np.isin(positions + shift, whole)
        steps = np.asarray(trace.steps)[positions][finite]
        top = _top_overlap(trace, layer, positions[finite])
        lags = _by_lag(trace, layer, positions[finite], pairs, columns)
    now, later = now[finite], later[finite]
    base = {"name": layer.name, "role": layer.role, "numel": layer.numel, "values": int(now.shape[2])}
    if len(steps) < 4:
        return {**base, "iterations": []}
    inner = np.einsum("tnc,tmc->tnm", now, now)
    cosines = rank_cosine(inner)
    return {
        **base,
        "iterations": steps.tolist(),
        "pairs": [list(pair) for pair in pairs],
        "histograms": {
            str(bins): _by_histogram(now, later, pairs, bins, generator) for bins in (PAPER_BINS, chosen.bins)
        },
        "estimators": {name: _by_estimator(now, later, pairs, name, chosen, generator) for name in CORRECTED},
        "lags": lags,
        "top_indices": top,
        "cosine": cosines.tolist(),
        "mean_cosine": _mean_with_interval(cosines, generator, chosen.level),
        "signal_to_noise": signal_to_noise(inner),
    }


def finite_positions(trace: Trace) -> np.ndarray:
    """Positions at which every rank's gradient was finite, by the recorder's count, (n,)."""
    counts = [trace.scalars(rank)["non_finite"] for rank in range(trace.world_size)]
    return np.flatnonzero(np.sum(counts, axis=0) == 0)


def _read(trace: Trace, layer: Layer, positions: np.ndarray, columns: Sequence[slice]) -> np.ndarray:
    """Sampled values (T, N, C) of every node at positions (T,)."""
    ranks = range(trace.world_size)
    rows = [np.stack([_row(trace, layer, rank, int(position), columns) for rank in ranks]) for position in positions]
    return np.stack(rows).astype(np.float64)


def _row(trace: Trace, layer: Layer, rank: int, position: int, columns: Sequence[slice]) -> np.ndarray:
    parts = [read_unscaled(trace, layer.name, rank, position, position + 1, part)[0] for part in columns]
    return np.concatenate(parts)


def _by_histogram(
    now: np.ndarray,
    later: np.ndarray,
    pairs: Sequence[tuple[int, int]],
    bins: int,
    generator: np.random.Generator,
) -> dict[str, list[float]]:
    """LGC's eq. (1) per iteration, means over pairs: of the pair, of the pair shuffled, and shifted in time."""
    names = ("entropy", "conditional", "information", "bias", "shuffled", "shifted")
    rows = []
    for here, there in zip(now, later, strict=True):
        found = []
        for a, b in pairs:
            paired = plug_in(here[a], here[b], bins)
            shuffled = plug_in(here[a], generator.permutation(here[b]), bins)
            shifted = plug_in(here[a], there[b], bins)
            found.append(
                (
                    paired.entropy_y,
                    paired.conditional,
                    paired.information,
                    paired.bias,
                    shuffled.information,
                    shifted.information,
                )
            )
        rows.append(np.mean(found, axis=0))
    return {name: np.array(rows)[:, i].tolist() for i, name in enumerate(names)}


def _by_estimator(
    now: np.ndarray,
    later: np.ndarray,
    pairs: Sequence[tuple[int, int]],
    method: str,
    chosen: BetweenNodes,
    generator: np.random.Generator,
) -> dict[str, Any]:
    """A corrected estimator per iteration, means over pairs, with the excess over the shifted null."""
    stride = -(-now.shape[2] // _KSG_VALUES) if method == "ksg" else 1
    here, there = now[:, :, ::stride], later[:, :, ::stride]
    paired, shifted = (
        np.array([_over_pairs(x, y, pairs, method) for x, y in zip(here, other, strict=True)])
        for other in (here, there)
    )
    x, y = here[0, pairs[0][0]], here[0, pairs[0][1]]
    found = excess_information(paired, shifted, generator, level=chosen.level)
    return {
        "samples": int(here.shape[2]),
        "paired": paired.tolist(),
        "shifted": shifted.tolist(),
        "shuffled": mutual_information(x, generator.permutation(y), method),
        "excess": asdict(found),
    }


def _over_pairs(x: np.ndarray, y: np.ndarray, pairs: Sequence[tuple[int, int]], method: str) -> float:
    return float(np.mean([mutual_information(x[a], y[b], method) for a, b in pairs]))


def _by_lag(
    trace: Trace,
    layer: Layer,
    positions: np.ndarray,
    pairs: Sequence[tuple[int, int]],
    columns: Sequence[slice],
) -> dict[str, list[Any]]:
    """Copula information of one node's gradient with another's so many iterations later, means; None where none is."""
    lags, found = [], []
    few = positions[spread(len(positions), _TOPK_STEPS)] if len(positions) else positions
    for lag in _LAGS:
        bits = []
        for p, (first, second) in itertools.product(map(int, few[few + lag < len(trace.steps)]), pairs):
            x, y = _row(trace, layer, first, p, columns), _row(trace, layer, second, p + lag, columns)
            if np.isfinite(x).all() and np.isfinite(y).all():
                bits.append(mutual_information(x, y, "copula"))
        if bits:
            lags.append(lag)
            found.append(float(np.mean(bits)))
    return {"lags": lags, "information": found}


def _top_overlap(trace: Trace, layer: Layer, positions: np.ndarray) -> list[dict[str, float]]:
    """How far nodes' k largest values lie at the same positions, by density, over a sample of many values."""
    rows, columns = [], sampled_columns(layer.numel, _TOP_VALUES)
    numel = sum(part.stop - part.start for part in columns)
    few = [int(p) for p in positions[spread(len(positions), _TOPK_STEPS)]] if len(positions) else []
    read = [[_row(trace, layer, rank, p, columns) for rank in range(trace.world_size)] for p in few]
    for density in DENSITIES:
        count = max(1, round(density * numel))
        if count >= numel:
            continue
        found = [index_overlap(gradients, count) for gradients in read]
        if found:
            overlap, energy = np.mean(found, axis=0)
            rows.append(
                {
                    "density": density,
                    "count": count,
                    "overlap": float(overlap),
                    "by_chance": count / numel,
                    "energy_at_others": float(energy),
                }
            )
    return rows


def _mean_with_interval(series: np.ndarray, generator: np.random.Generator, level: float) -> Mapping[str, Any]:
    values = series[np.isfinite(series)]
    if len(values) < 4:
        return {"mean": float(values.mean()) if len(values) else None, "low": None, "high": None}
    length = block_length(len(values))
    means = block_bootstrap(values[:, None], generator, length)[:, 0]
    low, high = bootstrap_interval(float(values.mean()), means, level, -(-len(values) // length))
    return {"mean": float(values.mean()), "low": low, "high": high}
