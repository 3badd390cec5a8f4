"""Tables of errors by layer and setting, measured on a trace: what plans by layer are chosen from.

Alimohammadi et al., "L-GreCo", MLSys 2024, section 4: a rank's gradients are accumulated over a window of iterations
and compressed without feedback. The paper looks at one rank; here the errors are means over all ranks, and over several
windows, so that a choice made on early windows can be checked on later ones.

Work is shared out by layer, and a layer is read rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradlab.analysis.gradients import finite_positions, read_unscaled
from gradlab.analysis.parallel import share_out
from gradlab.analysis.replay.sampled import require_whole
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan.layer_errors import Candidate, squared_errors
from gradlab.plan.refresh import require_metric
from gradlab.progress import Progress
from gradlab.trace.schema import CHUNK_STEPS

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceSource
# Values read at a time: float32, of one rank.
_BLOCK_VALUES = 2**25


@dataclass(frozen=True)
class LayerTable:
    """One layer's errors; x is the mean of a rank's gradients over a window. Errors and norms of samples are scaled up.

    squared_l2, l2: (windows, candidates), means over ranks of ||C(x) - x||^2 and ||C(x) - x||.
    squared_norm, norm: (windows,), means over ranks of ||x||^2 and ||x||.
    """

    layer: Layer
    candidates: tuple[Candidate, ...]
    squared_l2: np.ndarray
    l2: np.ndarray
    squared_norm: np.ndarray
    norm: np.ndarray

    def errors(self, metric: str) -> np.ndarray:
        """Select the errors (windows, candidates) by a metric: `l2`, the paper's, or `squared-l2`."""
        return self.l2 if require_metric(metric) == "l2" else self.squared_l2

    def norms(self, metric: str) -> np.ndarray:
        """Return the errors of sending nothing, (windows,): ||x|| for the metric "l2", ||x||^2 for "squared-l2"."""
        return self.norm if require_metric(metric) == "l2" else self.squared_norm


@dataclass(frozen=True)
class ErrorTable:
    """Errors of several layers over windows of a trace.

    windows: first and last iteration of each; world_size: of the recorded run.
    """

    layers: tuple[LayerTable, ...]
    windows: tuple[tuple[int, int], ...]
    world_size: int
    trace_digest: str

    def errors(self, metric: str, windows: slice | None = None, units: np.ndarray | None = None) -> list[np.ndarray]:
        """Compute mean errors over windows, (candidates,) by layer, in `units` (windows,); infinity if one is not
        finite.
        """
        chosen = windows or slice(None)
        ones = np.ones(len(self.windows)) if units is None else units
        rows = [(table.errors(metric)[chosen] / ones[chosen, None]).mean(0) for table in self.layers]
        return [np.where(np.isfinite(row), row, np.inf) for row in rows]

    def by_window(self, choice: Sequence[int] | np.ndarray, metric: str) -> np.ndarray:
        """Compute a plan's error in each window, (windows,), summed over layers; choice: (layers,) of candidates."""
        return np.sum([t.errors(metric)[:, c] for t, c in zip(self.layers, choice, strict=True)], axis=0)

    def relative_error(self, choice: Sequence[int] | np.ndarray, metric: str, windows: slice | None = None) -> float:
        """Compute a plan's error as a share of sending zeros: by `l2`, sum of ||C(x) - x|| / sum of ||x||; by
        `squared-l2`, the root of the same of squares. choice: (layers,), indices of candidates.
        """
        chosen = slice(None) if windows is None else windows
        error = float(self.by_window(choice, metric)[chosen].sum())
        norm = float(sum(table.norms(metric)[chosen].sum() for table in self.layers))
        return (error / norm) ** (1.0 if metric == "l2" else 0.5) if norm else 0.0


def windows_of(first: int, stop: int, length: int) -> list[tuple[int, int]]:
    """List whole windows [start, stop) of `length` positions, one after another; the last ends at `stop`."""
    if length < 1 or length > stop - first:
        raise GradlabError(f"window = {length}, expected 1 to {stop - first} recorded steps")
    count = (stop - first) // length
    return [(stop - (count - i) * length, stop - (count - i - 1) * length) for i in range(count)]


def measure_errors(
    trace: Trace,
    candidates: Mapping[str, Sequence[Candidate]],
    windows: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    workers: int = 1,
    progress: Progress | None = None,
) -> ErrorTable:
    """Measure the errors of candidates by layer name, over windows [start, stop) of positions of a trace."""
    if not windows:
        raise GradlabError("error tables: no window to measure on")
    for name, tried in candidates.items():
        if any(candidate.learned for candidate in tried):
            require_whole(trace, [name], "a fitted basis is of slices of the whole layer")
    tasks = [(trace.layer(name), tuple(tried)) for name, tried in candidates.items()]
    calls = [(trace.source, *task, tuple(windows), seed) for task in tasks]
    sizes = [layer.numel * len(tried) for layer, tried in tasks]
    trace.close()  # HDF5 keeps what is read of a file until nobody has it open; reading on opens it again
    measured = share_out(_measure_layer, calls, workers=workers, what="errors by layer", sizes=sizes, progress=progress)
    tables = tuple(_of_whole_layer(trace, table) for table in measured)
    spans = tuple((int(trace.steps[first]), int(trace.steps[stop - 1])) for first, stop in windows)
    return ErrorTable(tables, spans, trace.world_size, trace.digest)


def _of_whole_layer(trace: Trace, table: LayerTable) -> LayerTable:
    sample = trace.samples.get(table.layer.name)
    if sample is None:
        return table
    factor = 1 / sample.share
    return LayerTable(
        sample.layer,
        table.candidates,
        factor * table.squared_l2,
        factor**0.5 * table.l2,
        factor * table.squared_norm,
        factor**0.5 * table.norm,
    )


def _measure_layer(
    source: TraceSource,
    layer: Layer,
    candidates: tuple[Candidate, ...],
    windows: tuple[tuple[int, int], ...],
    seed: int,
) -> LayerTable:
    """All windows of one layer."""
    squared = np.zeros((len(windows), len(candidates)))
    roots = np.zeros_like(squared)
    squared_norms, norms = np.zeros(len(windows)), np.zeros(len(windows))
    with source.open([layer.name]) as trace:
        for place, window in enumerate(windows):
            for rank in range(trace.world_size):
                gradient = accumulated(trace, layer, rank, *window)
                norm = float(gradient.double().norm())
                errors = np.array(squared_errors(layer, gradient, candidates, seed=seed + rank), dtype=np.float64)
                squared[place] += errors / trace.world_size
                roots[place] += np.sqrt(errors) / trace.world_size
                squared_norms[place] += norm**2 / trace.world_size
                norms[place] += norm / trace.world_size
    return LayerTable(layer, candidates, squared, roots, squared_norms, norms)


def accumulated(trace: Trace, layer: Layer, rank: int, start: int, stop: int) -> torch.Tensor:
    """Average positions [start, stop) of one rank's layer, float32: the paper's sum over a window divided by its
    length. Steps that are not finite on some rank are left out, as a loss scaler skips them.
    """
    finite = np.isin(np.arange(start, stop), finite_positions(trace))
    if not finite.any():
        raise GradlabError(
            f"{trace.path}: no step between iterations {trace.steps[start]} and {trace.steps[stop - 1]} is finite on "
            "all ranks: choose other or longer windows (--start, --window)"
        )
    columns = max(1, _BLOCK_VALUES // CHUNK_STEPS)
    total = np.zeros(layer.numel)
    for first in range(start, stop, CHUNK_STEPS):
        last = min(first + CHUNK_STEPS, stop)
        for left in range(0, layer.numel, columns):
            # Whole rows where they fit, because reading them verifies them.
            part = None if columns >= layer.numel else slice(left, min(left + columns, layer.numel))
            rows = read_unscaled(trace, layer.name, rank, first, last, part)
            total[part or slice(None)] += rows[finite[first - start : last - start]].sum(0, dtype=np.float64)
    return torch.from_numpy((total / finite.sum()).astype(np.float32)).reshape(layer.shape)
