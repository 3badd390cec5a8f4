"""Fit GradiVeQ's slice bases to a recorded trace, and measure them where it counts: on later iterations.

Yu, Lin, et al., "GradiVeQ", NeurIPS 2018: L_t = 100 averaged gradients, one PCA per layer (reuse factor infinity), d by
eq. (6). With L_t samples a basis has at most L_t - 1 axes, so the loss on those samples says nothing about training;
the loss on iterations that the fit has not seen is reported beside it, as a curve over the age of the basis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradlab.analysis.gradients import mean_unscaled
from gradlab.analysis.measure.holdout import HoldOut, holdouts_by_age, losses_by_slice, random_basis_plan
from gradlab.analysis.parallel import share_out_layers
from gradlab.analysis.replay.sampled import require_whole
from gradlab.artifact import Artifact
from gradlab.codec.settings import build_settings
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.errors import GradlabError
from gradlab.formatting import format_counted, format_percent
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.learning.slice_pca import layer_slices, possible_axes
from gradlab.plan import FEEDBACK, Group, Plan, Schedule
from gradlab.plan.coverage import known_roles, left_dense, list_roles
from gradlab.progress import Progress
from gradlab.saving import Saving

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceSource

# The paper's constants: after L_c = 400 compressed iterations L_t = 100 are sampled in the run, and bases fitted again.
PAPER = GradiVeQ.Settings()
# The form of GradiVeQ that trained best at the same bytes (docs/gradiveq.md): half of a code is random coordinates, new
# in every iteration, the other half axes fitted on several slices of each layer, and again on what was decoded.
RECOMMENDED = GradiVeQ.Settings(ratio=20.0, pooled=8, complement=0.5, whitening=False, refresh="decoded")
# Share of the samples, the latest, that measure what axes hold that were fitted on the others.
_JUDGES = 0.25
_BLOCK_VALUES = 2**22  # float32 values of averaged gradients held at a time, while a layer is streamed
_TOLERATED = 2.0  # held-out loss above this multiple of lambda gets a warning


class NotFittable(GradlabError):
    """A sound trace that a fit cannot use: too short, or without a layer to fit."""


@dataclass(frozen=True)
class GradiveqOptions:
    """Settings of `fit_gradiveq`, and the steps that it fits on.

    The paper's order is a warm-up, L_t dense iterations to fit on, then compression.

    >>> from gradlab.analysis import GradiveqOptions
    >>> GradiveqOptions(samples=50, warmup_steps=100).start is None
    True

    Args:
        samples: recorded steps to fit on (L_t), at least 2. All later steps are held out.
        start: position of the first of them. By default they are the last before `warmup_steps`, or the trace's first
            if that is 0. A fit on iterations that the plan compresses gets a warning.
        settings: settings of every group; None is `PAPER`. With a complement the groups get error feedback.
        layer_settings: settings that differ for a layer, by its name.
        roles: roles of the layers to fit. The fit warns if they leave more than half of the model's bytes dense.
        warmup_steps: dense steps before the first compressed one; 0 compresses from the iteration after the samples.
        seed: seed of the plan and of the random bases it is compared with.
    """

    samples: int = 100
    start: int | None = None
    settings: GradiVeQ.Settings | None = None
    layer_settings: Mapping[str, Mapping[str, Any]] | None = None
    roles: Sequence[str] = GradiVeQ.about.defaults.roles
    warmup_steps: int = 0
    seed: int = 0


@dataclass(frozen=True)
class FittedLayer(Jsonable):
    """A layer's bases, and what they lose on the iterations they were fitted on.

    slice_axis: axis that slices lie along, "outputs" or "inputs".
    slice_size, dimension: elements (K) and codes (d) of a slice.
    samples: iterations with finite gradients among those fitted on.
    fitted_slices_energy, in_sample_energy: squared error and squared norm there, of fitted slices and of all.
    fitted_slices_loss, in_sample_loss: the error over the norm.
    """

    slice_axis: str
    slice_size: int
    dimension: int
    slices: int
    samples: int
    fitted_slices_energy: tuple[float, float]
    fitted_slices_loss: float
    in_sample_energy: tuple[float, float]
    in_sample_loss: float


@dataclass(frozen=True)
class GradiveqMeasurement(Jsonable):
    """How bases were fitted, and what they lose where they were fitted and on later iterations.

    promised_loss: the largest lambda of any layer; None if K / d is set.
    held_out_on: the first and the last iteration held out.
    skipped: reason for leaving a layer dense, by name.
    left_dense: roles that are left dense, if that is more than half of the model's bytes; else empty.
    fitted_slices_loss, in_sample_loss: losses on the iterations fitted on, on the fitted slices and on all.
    holdout, random_basis: losses on later iterations, of the fit and of random bases of the same size.
    payload_bytes: bytes of a compressed iteration and rank with the fitted bases, mean_payload_bytes: over refreshes.
    dense_payload_bytes: bytes of a dense iteration and rank.
    """

    trace: str
    world_size: int
    settings: GradiVeQ.Settings
    promised_loss: float | None
    fitted_on: list[int]
    warmup_steps: int
    held_out_on: tuple[int, int]
    layers: dict[str, FittedLayer]
    skipped: dict[str, str]
    left_dense: str
    fitted_slices_loss: float
    in_sample_loss: float
    holdout: HoldOut
    random_basis: HoldOut
    payload_bytes: float
    mean_payload_bytes: float
    dense_payload_bytes: float

    @property
    def saving(self) -> Saving:
        """How many times smaller a compressed iteration's payload is."""
        return Saving.of(self.payload_bytes, self.dense_payload_bytes)

    @property
    def mean_saving(self) -> Saving:
        """How many times smaller the payload is on average over refreshes of the bases."""
        return Saving.of(self.mean_payload_bytes, self.dense_payload_bytes)

    @property
    def warnings(self) -> list[str]:
        """Warnings before training with the plan, one line each."""
        return [*([self.left_dense] if self.left_dense else []), *_early_compression(self), *_poor_fit(self)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, as an artifact's metadata and report.json hold it: the method, every field, the warnings."""
        return {"method": "gradiveq", **super().to_json(), "warnings": self.warnings}


@dataclass(frozen=True)
class GradiveqFit:
    """A plan with fitted bases, a group per fitted layer, and how they were measured."""

    plan: Plan
    measured: GradiveqMeasurement

    @property
    def provenance(self) -> dict[str, Any]:
        """The measurement as plain JSON: the artifact's metadata."""
        return self.measured.to_json()

    @property
    def warnings(self) -> list[str]:
        """Warnings before training with the plan, one line each."""
        return self.measured.warnings

    def artifact(self) -> Artifact:
        """Join the plan and its metadata, to be saved."""
        return Artifact(self.plan, self.provenance)


def fit_gradiveq(
    trace: Trace,
    options: GradiveqOptions | None = None,
    *,
    workers: int = 1,
    progress: Progress | None = None,
    **changes: Any,
) -> GradiveqFit:
    """Fit bases of slices for each layer of the given roles, and measure their loss on later steps.

    Layers with fewer elements than a slice, or whose codes would be no smaller, stay dense. `measured.skipped` lists
    them. If K / d is set and `slice_axis` is "auto", slices of a matrix lie along the axis that loses least at that
    K / d on the last quarter of the samples, with bases fitted on the others.

    >>> from gradlab.analysis import fit_gradiveq
    >>> with Trace("trace") as trace:
    ...     fit = fit_gradiveq(trace, samples=30)
    >>> [(group.codec, group.layers) for group in fit.plan.groups]
    [('gradiveq', ('conv.weight',)), ('gradiveq', ('head.weight',))]

    Args:
        trace: gradients of all ranks, or their averages.
        options: settings, and the steps to fit on.
        workers: processes that share the layers out.
        progress: called as the work goes on.
        changes: fields of `GradiveqOptions` by name, which differ from `options`.

    Raises:
        GradlabError: for settings that cannot be; `NotFittable` for a trace that is too short or has no such layer.
    """
    options = dataclasses.replace(options or GradiveqOptions(), **changes)
    roles = known_roles(options.roles)
    settings = options.settings or PAPER
    if settings.complement == 1:
        raise NotFittable("complement = 1: all axes are random, there is nothing to fit; make a uniform plan")
    _require_slices(trace, roles)
    chosen = _chosen_settings(trace, settings, options.layer_settings or {}, roles)
    schedule = Schedule(options.warmup_steps)
    window = _fit_window(trace, options.start, options.samples, options.warmup_steps)
    if options.warmup_steps == 0:
        schedule = Schedule(int(trace.steps[window.stop - 1]) + 1)
    sharing: Mapping[str, Any] = {"workers": workers, "progress": progress}
    chosen = _with_measured_axes(trace, window, chosen, sharing)
    learned, layers, skipped = _fit_layers(trace, window, chosen, sharing)
    if not learned:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items()) or "the trace holds none"
        raise NotFittable(
            f"{trace.path}: no layer of role {', '.join(roles)} can be fitted ({reasons}); there are "
            f"{list_roles(trace.layers)}"
        )
    groups = tuple(_group(name, chosen[name]) for name in learned)
    plan = Plan(trace.model_layers, groups, schedule, options.seed, learned)
    return GradiveqFit(plan, _measured(trace, plan, window, options, chosen, layers, skipped, sharing))


def _measured(
    trace: Trace,
    plan: Plan,
    window: range,
    options: GradiveqOptions,
    chosen: Mapping[str, GradiVeQ.Settings],
    layers: dict[str, FittedLayer],
    skipped: dict[str, str],
    sharing: Mapping[str, Any],
) -> GradiveqMeasurement:
    """Measure fitted bases, and random ones, on later iterations."""
    both = [plan, random_basis_plan(plan, options.seed)]
    held, control = holdouts_by_age(trace, both, start=window.stop, **sharing)
    return GradiveqMeasurement(
        trace=trace.digest,
        world_size=trace.world_size,
        settings=options.settings or PAPER,
        promised_loss=_promised_loss(chosen),
        fitted_on=[int(step) for step in trace.steps[window.start : window.stop]],
        warmup_steps=plan.schedule.warmup_steps,
        held_out_on=(int(trace.steps[window.stop]), int(trace.steps[-1])),
        layers=layers,
        skipped=skipped,
        left_dense=_left_dense(trace.layers, [*chosen], options.roles),
        fitted_slices_loss=_loss([layer.fitted_slices_energy for layer in layers.values()]),
        in_sample_loss=_loss([layer.in_sample_energy for layer in layers.values()]),
        holdout=held,
        random_basis=control,
        payload_bytes=plan.payload_bytes(trace.world_size, states={}),
        mean_payload_bytes=plan.payload_bytes(trace.world_size),
        dense_payload_bytes=plan.payload_bytes(trace.world_size, compressing=False),
    )


def _require_slices(trace: Trace, roles: Sequence[str]) -> None:
    """Refuse samples of layers of these roles: their slices are not those of the whole layers."""
    names = [layer.name for layer in trace.layers if layer.role in roles]
    try:
        require_whole(trace, names, "GradiVeQ cuts whole layers into slices, and those of a sample are others")
    except GradlabError as error:
        raise NotFittable(str(error)) from None


def _fit_window(trace: Trace, start: int | None, samples: int, warmup_steps: int) -> range:
    """Positions to fit on."""
    recorded = len(trace.steps)
    if samples < 2:
        raise GradlabError(f"samples = {samples}, expected at least 2 steps to fit on")
    if start is not None and not 0 <= start < max(1, recorded):
        raise GradlabError(f"{trace.path}: start = {start}, expected a position in 0..{recorded - 1}")
    first = start if start is not None else _last_before_compression(trace, samples, warmup_steps)
    if recorded - first <= samples:
        raise NotFittable(
            f"{trace.path}: {recorded - first} of {recorded} steps are left from position {first}; fitting on "
            f"{samples} and holding out later ones needs at least {samples + 1}: record more, or fit on fewer samples"
        )
    return range(first, first + samples)


def _last_before_compression(trace: Trace, samples: int, warmup_steps: int) -> int:
    if warmup_steps == 0:
        return 0
    before = int(np.searchsorted(trace.steps, warmup_steps))
    if before < samples:
        raise NotFittable(
            f"{trace.path}: {before} steps are recorded before iteration {warmup_steps}, where compression begins; "
            f"fitting on {samples} needs as many there: compress later, fit on fewer samples, or record from the start"
        )
    return before - samples


def _chosen_settings(
    trace: Trace, common: GradiVeQ.Settings, special: Mapping[str, Mapping[str, Any]], roles: Sequence[str]
) -> dict[str, GradiVeQ.Settings]:
    """The settings of every layer of the roles, by name."""
    names = [layer.name for layer in trace.layers if layer.role in roles]
    if unknown := sorted(set(special) - set(names)):
        raise GradlabError(
            f"settings for {', '.join(unknown)}: no layer of role {', '.join(roles)} has that name; there are "
            f"{list_roles(trace.layers)}"
        )
    values = dataclasses.asdict(common)
    return {name: build_settings(GradiVeQ, {**values, **special.get(name, {})}) for name in names}


def _left_dense(layers: Sequence[Layer], names: Sequence[str], roles: Sequence[str]) -> str:
    """Say what roles leave dense of the matrices, if that is more than half of the model's bytes."""
    chosen = [layer for layer in layers if layer.name in names]
    return left_dense("gradiveq", layers, chosen, [*chosen, *_other_matrices(layers, roles)], roles)


def _other_matrices(layers: Sequence[Layer], roles: Sequence[str]) -> list[Layer]:
    return [layer for layer in layers if layer.dimensions >= 2 and layer.role not in roles]


def _group(name: str, settings: GradiVeQ.Settings) -> Group:
    return Group(name, (name,), "gradiveq", dataclasses.asdict(settings), FEEDBACK if settings.complement else ())


def _with_measured_axes(
    trace: Trace, window: range, chosen: Mapping[str, GradiVeQ.Settings], sharing: Mapping[str, Any]
) -> dict[str, GradiVeQ.Settings]:
    """The settings, with the axis that slices of each matrix lie along, where these leave the choice."""
    layers = [layer for layer in trace.layers if layer.name in chosen and _leaves_axis(layer, chosen[layer.name])]
    measured = share_out_layers(_measured_axis, trace, layers, window, chosen, what="slice axes", **sharing)
    return {**chosen, **{layer.name: found for layer, found in zip(layers, measured, strict=True)}}


def _measured_axis(
    source: TraceSource, layer: Layer, window: range, chosen: Mapping[str, GradiVeQ.Settings]
) -> GradiVeQ.Settings:
    """The settings with the axis along which slices of the layer lose least later."""
    settings = chosen[layer.name]
    axes = [dataclasses.replace(settings, slice_axis=axis) for axis in possible_axes(layer)]
    with source.open([layer.name]) as trace:
        losses = [_later_loss(trace, window, layer, along) for along in axes]
    return settings if any(map(math.isnan, losses)) else axes[int(np.argmin(losses))]


def _leaves_axis(layer: Layer, settings: GradiVeQ.Settings) -> bool:
    return settings.slice_axis == "auto" and settings.ratio is not None and len(possible_axes(layer)) > 1


def _later_loss(trace: Trace, window: range, layer: Layer, settings: GradiVeQ.Settings) -> float:
    """The loss on the window's last quarter of bases fitted before it; NaN where that cannot be said."""
    first = window.stop - max(1, round(_JUDGES * len(window)))
    codec = GradiVeQ(settings)
    if first - window.start < 2 or layer.numel < codec.slice_size(layer):
        return math.nan
    try:
        codec, _ = _fitted_codec(trace, range(window.start, first), layer, settings)
    except NotFittable:  # too few finite gradients in this part
        return math.nan
    rows = _losses_by_slice(trace, range(first, window.stop), layer, codec)
    return _loss(rows) if rows[:, 1].sum() > 0 else math.nan


def _fit_layers(
    trace: Trace, window: range, chosen: Mapping[str, GradiVeQ.Settings], sharing: Mapping[str, Any]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, FittedLayer], dict[str, str]]:
    """Learned tensors, losses where they were fitted, and reasons for leaving a layer dense; each by layer name."""
    learned: dict[str, dict[str, torch.Tensor]] = {}
    fitted: dict[str, FittedLayer] = {}
    skipped: dict[str, str] = {}
    layers = [layer for layer in trace.layers if layer.name in chosen]
    results = share_out_layers(_fit_layer, trace, layers, window, chosen, what="fit", **sharing)
    for layer, result in zip(layers, results, strict=True):
        if isinstance(result, str):
            skipped[layer.name] = result
        else:
            learned[layer.name], fitted[layer.name] = result
    return learned, fitted, skipped


def _blocks(trace: Trace, window: range, layer: Layer, codec: GradiVeQ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Finite averaged gradients (t, *layer.shape) of the window, block by block, and their slices (t, M, K)."""
    length = max(1, _BLOCK_VALUES // max(1, layer.numel))
    view, slice_size = codec.slice_view(layer), codec.slice_size(layer)
    for first in range(window.start, window.stop, length):
        gradients = mean_unscaled(trace, layer.name, first, min(first + length, window.stop))
        finite = np.ascontiguousarray(gradients[np.isfinite(gradients).all(1)])
        stacked = torch.from_numpy(finite).reshape(-1, *layer.shape)
        if len(stacked):
            yield stacked, torch.stack([layer_slices(one, view, slice_size)[0] for one in stacked])


def _samples(
    trace: Trace, window: range, layer: Layer, codec: GradiVeQ, chosen: Sequence[int], whitening: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Averaged gradients (T, S, K) of the chosen slices; with whitening also the mean (M, K) of all slices."""
    slice_size = codec.slice_size(layer)
    parts, total = [], torch.zeros(layer.numel // slice_size, slice_size, dtype=torch.float64)
    for _, slices in _blocks(trace, window, layer, codec):
        parts.append(slices[:, list(chosen)])
        if whitening:
            total += slices.sum(0, dtype=torch.float64)
    count = sum(map(len, parts))
    if count < 2:
        raise NotFittable(f"{layer.name}: {count} of {len(window)} samples are finite, expected at least 2")
    return torch.cat(parts), (total / count).float() if whitening else None


def _fit_layer(
    source: TraceSource, layer: Layer, window: range, chosen: Mapping[str, GradiVeQ.Settings]
) -> tuple[dict[str, torch.Tensor], FittedLayer] | str:
    """Learned tensors of a layer with their losses, or why it is left dense."""
    settings = chosen[layer.name]
    slice_size = GradiVeQ(settings).slice_size(layer)
    if layer.numel < slice_size:
        return f"{layer.numel} elements, fewer than a slice of {slice_size}"
    with source.open([layer.name]) as trace:
        codec, samples = _fitted_codec(trace, window, layer, settings)
        by_slice = _losses_by_slice(trace, window, layer, codec)
    if codec.forecast([layer], 1, {}).payload >= 4 * layer.numel:
        return f"d = K = {slice_size}: nothing would be saved"
    fitted = [m for run in codec.fitted_slices(len(by_slice)) for m in run]
    axis = possible_axes(layer)[0] if settings.slice_axis == "auto" else settings.slice_axis
    return dict(codec.learned), FittedLayer(
        slice_axis=axis,
        slice_size=codec.slice_size(layer),
        dimension=int(codec.learned[f"{layer.name}/width"]),
        slices=len(by_slice),
        samples=samples,
        fitted_slices_energy=tuple(by_slice[fitted].sum(0).tolist()),
        fitted_slices_loss=_loss(by_slice[fitted]),
        in_sample_energy=tuple(by_slice.sum(0).tolist()),
        in_sample_loss=_loss(by_slice),
    )


def _fitted_codec(trace: Trace, window: range, layer: Layer, settings: GradiVeQ.Settings) -> tuple[GradiVeQ, int]:
    """The codec with bases of a layer, and the number of samples that they were fitted on."""
    codec = GradiVeQ(settings)
    count = layer.numel // codec.slice_size(layer)
    chosen = [m for run in codec.fitted_slices(count) for m in run]
    samples, mean = _samples(trace, window, layer, codec, chosen, settings.whitening)
    bases = codec.bases(samples, mean, count)
    return GradiVeQ(settings, {f"{layer.name}/{key}": tensor for key, tensor in bases.items()}), len(samples)


def _losses_by_slice(trace: Trace, window: range, layer: Layer, codec: GradiVeQ) -> np.ndarray:
    """(M, 2): squared error and squared norm of each slice, summed over the window's finite averaged gradients."""
    slice_size = codec.slice_size(layer)
    rows = np.zeros((layer.numel // slice_size, 2))
    for stacked, _ in _blocks(trace, window, layer, codec):
        rows += losses_by_slice(codec, layer, stacked, slice_size, codec.slice_view(layer))
    return rows


def _loss(rows: Any) -> float:
    """Squared error over squared norm, each summed over rows (n, 2)."""
    error, norm = np.sum(rows, axis=0)
    return float(error / norm) if norm > 0 else 0.0


def _promised_loss(chosen: Mapping[str, GradiVeQ.Settings]) -> float | None:
    """The largest lambda of any layer; None where something else than eq. (6) decides on d."""
    if any(settings.ratio for settings in chosen.values()):
        return None
    return max((settings.loss_threshold for settings in chosen.values()), default=None)


def _early_compression(measured: GradiveqMeasurement) -> list[str]:
    begins, last = measured.warmup_steps, measured.fitted_on[-1]
    if begins > last:
        return []
    return [
        f"Compression begins at iteration {begins}, before the fit, which needs gradients up to iteration {last}: no "
        "run can do that with its own gradients, and errors up to there are no prediction."
    ]


def _poor_fit(measured: GradiveqMeasurement) -> list[str]:
    threshold, later, control = measured.promised_loss, measured.holdout.loss, measured.random_basis.loss
    if later is None:
        return ["No later iteration had finite gradients: nothing is known about the loss in training."]
    lines = []
    if threshold is not None and later > _TOLERATED * threshold:
        lines.append(
            f"The fit was asked to lose at most {format_percent(threshold)} of the gradient's energy (lambda, "
            f"loss_threshold). It loses {format_percent(measured.fitted_slices_loss)} on the slices of "
            f"{format_counted(len(measured.fitted_on), 'iteration')} that it was fitted on, "
            f"{format_percent(measured.in_sample_loss)} on all slices there, and {format_percent(later)} on later "
            f"iterations (random bases of the same size: {format_percent(control)}). Expect the loss of later "
            "iterations in training. Fit on more, or on later, iterations (--samples), or take another method."
        )
    if control is not None and later >= control:
        lines.append("On later iterations these bases are no better than random ones of their size: do not use them.")
    elif useless := _no_better_than_random(measured):
        shown = ", ".join(useless[:3]) + (f" and {len(useless) - 3} more" if len(useless) > 3 else "")
        lines.append(f"No better than a random basis of the same size on later iterations: {shown}.")
    return lines


def _no_better_than_random(measured: GradiveqMeasurement) -> list[str]:
    """Names of the layers whose bases lose as much on later iterations as random ones."""
    losses = {
        name: (curve.loss, measured.random_basis.groups[name].loss) for name, curve in measured.holdout.groups.items()
    }
    return [
        name
        for name, (fitted, random) in losses.items()
        if fitted is not None and random is not None and fitted >= random
    ]
