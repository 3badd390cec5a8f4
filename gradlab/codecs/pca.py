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
from gradlab.layout import Layer, flatten, split_slices, unflatten
from gradlab.slice_pca import (
    check_bases,
    default_slice_size,
    expand,
    fit_bases,
    fitted_slices,
    project,
    sample_slices,
)


class PCA(Codec):
    """U^T (g_m - mean_m) per slice m, one Mean of (M, d) per layer; the tail that fills no slice is sent dense.

    Learned, per layer: "<name>/basis" (B, K, d), B = ceil(M / reuse), and
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
        multiple of F D near 2048; reuse: slices that share one basis, fitted on the first of them (the paper's s), None
        for infinity; max_dimension: upper limit on d, None for none."""

        loss_threshold: float = 0.01
        slice_size: int | None = None
        reuse: int | None = None
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
            require(self.reuse is None or self.reuse >= 1, "pca", "reuse", self.reuse, "at least 1, or none")
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
            slices = sample_slices(samples, layer, self.slice_size(layer))
            if slices.shape[1] > 0:
                chosen, mean = list(fitted_slices(slices.shape[1], self.settings.reuse)), slices.double().mean(0)
                limit = self.settings.max_dimension
                basis = fit_bases(slices[:, chosen], mean[chosen], self.settings.loss_threshold, limit)
                learned |= {f"{layer.name}/mean": mean.float(), f"{layer.name}/basis": basis}
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
        centred = slices - self.learned[f"{name}/mean"].to(vector.dtype)
        return project(centred, basis.to(vector.dtype), self.settings.reuse), tail

    def _decode(self, name: str, grad: torch.Tensor, codes: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """Gradient of the layer's shape from codes (M, d) and tail, eq. (5)."""
        basis = self.learned.get(f"{name}/basis")
        if basis is None:
            return unflatten(tail, grad.shape, "gradiveq").contiguous()
        mean = self.learned[f"{name}/mean"].to(grad.dtype)
        slices = expand(codes, basis.to(grad.dtype), self.settings.reuse) + mean
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
            basis, mean = (self.learned.get(f"{layer.name}/{part}") for part in ("basis", "mean"))
            check_bases("pca", layer, basis, mean, self.settings.reuse)
