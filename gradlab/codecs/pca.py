"""PCA of gradient slices: the linear compressor of GradiVeQ, summed in its compressed form by the all-reduce.

Yu, Lin, et al., "GradiVeQ: Vector quantization for bandwidth-efficient gradient aggregation in distributed CNN
training", NeurIPS 2018. A layer's gradient is flattened with its F filters' collocated values adjacent (Fig. 3a) and
cut into M slices of K; slice m travels as d numbers (eq. 3), is summed (eq. 4) and expanded (eq. 5). The basis comes
from recorded averaged gradients, with d the fewest axes that keep 1 - lambda of their variance (eq. 6).

The paper's g is the sum over nodes and its mu that sum's mean, so that each node subtracts mu / N; here gradients and
mean are averages over nodes, each node subtracts the mean itself, and an artifact does not depend on N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradlab.codec import Codec, Context, Exchanged, Tensors
from gradlab.codec_settings import require
from gradlab.collectives import Coroutine, Mean
from gradlab.errors import GradlabError
from gradlab.layout import Layer, filter_axes, flatten, split_slices, unflatten

# A slice of at most this many elements, where the layer leaves a choice: its basis is K x d floats per layer.
_PREFERRED_SLICE = 2048


class PCA(Codec):
    """U^T (g_m - mean_m) per slice m, one Mean of (M, d) per layer; the tail that fills no slice is sent dense.

    Learned, per layer: "<name>/basis" (B, K, d) with B = 1 (one basis per layer) or M (one per slice), and
    "<name>/mean" (M, K). A layer without a basis is sent dense. Affine in the gradient: it commutes with averaging,
    eq. (1). What the basis does not span is never sent, so error feedback on it only grows a residual.
    """

    name = "pca"
    family = "learned linear"
    linear = True
    learns = True
    wants_error_feedback = False

    @dataclass(frozen=True)
    class Settings:
        """loss_threshold: the paper's lambda, share of variance given up; slice_size: K in elements, None for a
        multiple of F D near 2048; basis: "layer" fits the first slice and reuses it (the paper's s = infinity),
        "slice" fits every slice (s = 1); max_dimension: upper limit on d, None for none."""

        loss_threshold: float = 0.01
        slice_size: int | None = None
        basis: str = "layer"
        max_dimension: int | None = None

        def __post_init__(self) -> None:
            require(
                0 <= self.loss_threshold < 1,
                "pca",
                "loss_threshold",
                self.loss_threshold,
                "lambda in [0, 1) (eq. 6)",
            )
            require(self.slice_size is None or self.slice_size >= 1, "pca", "slice_size", self.slice_size, "at least 1")
            require(self.basis in ("layer", "slice"), "pca", "basis", self.basis, "'layer' or 'slice'")
            require(
                self.max_dimension is None or self.max_dimension >= 1,
                "pca",
                "max_dimension",
                self.max_dimension,
                "at least 1",
            )

    def fit(self, layers: Sequence[Layer], samples: Mapping[str, torch.Tensor]) -> PCA:
        """A fitted codec. samples: per layer the averaged gradients of T iterations, shape (T, *layer.shape).

        Layers smaller than a slice get no basis.

        Raises:
            GradlabError: for a layer without samples, fewer than two of them, another shape, or values that are not
                finite.
        """
        learned: Tensors = {}
        for layer in layers:
            if layer.name not in samples:
                raise GradlabError(f"{layer.name}: no samples to fit PCA on; there are some of: {', '.join(samples)}")
            slices = _sample_slices(samples[layer.name], layer, self.slice_size(layer))
            if slices.shape[1] > 0:
                mean, basis = fit_slices(slices, self.settings)
                learned |= {f"{layer.name}/mean": mean, f"{layer.name}/basis": basis}
        return PCA(self.settings, learned)

    def slice_size(self, layer: Layer) -> int:
        """K for a layer: as set, else by `default_slice_size`."""
        return self.settings.slice_size or default_slice_size(layer)

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        requests: list[Mean] = []
        codes, tails = {}, {}
        for name, grad in grads.items():
            codes[name], tails[name] = self._encode(name, flatten(grad, "gradiveq"))
            requests += [Mean(codes[name]), Mean(tails[name])]
        answers = yield tuple(requests)
        mean, own = {}, {}
        for position, (name, grad) in enumerate(grads.items()):
            mean[name] = self._decode(name, grad, answers[2 * position], answers[2 * position + 1])
            own[name] = self._decode(name, grad, codes[name], tails[name])
        return Exchanged(mean, own)

    def _encode(self, name: str, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (M, d) of the whole slices, eq. (3), and the dense tail."""
        basis = self.learned.get(f"{name}/basis")
        if basis is None:
            return vector.new_empty(0), vector
        slices, tail = split_slices(vector, basis.shape[1])
        return project(slices - self.learned[f"{name}/mean"].to(vector.dtype), basis.to(vector.dtype)), tail

    def _decode(self, name: str, grad: torch.Tensor, codes: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """Gradient of the layer's shape from codes (M, d) and tail, eq. (5)."""
        basis = self.learned.get(f"{name}/basis")
        if basis is None:
            return unflatten(tail, grad.shape, "gradiveq").contiguous()
        slices = expand(codes, basis.to(grad.dtype)) + self.learned[f"{name}/mean"].to(grad.dtype)
        return unflatten(torch.cat([slices.reshape(-1), tail]), grad.shape, "gradiveq").contiguous()

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        total = 0
        for layer in layers:
            basis = self.learned.get(f"{layer.name}/basis")
            if basis is None:
                total += layer.numel
            else:
                whole, tail = divmod(layer.numel, basis.shape[1])
                total += whole * basis.shape[2] + tail
        return 4 * total

    def check(self, layers: Sequence[Layer]) -> None:
        expected = {f"{layer.name}/{part}" for layer in layers for part in ("basis", "mean")}
        if not self.learned:
            raise GradlabError("codec pca has no basis yet: fit one first (gradlab fit gradiveq, or PCA.fit)")
        if unknown := sorted(set(self.learned) - expected):
            raise GradlabError(f"codec pca: learned tensors {unknown} belong to no layer of the group")
        for layer in layers:
            _check_basis(layer, self.learned.get(f"{layer.name}/basis"), self.learned.get(f"{layer.name}/mean"))


def default_slice_size(layer: Layer) -> int:
    """K: the largest multiple of F D (GradiVeQ, section 3) that divides the layer and is at most 2048, or F D.

    A layer without spatial extent is one slice.
    """
    filters, depth = filter_axes(layer)
    places = layer.numel // max(1, filters * depth)
    fitting = [n for n in range(1, places + 1) if places % n == 0 and n * filters * depth <= _PREFERRED_SLICE]
    return max(1, filters * depth * max(fitting, default=1))


def principal_axes(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues (R,), largest first, and axes (K, R) of the covariance of centred samples (T, K), in float64.

    Works on the smaller of the (T, T) Gram and the (K, K) covariance matrix; R = min(T, K) less the directions that
    hold no variance. The sign of an axis makes its largest component positive.
    """
    samples = samples.double()
    count, features = samples.shape
    small = samples @ samples.T if count < features else samples.T @ samples
    values, vectors = torch.linalg.eigh(small / count)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    keep = int((values > 1e-12 * values[:1].clamp_min(torch.finfo(torch.float64).tiny)).sum())
    values, vectors = values[:keep], vectors[:, :keep]
    axes = samples.T @ vectors / (values * count).sqrt() if count < features else vectors
    largest = axes.abs().argmax(0, keepdim=True)
    return values, axes * axes.gather(0, largest).sign()


def dimension(eigenvalues: torch.Tensor, loss_threshold: float) -> int:
    """d by eq. (6): the fewest leading eigenvalues whose sum exceeds 1 - lambda of the total; at least 1."""
    total = eigenvalues.sum()
    if total <= 0:
        return 1
    enough = eigenvalues.cumsum(0) / total > 1 - loss_threshold
    return int(enough.int().argmax()) + 1 if bool(enough.any()) else len(eigenvalues)


def fit_slices(slices: torch.Tensor, settings: PCA.Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (M, K) and basis (B, K, d), float32, from slices (T, M, K) of T averaged gradients.

    Slices that never change get the first unit vector: their mean already says everything.
    """
    mean = slices.double().mean(0)
    fitted = range(1 if settings.basis == "layer" else slices.shape[1])
    spectra = [principal_axes(slices[:, m].double() - mean[m]) for m in fitted]
    limit = settings.max_dimension or slices.shape[2]
    width = max(min(limit, dimension(values, settings.loss_threshold)) for values, _ in spectra)
    basis = torch.stack([_first_columns(axes, width) for _, axes in spectra])
    return mean.float(), basis.float().contiguous()


def _first_columns(axes: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` axes (K, width); where variance runs out, completed to an orthonormal set."""
    if axes.shape[1] >= width:
        return axes[:, :width]
    complete = torch.linalg.qr(torch.cat([axes, torch.eye(axes.shape[0], dtype=axes.dtype)], dim=1)).Q
    return torch.cat([axes, complete[:, axes.shape[1] : width]], dim=1)


def _sample_slices(samples: torch.Tensor, layer: Layer, slice_size: int) -> torch.Tensor:
    if samples.ndim < 1 or tuple(samples.shape[1:]) != layer.shape:
        raise GradlabError(f"{layer.name}: samples of shape {list(samples.shape)}, expected (T, {list(layer.shape)})")
    if len(samples) < 2:
        raise GradlabError(f"{layer.name}: {len(samples)} samples, PCA needs at least 2")
    if not bool(samples.isfinite().all()):
        raise GradlabError(f"{layer.name}: samples with NaN or infinity; leave out the steps they come from")
    return torch.stack([split_slices(flatten(sample, "gradiveq"), slice_size)[0] for sample in samples])


def project(slices: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Codes (M, d) of slices (M, K) under a basis (1, K, d) or (M, K, d)."""
    return slices @ basis[0] if len(basis) == 1 else torch.einsum("mk,mkd->md", slices, basis)


def expand(codes: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Slices (M, K) from codes (M, d) under a basis (1, K, d) or (M, K, d)."""
    return codes @ basis[0].T if len(basis) == 1 else torch.einsum("md,mkd->mk", codes, basis)


def _check_basis(layer: Layer, basis: torch.Tensor | None, mean: torch.Tensor | None) -> None:
    if basis is None and mean is None:
        return
    if basis is None or mean is None:
        raise GradlabError(f"codec pca: layer {layer.name} has only one of basis and mean")
    if not {basis.dtype, mean.dtype} <= {torch.float32, torch.float64}:
        raise GradlabError(
            f"codec pca: layer {layer.name} has a basis of {basis.dtype} and a mean of {mean.dtype}, expected float32"
        )
    sound = basis.ndim == 3 and 1 <= basis.shape[2] <= basis.shape[1] <= layer.numel
    slices = layer.numel // basis.shape[1] if sound else 0
    if not sound or basis.shape[0] not in (1, slices) or tuple(mean.shape) != (slices, basis.shape[1]):
        raise GradlabError(
            f"codec pca: layer {layer.name} {list(layer.shape)} got a basis {list(basis.shape)} and a mean "
            f"{list(mean.shape)}, expected (1 or M, K, d) with d <= K and (M, K) with M = numel // K"
        )
    if not bool(basis.isfinite().all() and mean.isfinite().all()):
        raise GradlabError(f"codec pca: layer {layer.name} has non-finite values in its basis or mean")
