"""Whether recorded gradients have the structure that GradiVeQ uses: correlated neighbours, similar slices, slow drift.

Yu, Lin, et al., "GradiVeQ", NeurIPS 2018: sections 1 and 3, Figs. 3 to 5. A layer's averaged gradient, flattened with
its F filters' collocated values adjacent (Fig. 3a), is cut into slices of K; a basis of d axes is PCA of one slice over
L_t iterations. The loss is the paper's, ||ghat - g||^2 / ||g||^2, of sums over slices and iterations; every slice keeps
its own mean over the iterations fitted on. The paper shows losses on the iterations it fits on; here the loss on later
ones always stands beside, with that of a random basis of the same size: a uniformly random subspace of d out of K
dimensions holds d / K of any vector's energy on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradlab.analysis.measure.holdout import age_bins
from gradlab.analysis.measure.spectrum import spread
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.learning.slice_pca import dimension, principal_axes

# Slices compared for Fig. 5, spread evenly: as many as hold 2^15 values, but at least 16.
_FEWEST_COMPARED = 16
_MOST_COMPARED = 2**15
# A loss below this is rounding.
_ROUNDING = 1e-12
# Bases keep d axes by eq. (6) for this lambda, the paper's.
LOSS_THRESHOLD = 0.01
# L_c: the age before a basis loses more than 1 + this times what it loses when young.
TOLERANCE = 0.25

Windows = Sequence[tuple[int, int]]


# --- bases and losses -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Basis:
    """PCA of one slice's samples. mean: (K,); eigenvalues: (R,), largest first; axes: (K, R), orthonormal; R < T."""

    mean: np.ndarray
    eigenvalues: np.ndarray
    axes: np.ndarray

    def kept(self, loss_threshold: float) -> int:
        """Return d by eq. (6) for lambda, at least 1."""
        return dimension(torch.from_numpy(self.eigenvalues), loss_threshold)


def fit_basis(samples: np.ndarray) -> Basis:
    """Fit PCA to one slice's averaged gradients (T, K) (section 2 of the paper), in float64."""
    samples = _checked(samples, 2)
    values, axes = principal_axes(torch.from_numpy(samples - samples.mean(0)))
    return Basis(samples.mean(0), values.numpy(), axes.numpy())


def _checked(samples: np.ndarray, least: int) -> np.ndarray:
    """Samples (T, ...) in float64."""
    if samples.ndim < 2 or len(samples) < least or 0 in samples.shape:
        raise GradlabError(f"samples of shape {list(samples.shape)}, expected at least {least} of at least one value")
    if not np.isfinite(samples).all():
        raise GradlabError("samples with NaN or infinity; leave out the steps they come from")
    return np.ascontiguousarray(samples, dtype=np.float64)


def _captured(centred: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """Energy of centred slices (..., K) along axes (K, d): (...)."""
    # One product of two matrices: numpy would multiply step by step.
    codes = centred.reshape(-1, centred.shape[-1]) @ axes
    return np.square(codes).sum(1).reshape(centred.shape[:-1])


def _energies(slices: np.ndarray, mean: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """(..., 3) of slices (..., K): squared error under a basis, energy about the mean, energy."""
    centred = slices - mean
    about = np.square(centred).sum(-1)
    error = (about - _captured(centred, axes)).clip(min=0)
    return np.stack([error, about, np.square(slices).sum(-1)], axis=-1)


def _loss(energies: np.ndarray) -> float:
    """Error over energy, each summed over rows (n, 3); 0 of zero gradients, NaN of no row."""
    if not len(energies):
        return math.nan
    error, _, energy = energies.sum(0)
    return float(error / energy) if energy > 0 else 0.0


def _ratios(energies: np.ndarray) -> np.ndarray:
    """Error over energy of (..., 3); 0 where there is no energy."""
    error, energy = energies[..., 0], energies[..., 2]
    return np.divide(error, energy, out=np.zeros_like(error), where=energy > 0)


def _random_loss(energies: np.ndarray, kept: int, size: int) -> float:
    """Mean loss under a random basis of `kept` out of `size` axes, given rows (n, 3)."""
    _, about, energy = energies.sum(0)
    return float((1 - kept / size) * about / energy) if energy > 0 else 0.0


def whole_slices(columns: np.ndarray, slice_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the slices of K that rising columns hold whole: their numbers (m,), and the columns of each (m, K)."""
    numbers, begins, counts = np.unique(columns // slice_size, return_index=True, return_counts=True)
    full = counts == slice_size
    return numbers[full], begins[full, None] + np.arange(slice_size)


def cut_slices(vectors: np.ndarray, places: np.ndarray, least: int) -> np.ndarray:
    """Slices (T, m, K), float64, of vectors (T, C)."""
    if not len(vectors):
        raise GradlabError("no later samples to hold out")
    return _checked(vectors.take(places.reshape(-1), axis=1), least).reshape(len(vectors), *places.shape)


# --- 1: linear correlation, Fig. 4 ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Correlation(Jsonable):
    """Correlation of n adjacent values over T iterations, (n, n), NaN if a value never changes; its absolute mean.

    by_chance: the mean expected of independent normal values, sqrt(2 / (pi (T - 1))).
    """

    matrix: np.ndarray
    mean_absolute: float
    by_chance: float


def adjacent_correlation(values: np.ndarray) -> Correlation:
    """Correlate adjacent values (T, n) in GradiVeQ's order over iterations (section 1, point 1).

    A value that never changes has NaN. The mean magnitude is over pairs of two values, without NaN.
    """
    values = _checked(values, 2)
    centred = values - values.mean(0)
    scale = np.sqrt(np.square(centred).sum(0))
    # A mean may differ in the last bit from values that never change.
    moves = scale > 1e-12 * np.abs(values).max(0) * math.sqrt(len(values))
    units = np.divide(centred, scale, out=np.full_like(centred, np.nan), where=moves)
    matrix = (units.T @ units).clip(-1, 1)
    pairs = np.abs(matrix[np.triu_indices(len(matrix), k=1)])
    known = pairs[np.isfinite(pairs)]
    mean = float(known.mean()) if len(known) else math.nan
    return Correlation(matrix, mean, math.sqrt(2 / (math.pi * (len(values) - 1))))


@dataclass(frozen=True)
class Scatter(Jsonable):
    """Fig. 4: adjacent values (T, 3), before and after rotation; share: of the variance by principal axis, (3,)."""

    before: np.ndarray
    after: np.ndarray
    share: np.ndarray


def rotated_scatter(values: np.ndarray) -> Scatter:
    """Rotate adjacent values (T, n) onto their principal axes, n = 3 in Fig. 4."""
    if values.ndim != 2 or values.shape[1] < 2:
        raise GradlabError(f"values of shape {list(values.shape)}: expected at least two adjacent ones to rotate")
    basis = fit_basis(values)
    axes = np.zeros((values.shape[1],) * 2)
    axes[:, : basis.axes.shape[1]] = basis.axes
    after = (values.astype(np.float64) - basis.mean) @ axes
    energy = np.square(after).sum(0)
    return Scatter(values, after, energy / energy.sum() if energy.sum() > 0 else np.zeros_like(energy))


# --- 2: the first slice's compressor on the others, Fig. 5 ------------------------------------------------------------


@dataclass(frozen=True)
class SliceSizeCurve(Jsonable):
    """Fig. 5: losses under the first slice's basis, over n slice sizes K.

    multiples: whether K is a multiple of `period` (F D); dimensions: d; ratios: K / d; in_sample_loss: loss of the
    remaining slices on the iterations fitted on; later_loss: of these on later iterations; random_loss: the same under
    a random basis.
    """

    period: int
    sizes: np.ndarray
    multiples: np.ndarray
    dimensions: np.ndarray
    ratios: np.ndarray
    in_sample_loss: np.ndarray
    later_loss: np.ndarray
    random_loss: np.ndarray


def loss_by_slice_size(
    fit: np.ndarray,
    later: np.ndarray,
    sizes: Sequence[int],
    *,
    period: int,
    loss_threshold: float = LOSS_THRESHOLD,
    columns: np.ndarray | None = None,
) -> SliceSizeCurve:
    """Measure Fig. 5: the loss of the first slice's compressor on the remaining slices, for each K."""
    columns = _places(fit, later, columns)
    rows = [_one_size(fit, later, size, loss_threshold, columns) for size in sizes]
    kept = np.array([row[0] for row in rows], dtype=np.int64)
    losses = np.array([row[1:] for row in rows], dtype=np.float64).reshape(-1, 3)
    tried = np.array(sizes, dtype=np.int64)
    return SliceSizeCurve(period, tried, tried % period == 0, kept, tried / kept, *losses.T)


def _one_size(
    fit: np.ndarray, later: np.ndarray, size: int, loss_threshold: float, columns: np.ndarray
) -> tuple[float, ...]:
    """d, and the losses of `SliceSizeCurve` in its order."""
    places = _held(columns, size, least=2)
    places = places[spread(len(places), max(_FEWEST_COMPARED, _MOST_COMPARED // size))]
    slices = cut_slices(fit, places, 2)
    basis, mean = fit_basis(slices[:, 0]), slices.mean(0)
    kept = basis.kept(loss_threshold)
    seen = _energies(slices[:, 1:], mean[1:], basis.axes[:, :kept]).sum(0)
    unseen = _energies(cut_slices(later, places[1:], 1), mean[1:], basis.axes[:, :kept]).sum(0)
    return kept, _loss(seen), _loss(unseen), _random_loss(unseen, kept, size)


def _places(fit: np.ndarray, later: np.ndarray, columns: np.ndarray | None) -> np.ndarray:
    """Places (n,) of values (T, n) and (T', n)."""
    places = np.arange(fit.shape[-1]) if columns is None else np.asarray(columns)
    if not places.shape == fit.shape[1:] == later.shape[1:]:
        shapes = f"{list(fit.shape)} and {list(later.shape)}"
        raise GradlabError(
            f"gradients of shapes {shapes} at {list(places.shape)} places: expected (T, n), (T', n), (n,)"
        )
    return places


def _held(columns: np.ndarray, size: int, least: int) -> np.ndarray:
    """Columns of the whole slices of this size, (m, K); the first slice must be among them."""
    if size < 1:
        raise GradlabError(f"slice size {size}: expected at least 1")
    numbers, places = whole_slices(columns, size)
    if len(numbers) < least or numbers[0] != 0:
        held = f"{len(numbers)} whole slices of the layer"
        raise GradlabError(f"slice size {size}: {held}, expected at least {least}, the first among them")
    return places


# --- 3: staleness -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staleness(Jsonable):
    """Loss of bases fitted on windows against their age, in iterations after the window's last, (n,) pooled by bin.

    by_window: (w, n); suggested: L_c in iterations, None if no bin's loss exceeds 1.25 times the youngest bin's.
    """

    ages: np.ndarray
    loss: np.ndarray
    random_loss: np.ndarray
    by_window: np.ndarray
    suggested: int | None
    last_age: int


def staleness(
    samples: np.ndarray,
    steps: np.ndarray,
    windows: Windows,
    *,
    loss_threshold: float = LOSS_THRESHOLD,
    bins: int = 12,
) -> Staleness:
    """Measure how the loss of one slice's bases grows with age (section 1, point 3), and suggest their lifetime L_c.
    samples: (T, K); steps: (T,), rising; windows: ranges of rows to fit on. L_c is the oldest age before a bin's loss
    exceeds 1.25 times that of the youngest bin of the same windows.
    """
    samples, steps = _checked(samples, 1), np.asarray(steps)
    used = [(first, stop) for first, stop in windows if stop < len(samples)]
    if not used:
        raise GradlabError(f"{len(windows)} windows, none with later samples: nothing can grow old")
    bases = [fit_basis(samples[first:stop]) for first, stop in used]
    kept = [basis.kept(loss_threshold) for basis in bases]
    ages = [steps[stop:] - steps[stop - 1] for _, stop in used]
    edges = age_bins(np.concatenate(ages), bins)
    energies, counts = np.zeros((len(used), len(edges), 4)), np.zeros((len(used), len(edges)), dtype=np.int64)
    for row, ((_, stop), basis, d) in enumerate(zip(used, bases, kept, strict=True)):
        of_step = _energies(samples[stop:], basis.mean, basis.axes[:, :d])
        for place, (youngest, oldest) in enumerate(edges):
            inside = (ages[row] >= youngest) & (ages[row] <= oldest)
            error, about, energy = of_step[inside].sum(0)
            energies[row, place] = error, about, energy, (1 - d / samples.shape[1]) * about
            counts[row, place] = inside.sum()
    return _aged(np.array(edges), energies, counts)


def _aged(edges: np.ndarray, energies: np.ndarray, counts: np.ndarray) -> Staleness:
    """The result, from energies (w, n, 4) by window and bin: error, about the mean, all, error of a random basis."""
    pooled, occupied = energies.sum(0), counts.sum(0) > 0
    # Windows that reach a bin and have a youngest bin to compare it with.
    both = ((counts > 0) & (counts[:, :1] > 0))[..., None]
    compared = np.any(both, axis=(0, 2))
    here, young = _ratios((energies * both).sum(0)), _ratios((energies[:, :1] * both).sum(0))
    aged = compared & (here > (1 + TOLERANCE) * young + _ROUNDING)
    before = edges[: int(aged.argmax())][occupied[: int(aged.argmax())]] if aged.any() else None
    return Staleness(
        ages=edges,
        loss=np.where(occupied, _ratios(pooled), np.nan),
        random_loss=np.where(occupied, _ratios(pooled[:, [3, 1, 2]]), np.nan),
        by_window=np.where(counts > 0, _ratios(energies), np.nan),
        suggested=int(before[-1, 1]) if before is not None else None,
        last_age=int(edges[occupied][-1, 1]),
    )
