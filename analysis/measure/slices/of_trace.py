"""Measure the slice structure of a recorded trace: choose layers, iterations and slice sizes within bounds of work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gradlab.analysis.gradients import mean_unscaled
from gradlab.analysis.measure.slices.structure import (
    Correlation,
    Scatter,
    SliceSizeCurve,
    Staleness,
    adjacent_correlation,
    loss_by_slice_size,
    rotated_scatter,
    staleness,
)
from gradlab.analysis.measure.spectrum import spread
from gradlab.analysis.parallel import share_out_layers
from gradlab.analysis.replay.sampled import require_whole
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer, filter_axes
from gradlab.learning.slice_pca import default_slice_size, slice_order, slice_view
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceSource

Result = TypeVar("Result")


# What bounds the work on one layer: the largest slice, and the most adjacent values correlated.
_LARGEST_SLICE = 4096
_MOST_ADJACENT = 64
# The most values of a layer looked at; of a larger layer, in stretches that hold a whole slice of any size.
_MOST_VALUES = 2**16
_STRETCH = 2 * _LARGEST_SLICE
_MOST_LAYERS = 4
_WINDOWS = 4
_AGES = 24
# Averaged gradients held at a time while a layer is read: float32 values.
_BLOCK_VALUES = 2**22


@dataclass(frozen=True)
class LayerStructure(Jsonable):
    """One layer's measurements; a part that cannot be measured is None, and a remark says why.

    period: at whose multiples slices are alike, "F D", or "F" if F D leaves no second slice.
    """

    layer: Layer = field(metadata={"json": False})
    slice_size: int
    period: int
    period_is: str
    correlation: Correlation | None
    scatter: Scatter | None
    slice_sizes: SliceSizeCurve | None
    staleness: Staleness | None
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The layer with its measurements."""
        return {**self.layer.to_json(), **super().to_json()}


@dataclass(frozen=True)
class SliceStructure(Jsonable):
    """The slice structure of several layers; fitted_on, held_out_on: iterations; windows: first and last of each."""

    layers: tuple[LayerStructure, ...]
    fitted_on: tuple[int, ...]
    held_out_on: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class _Positions:
    """Positions of a trace: number of the first, fitted on, later ones (n,), windows, and all that are read (m,)."""

    fit: int
    later: np.ndarray
    windows: tuple[tuple[int, int], ...]
    read: np.ndarray


@dataclass(frozen=True)
class _Sampled:
    """A layer's sampled averaged gradients (P, C), float32, finite, at positions and iterations (P,).

    columns: (C,), places in GradiVeQ's order; left_out: number of iterations that are not finite.
    """

    layer: Layer
    values: np.ndarray
    positions: np.ndarray
    steps: np.ndarray
    columns: np.ndarray
    left_out: int

    def rows(self, first: int, stop: int) -> tuple[int, int]:
        """The rows that hold positions first to stop."""
        begin, end = np.searchsorted(self.positions, (first, stop))
        return int(begin), int(end)


def measure_slice_structure(
    trace: Trace,
    samples: int = 100,
    *,
    workers: int = 1,
    progress: Progress | None = None,
) -> SliceStructure:
    """Measure everything in `gradlab.analysis.measure.slices.structure` for layers of a trace, within bounds.

    samples: consecutive iterations that bases are fitted on, the first of the trace; at least 2.
    """
    recorded = len(trace.steps)
    if samples < 2:
        raise GradlabError(f"samples = {samples}: expected at least 2")
    layers, remarks = _chosen(trace), []
    if recorded < 3:
        too_few = f"{recorded} iterations: too few to fit on two and hold one out."
        return SliceStructure((), (), (), (), (too_few,))
    if not layers:
        remarks.append("No convolution and no other matrix to look at.")
    places = _plan_positions(recorded, samples)
    if places.fit < samples:
        remarks.append(
            f"{recorded} iterations are recorded: L_t = {places.fit} in place of {samples}, so that as many are held "
            "out."
        )
    sharing: dict[str, Any] = {"workers": workers, "progress": progress}
    measured = share_out_layers(_measure_in_worker, trace, layers, places, what="slice structure", **sharing)
    steps = np.asarray(trace.steps).tolist()
    return SliceStructure(
        tuple(measured),
        fitted_on=tuple(steps[: places.fit]),
        held_out_on=tuple(steps[place] for place in places.later),
        windows=tuple((steps[first], steps[stop - 1]) for first, stop in places.windows),
        remarks=tuple(remarks),
    )


def _chosen(trace: Trace) -> list[Layer]:
    matrices = [layer for layer in trace.layers if len(layer.shape) > 1 and layer.numel > 1]
    whole = [layer for layer in matrices if layer.name not in trace.samples]
    if matrices and not whole:
        require_whole(trace, trace.samples, "GradiVeQ cuts whole layers into slices, and those of a sample are others")
    layers = [layer for layer in whole if layer.role == "convolution"] or whole
    if len(layers) <= _MOST_LAYERS:
        return layers
    largest = max(range(len(layers)), key=lambda place: layers[place].numel)
    places = {largest, 0, len(layers) - 1}
    between = [place for place in range(len(layers)) if place not in places]
    middle = sorted(between, key=lambda place: abs(place - len(layers) // 2))
    return [layers[place] for place in sorted(places | set(middle[: _MOST_LAYERS - len(places)]))]


def _plan_positions(recorded: int, samples: int) -> _Positions:
    """Plan a fit on the first positions, held-out later ones, and windows with denser positions soon after each."""
    length = max(2, min(samples, recorded // 2))
    later = length + spread(recorded - length, length)
    short = min(length, recorded // _WINDOWS)
    first = spread(recorded - short + 1, _WINDOWS).tolist() if short >= 2 else []
    windows = tuple((int(place), int(place) + short) for place in first)
    ages = [
        stop - 1 + np.geomspace(1, recorded - stop, _AGES).astype(np.int64) for _, stop in windows if stop < recorded
    ]
    fits = [np.arange(*window) for window in ((0, length), *windows)]
    return _Positions(length, later, windows, np.unique(np.concatenate([*fits, later, *ages])))


def looked_at(numel: int) -> np.ndarray:
    """The values of a layer that are looked at, as places in GradiVeQ's order: all, or stretches evenly spread."""
    if numel <= _MOST_VALUES:
        return np.arange(numel)
    first = spread(numel - _STRETCH + 1, _MOST_VALUES // _STRETCH)
    return np.unique(first[:, None] + np.arange(_STRETCH))


def _sample(trace: Trace, layer: Layer, places: _Positions) -> _Sampled:
    """Read a layer's averaged gradients at the planned positions, in blocks; leave out those that are not finite."""
    columns = looked_at(layer.numel)
    native = slice_order(layer).numpy()[columns]
    values = np.empty((len(places.read), len(columns)), dtype=np.float32)
    finite = np.empty(len(places.read), dtype=bool)
    most = max(1, _BLOCK_VALUES // max(1, layer.numel))
    runs = np.split(np.arange(len(places.read)), np.flatnonzero(np.diff(places.read) != 1) + 1)
    for rows in (run[first : first + most] for run in runs for first in range(0, len(run), most)):
        at = places.read[rows]
        block = mean_unscaled(trace, layer.name, int(at[0]), int(at[-1]) + 1)
        finite[rows] = np.isfinite(block).all(1)
        values[rows] = block[:, native]
    kept = places.read[finite]
    return _Sampled(layer, values[finite], kept, np.asarray(trace.steps)[kept], columns, int((~finite).sum()))


def _measure_in_worker(source: TraceSource, layer: Layer, places: _Positions) -> LayerStructure:
    with source.open([layer.name]) as trace:
        sampled = _sample(trace, layer, places)
    view = slice_view(layer)
    size = default_slice_size(view)
    period, period_is = _period(view)
    fit = sampled.values[slice(*sampled.rows(0, places.fit))]
    later = sampled.values[np.isin(sampled.positions, places.later)]
    first, columns = sampled.values[:, :size], sampled.columns
    windows = [rows for window in places.windows if np.diff(rows := sampled.rows(*window))[0] >= 2]
    sizes = _sizes_between(layer, period)
    parts = _Attempts()
    if sampled.left_out:
        parts.remarks.append(f"{sampled.left_out} iterations with gradients that are not finite are left out")
    return LayerStructure(
        layer,
        size,
        period,
        period_is,
        correlation=parts.measure(
            "correlation of adjacent gradients",
            lambda: adjacent_correlation(fit[:, : min(_MOST_ADJACENT, filter_axes(view)[0])]),
        ),
        scatter=parts.measure("scatter of three adjacent gradients", lambda: rotated_scatter(fit[:, :3])),
        slice_sizes=parts.measure(
            "loss by slice size (Fig. 5)",
            lambda: loss_by_slice_size(fit, later, sizes, period=period, columns=columns),
        ),
        staleness=parts.measure("loss by age", lambda: staleness(first, sampled.steps, windows)),
        remarks=tuple(parts.remarks),  # last: by now every part was tried
    )


class _Attempts:
    """Measurements tried one after another. remarks: why those that failed did, a line each."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def measure(self, title: str, part: Callable[[], Result]) -> Result | None:
        """Give the part's result; where it cannot be measured, remark why and give None."""
        try:
            return part()
        except GradlabError as reason:
            self.remarks.append(f"no {title}: {reason}")
            return None


def _period(view: Layer) -> tuple[int, str]:
    """F D, at whose multiples GradiVeQ's slices are alike; F where F D leaves no second slice of at most 4096."""
    filters, depth = filter_axes(view)
    most = min(_LARGEST_SLICE, view.numel // 2)
    if filters * depth > most >= filters:
        return filters, "F"
    return max(1, filters * depth), "F D"


def _sizes_between(layer: Layer, period: int) -> list[int]:
    """Slice sizes of Fig. 5: multiples of the period, and others between them; at most 19."""
    eighths = (2, 4, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 64, 96, 128, 256)
    sizes = {round(period * part / 8) for part in eighths}
    return sorted(size for size in sizes if 1 <= size <= min(_LARGEST_SLICE, layer.numel // 2)) or [period]
