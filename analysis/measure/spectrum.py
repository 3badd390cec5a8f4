"""How correlated recorded gradients are: spectra over time, agreement between ranks, signal and noise.

The averaged gradient of a layer over T iterations is a matrix (T, numel). Its eigenvalues come from the T x T matrix
of inner products (snapshot PCA, Sirovich 1987), accumulated in float64 over blocks of columns, so memory depends on T
and the block, never on the model. GradiVeQ (Yu et al., NeurIPS 2018) looks at slices of K elements in its own order:
a slice's Gram matrix is a sum over its columns. T samples show at most T - 1 axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradlab.analysis.gradients import read_positions
from gradlab.analysis.measure.agreement import rank_cosine, signal_to_noise
from gradlab.analysis.parallel import share_out_layers
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.learning.slice_pca import default_slice_size, dimension, slice_order, slice_view
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceSource
LOSS_THRESHOLDS = (0.01, 0.05, 0.1)
_MOST_SAMPLES = 200  # iterations that are read
# Values held at a time while a layer is streamed, over all ranks; in float64, and again while they are put together.
_BLOCK_VALUES = 2**23


# --- pure functions over arrays -------------------------------------------------------------------------------------


def centred_eigenvalues(gram: np.ndarray) -> np.ndarray:
    """Compute eigenvalues (T,), largest first, of the covariance of T samples, from their Gram matrix (T, T).
    Centring the samples is centring rows and columns of the Gram matrix; the covariance divides by T.
    """
    count = len(gram)
    centred = gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()
    return np.linalg.eigvalsh(centred / count)[::-1].clip(min=0.0)


def cumulative_variance(eigenvalues: np.ndarray) -> np.ndarray:
    """Share of variance that the leading 1, 2, ... axes hold; ones where there is no variance at all."""
    total = eigenvalues.sum()
    return np.cumsum(eigenvalues) / total if total > 0 else np.ones_like(eigenvalues)


def dimensions(eigenvalues: np.ndarray) -> dict[str, int]:
    """d by GradiVeQ's eq. (6) for each lambda of `LOSS_THRESHOLDS`, by str(lambda)."""
    values = torch.from_numpy(np.array(eigenvalues, dtype=np.float64))
    return {str(loss): dimension(values, loss) for loss in LOSS_THRESHOLDS}


def spread(count: int, most: int) -> np.ndarray:
    """At most `most` whole numbers below `count`, evenly spread, the first among them."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, most)).round().astype(np.int64))


# --- over a trace ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSpectrum(Jsonable):
    """One layer's measurements; arrays over the sampled steps have length T.

    slice_eigenvalues: those of the first slice, which GradiVeQ fits.
    mean_share: share of the energy that the average over time holds; norm: l2 norm of the averaged gradient, (T,).
    cosine: mean over pairs of ranks, (T,), NaN where there is none; inner: products between ranks, (T, N, N).
    """

    layer: Layer = field(metadata={"json": False})
    slice_size: int
    slices: int
    slice_eigenvalues: np.ndarray
    layer_eigenvalues: np.ndarray
    mean_share: float
    norm: np.ndarray
    cosine: np.ndarray
    signal_to_noise: float | None
    inner: np.ndarray = field(metadata={"json": False})

    @property
    def mean_cosine(self) -> float | None:
        """Mean of the cosine over the steps that have one."""
        return float(np.nanmean(self.cosine)) if np.isfinite(self.cosine).any() else None

    def to_json(self) -> dict[str, Any]:
        """The layer with its measurements, and what follows from its eigenvalues."""
        return {
            **self.layer.to_json(),
            **super().to_json(),
            "slice_cumulative_variance": cumulative_variance(self.slice_eigenvalues).tolist(),
            "layer_cumulative_variance": cumulative_variance(self.layer_eigenvalues).tolist(),
            "layer_dimensions": dimensions(self.layer_eigenvalues),
            "mean_cosine": self.mean_cosine,
        }


@dataclass(frozen=True)
class TraceSpectrum(Jsonable):
    """Measurements of several layers at the same iterations, (T,), those that are finite on all ranks and layers."""

    world_size: int
    steps: np.ndarray
    layers: tuple[LayerSpectrum, ...]
    nonfinite_steps: tuple[int, ...] = ()
    skipped_layers: tuple[str, ...] = ()
    never_finite_layers: tuple[str, ...] = ()


def measure_spectrum(
    trace: Trace,
    max_samples: int = _MOST_SAMPLES,
    *,
    workers: int = 1,
    progress: Progress | None = None,
) -> TraceSpectrum:
    """Measure spectra, norms and agreement between ranks of all matrices, at samples spread evenly."""
    if (recorded := len(trace.steps)) < 2:
        raise GradlabError(f"{trace.path}: {recorded} steps to measure, expected at least 2: record more")
    positions = spread(recorded, max_samples)
    measured = [layer for layer in _matrices(trace.layers) if layer.numel > 0]
    if not measured:
        raise GradlabError(f"{trace.path}: no layer to measure among {len(trace.layers)} recorded")
    sharing: dict[str, Any] = {"workers": workers, "progress": progress}
    products = share_out_layers(_layer_products, trace, measured, positions, what="spectrum", **sharing)
    ever = [bool(np.isfinite(p.inner).all((1, 2)).any()) for p in products]
    never = tuple(p.layer.name for p, finite in zip(products, ever, strict=True) if not finite)
    if any(ever):  # a layer that is never finite must not take the others along
        products = [p for p in products if p.layer.name not in never]
    usable = np.all([np.isfinite(p.inner).all((1, 2)) for p in products], axis=0)
    steps = np.asarray(trace.steps)[positions]
    if usable.sum() < 2:
        raise GradlabError(f"{trace.path}: {int(usable.sum())} steps with finite gradients, expected at least 2")
    skipped = [layer.name for layer in trace.layers if layer not in measured]
    return TraceSpectrum(
        trace.world_size,
        steps[usable],
        tuple(_layer_spectrum(p, usable) for p in products),
        tuple(int(step) for step in steps[~usable]),
        tuple(skipped),
        never,
    )


@dataclass
class _Products:
    """Inner products of one layer: between ranks (T, N, N), between steps (T, T), and those of its first slice."""

    layer: Layer
    slice_size: int
    inner: np.ndarray
    gram: np.ndarray
    slice_gram: np.ndarray


def _matrices(layers: Sequence[Layer]) -> list[Layer]:
    matrices = [layer for layer in layers if len(layer.shape) > 1]
    return matrices or list(layers)


def _layer_products(source: TraceSource, layer: Layer, positions: np.ndarray) -> _Products:
    # Steps that are not finite make their own rows and columns NaN; they are taken out when all layers are known.
    with source.open([layer.name]) as trace, np.errstate(invalid="ignore", over="ignore"):
        return _products(trace, layer, positions)


def _products(trace: Trace, layer: Layer, positions: np.ndarray) -> _Products:
    count, ranks = len(positions), trace.world_size
    slice_size = min(default_slice_size(slice_view(layer)), layer.numel)
    in_slice = np.zeros(layer.numel, bool)
    in_slice[slice_order(layer)[:slice_size].numpy()] = True
    inner, gram, slice_gram = np.zeros((count, ranks, ranks)), np.zeros((count, count)), np.zeros((count, count))
    width = int(np.clip(_BLOCK_VALUES // (count * ranks), 256, 2**16))
    for first in range(0, layer.numel, width):
        columns = slice(first, min(first + width, layer.numel))
        block = np.empty((count, ranks, columns.stop - columns.start))
        for rank in range(ranks):
            block[:, rank] = read_positions(trace, layer.name, rank, positions, columns)
        inner += np.einsum("tnc,tmc->tnm", block, block, optimize=True)
        average = block.mean(1)
        gram += average @ average.T
        part = average[:, in_slice[columns]]
        slice_gram += part @ part.T
    return _Products(layer, slice_size, inner, gram, slice_gram)


def _layer_spectrum(products: _Products, finite: np.ndarray) -> LayerSpectrum:
    both = np.ix_(finite, finite)
    gram, slice_gram, inner = products.gram[both], products.slice_gram[both], products.inner[finite]
    energy = np.trace(gram) / len(gram)
    return LayerSpectrum(
        products.layer,
        products.slice_size,
        products.layer.numel // products.slice_size,
        centred_eigenvalues(slice_gram)[: products.slice_size],
        centred_eigenvalues(gram)[: products.layer.numel],
        float(gram.mean() / energy) if energy > 0 else 0.0,
        np.sqrt(np.diag(gram)),
        rank_cosine(inner),
        signal_to_noise(inner),
        inner,
    )
