"""How far from the least possible bits every codec stands, layer by layer: bits per value at its error.

The floor is the Gaussian rate-distortion function of a rank's gradient in the later half of a trace, for two
descriptions of it:

- coordinates: independent, each with a variance of its own, known to both ends;
- slices: GradiVeQ's slices share one covariance; energies along its axes, fitted on the earlier half.

The lower of the two is drawn: no code that knows just this much of the gradient, and of Gaussian gradients, gets below.
A code that follows heavy tails from one iteration to the next can. Codecs are measured without feedback. Floors and
errors are those of single ranks: what ranks have in common, from which a code for their mean alone could save bits, is
not counted (`rate_of_mean` is).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import digamma

from gradlab import codecs
from gradlab.analysis.gradients import finite_positions, read_unscaled
from gradlab.analysis.measure.spectrum import spread
from gradlab.analysis.parallel import share_out_layers
from gradlab.analysis.replay.error_tables import measure_errors
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.learning.slice_pca import default_slice_size, layer_slices, slice_view
from gradlab.plan import Plan
from gradlab.plan.layer_errors import Candidate
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.analysis.replay.result import Replay
    from gradlab.trace import Trace, TraceSource
# Squared errors relative to the gradient's energy.
RELATIVE_ERRORS = tuple(float(value) for value in np.geomspace(1e-7, 0.98, 56))
# Values of layers from which on codecs are measured in one iteration, as many values stand for other iterations.
_MANY_VALUES = 2 * 10**6
_SLICES_PER_ROW = 64
_LARGEST_SLICE = 512
_ROWS_PER_AXIS = 4
_FEWEST_VALUES = 256
_MOST_COORDINATES = 2**18


@dataclass(frozen=True)
class CodecPoint(Jsonable):
    """A codec on a layer: squared error over the gradient's energy, bits per value, bits above the floor."""

    codec: str
    setting: str
    relative_error: float
    bits: float
    above_floor: float


@dataclass(frozen=True)
class PlanPoint(Jsonable):
    """A replayed plan on a layer: squared error over the compressor input's energy, and as `CodecPoint`."""

    plan: str
    layer: str
    relative_error: float
    bits: float
    above_floor: float


@dataclass(frozen=True)
class LayerLimits(Jsonable):
    """One layer's floors in bits per value, (E,) at `RELATIVE_ERRORS`, and the codecs above them.

    coordinates, slices: the module's two descriptions; floor: the lower of both.
    """

    name: str
    numel: int
    positions: list[int]
    iterations: list[int]
    slice_size: int
    coordinates: np.ndarray
    slices: np.ndarray
    floor: np.ndarray
    codecs: tuple[CodecPoint, ...] = ()


@dataclass(frozen=True)
class Limits(Jsonable):
    """Floors, codecs and plans by layer. relative_errors: (E,), squared errors relative to the energy."""

    relative_errors: tuple[float, ...]
    world_size: int
    layers: tuple[LayerLimits, ...]
    plans: tuple[PlanPoint, ...] = ()


@dataclass(frozen=True)
class LimitExtent(Jsonable):
    """Most iterations for floors and for codecs, most settings of a codec, and most layers (None: all)."""

    positions: int = 24
    windows: int = 2
    settings: int = 3
    layers: int | None = None


def limit_candidates(settings: int = 3) -> list[Candidate]:
    """Every codec that needs no fit, with up to so many settings spread over its `candidates`."""
    candidates = []
    for name in codecs.names():
        method = codecs.get(name)
        if name != "identity" and not method.about.learns:
            picked = spread(len(method.about.candidates), settings)
            candidates += [Candidate(name, dict(method.about.candidates[i])) for i in picked]
    return candidates


def gaussian_floor(
    variances: np.ndarray, relative_errors: Sequence[float] = RELATIVE_ERRORS, samples: int | None = None
) -> np.ndarray:
    """Compute the least bits per value, (E,), at squared errors relative to the energy, for variances (n,).

    Reverse water-filling (Cover & Thomas, "Elements of information theory", 2nd ed., Theorem 10.3.3): independent
    Gaussian values of variances v_i take sum max(0, log2(v_i / theta) / 2) bits at an error of sum min(theta, v_i).
    Among sources with these variances the Gaussian one needs the most bits. The log of a mean square of m normal
    values is (log(m / 2) - psi(m / 2)) too low; half of it is added.
    """
    total, count = float(variances.sum()), len(variances)
    if not total > 0:
        return np.zeros(len(relative_errors))
    rates = []
    positive = np.sort(variances[variances > 0])[::-1]
    lost = 0.0 if samples is None else (math.log(samples / 2) - float(digamma(samples / 2))) / (2 * math.log(2))
    logs, rest = np.cumsum(np.log2(positive)), positive.sum() - np.cumsum(positive)
    numbers = np.arange(1, len(positive) + 1)
    for error in relative_errors:
        # With the m largest above the water at theta: m theta + the rest's sum = the error.
        levels = (error * total - rest) / numbers
        above = np.flatnonzero((levels > 0) & (levels <= positive))
        m = int(above[-1]) + 1 if len(above) else 0
        rates.append((logs[m - 1] - m * math.log2(levels[m - 1])) / 2 + m * lost if m else 0.0)
    return np.array(rates) / count


def rate_of_mean(relative_error: float, correlation: float, ranks: int) -> float:
    """Compute bits per value and rank that suffice for the mean over N ranks at relative squared error D, in (0, 1].

    Berger and Tung's scheme (Wagner, Tavildar & Viswanath, IEEE Trans. Inf. Theory 54, 2008, section II): each rank
    adds noise of variance q to values of variance v. With a = 1 + (N - 1) rho, D = q / (a v + q), and all ranks take
    log2(1 + a v / q) / 2 + (N - 1) log2(1 + (1 - rho) v / q) / 2 bits, log2(1 / D) / 2 each without correlation.
    """
    if not (0 < relative_error <= 1 and 0 <= correlation <= 1 and ranks >= 1):
        raise GradlabError(
            f"rate of the mean: relative error {relative_error}, correlation {correlation}, {ranks} ranks, expected "
            "above 0 to 1, 0 to 1, and 1 or more"
        )
    together = 1 + (ranks - 1) * correlation
    ratio = (1 / relative_error - 1) / together  # v / q
    own = (ranks - 1) * np.log2(1 + (1 - correlation) * ratio)
    return float((np.log2(1 / relative_error) + own) / (2 * ranks))


def held_out_energies(fitted: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Compute mean squares (K,) of later rows (m, K) along the principal axes of fitted rows' (n, K) second moments."""
    _, axes = np.linalg.eigh(fitted.T @ fitted / max(1, len(fitted)))
    return np.asarray(np.square(later @ axes).mean(0))


def measure_limits(
    trace: Trace,
    *,
    extent: LimitExtent | None = None,
    candidates: Sequence[Candidate] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Limits:
    """Measure floors and codecs by layer, in bits per value; layers that are never finite are left out."""
    if len(trace.steps) < 4:
        raise GradlabError(f"{trace.path}: {len(trace.steps)} iterations, expected at least 4 to hold half of them out")
    chosen = [layer for layer in trace.layers if layer.numel >= _FEWEST_VALUES and len(layer.shape) > 1]
    if not chosen:
        raise GradlabError(f"{trace.path}: no layer of {_FEWEST_VALUES} values or more to set limits for")
    extent = extent or LimitExtent()
    if extent.layers is not None:
        chosen = [chosen[place] for place in spread(len(chosen), extent.layers)]
    tried = list(limit_candidates(extent.settings) if candidates is None else candidates)
    sharing: dict[str, Any] = {"workers": workers, "progress": progress}
    floors = share_out_layers(_floor, trace, chosen, extent.positions, what="limits", **sharing)
    live = [row for row in floors if row is not None]
    values = sum(layer.numel for layer in chosen)
    windows = [(p, p + 1) for p in _finite_positions(live, 1 if values > _MANY_VALUES else extent.windows)]
    by_layer = {row.name: tried for row in live}
    table = measure_errors(trace, by_layer, windows, **sharing)
    layer_rows = []
    for row, errors in zip(live, table.layers, strict=True):
        energy = float(errors.squared_norm.mean())
        points = (
            _placed(row, candidate, float(error) / energy, errors.layer, trace.world_size)
            for candidate, error in zip(tried, errors.squared_l2.mean(0), strict=True)
            if energy > 0 and np.isfinite(error)
        )
        layer_rows.append(replace(row, codecs=tuple(points)))
    return Limits(RELATIVE_ERRORS, trace.world_size, tuple(layer_rows))


def _finite_positions(rows: Sequence[LayerLimits], most: int) -> list[int]:
    """At most `most` positions, late in the trace, at which all of the layers are finite."""
    if not rows:
        return []
    common = sorted(set.intersection(*(set(row.positions) for row in rows)))
    later = common[len(common) // 2 :]
    return [later[i] for i in spread(len(later), most)]


def _placed(row: LayerLimits, candidate: Candidate, relative: float, layer: Layer, world_size: int) -> CodecPoint:
    bits = 8 * candidate.build().forecast([layer], world_size).payload / layer.numel
    return CodecPoint(candidate.codec, str(candidate), relative, bits, bits - floor_at(row, relative))


def floor_at(row: LayerLimits, relative_error: float) -> float:
    """Bits per value of a layer's floor at a relative squared error, interpolated between `RELATIVE_ERRORS`."""
    return float(np.interp(np.log(max(relative_error, 1e-300)), np.log(RELATIVE_ERRORS), row.floor))


def floor_slice_size(layer: Layer, rows: int) -> int:
    """Return K of the slices whose axes are fitted: the codec's default, halved until there are 4 slices per axis."""
    size = min(default_slice_size(slice_view(layer)), _LARGEST_SLICE, layer.numel)
    while size > 1 and rows * min(_SLICES_PER_ROW, layer.numel // size) < _ROWS_PER_AXIS * size:
        size //= 2
    return size


def _floor(source: TraceSource, layer: Layer, most: int) -> LayerLimits | None:
    """The floors of one layer, from at most so many iterations; None where a half of them holds no finite gradient."""
    squares, count = np.zeros(layer.numel), 0
    halves: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    with source.open([layer.name]) as trace:
        positions = spread(len(trace.steps), most)
        middle = len(trace.steps) // 2
        size = floor_slice_size(layer, trace.world_size * int((positions < middle).sum()))
        finite = [int(p) for p in np.intersect1d(positions, finite_positions(trace))]
        for position, rank in itertools.product(finite, range(trace.world_size)):
            row = read_unscaled(trace, layer.name, rank, position, position + 1)[0]
            halves[position >= middle].append(_some_slices(row, layer, size))
            if position >= middle:
                squares += np.square(row, dtype=np.float64)
                count += 1
        steps = [int(trace.steps[position]) for position in finite]
    if not halves[0] or not halves[1]:
        return None
    coordinates = gaussian_floor(squares[:: -(-layer.numel // _MOST_COORDINATES)] / count, samples=count)
    fitted, later = (np.concatenate(half) for half in halves)
    slices = gaussian_floor(held_out_energies(fitted, later))
    floor = np.minimum(coordinates, slices)
    return LayerLimits(layer.name, layer.numel, finite, steps, size, coordinates, slices, floor)


def _some_slices(row: np.ndarray, layer: Layer, size: int) -> np.ndarray:
    """At most 64 slices (m, K) of a gradient in GradiVeQ's order, in float64."""
    whole = layer_slices(torch.from_numpy(row).reshape(layer.shape), slice_view(layer), size)[0].numpy()
    return whole[spread(len(whole), _SLICES_PER_ROW)].astype(np.float64)


def place_plans(limits: Limits, replays: Mapping[str, Replay], plans: Mapping[str, Plan]) -> tuple[PlanPoint, ...]:
    """Return bits per value and relative squared error of replayed plans, by layer of groups of one layer."""
    rows = {row.name: row for row in limits.layers}
    points = []
    for name, plan in plans.items():
        errors = replays[name].layer_errors
        for group in (group for group in plan.compressed_groups if len(group.layers) == 1):
            layer = group.layers[0]
            if layer not in rows or layer not in errors:
                continue
            payload = plan.build(group).forecast(plan.members(group), limits.world_size).payload
            bits, relative = 8 * payload / rows[layer].numel, float(errors[layer]) ** 2
            points.append(PlanPoint(name, layer, relative, bits, bits - floor_at(rows[layer], relative)))
    return tuple(points)
