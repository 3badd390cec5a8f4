"""Replay a model's plan on a trace that holds samples of large layers, or some layers only.

Each group's codec runs on the samples of its layers, so errors are those of the samples. A layer's squared errors and
norms are divided by the share of it that is held, so that layers weigh as in the whole model. Bytes are multiplied by
the plan's forecast for whole layers over that for the samples, seconds in codecs by the ratio of the values. Layers
that were not recorded count in bytes alone: nothing says what errors they have, or how long their codecs take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gradlab.analysis.replay.result import ReplayStep
from gradlab.codec.wrapper import innermost
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import GroupCost
from gradlab.learning.selection import LearnedSelection
from gradlab.plan import Group, Plan

if TYPE_CHECKING:
    from gradlab.trace import Trace

REMEDY = (
    "record these layers whole: in fewer steps (max_steps), with a larger budget, or alone (layers); or plan without "
    "them"
)


def require_whole(trace: Trace, names: Iterable[str], what: str) -> None:
    """Refuse a trace that holds samples of layers which are needed whole."""
    if sampled := [name for name in names if name in trace.samples]:
        more = f" and {len(sampled) - 1} more" if len(sampled) > 1 else ""
        raise GradlabError(f"{trace.path}: holds a sample of {sampled[0]}{more}; {what}; {REMEDY}")


def require_all_layers(trace: Trace, what: str) -> None:
    """Refuse a trace of some of the model's layers for what needs all of them."""
    if trace.unrecorded:
        raise GradlabError(f"{trace.path}: {trace.left_out}; {what}; record them, too, within a budget of bytes")


def plan_on_samples(trace: Trace, plan: Plan) -> Plan:
    """Return the plan without layers that were not recorded, and with every sampled layer in the shape that the trace
    holds; the plan itself if the trace holds all."""
    names, missing = {layer.name for layer in plan.layers}, {layer.name for layer in trace.unrecorded}
    held = {name: sample for name, sample in trace.samples.items() if name in names}
    if not held and not missing & names:
        return plan
    for group in plan.compressed_groups:
        if missing.issuperset(group.layers):
            continue
        if why := _needs_whole(plan, group):
            require_whole(trace, group.layers, f"{group.codec} {why}")
            if missing.intersection(group.layers):
                require_all_layers(trace, f"{group.codec} {why}")
    layers = tuple(held[one.name].stored if one.name in held else one for one in plan.layers if one.name not in missing)
    left = {group.name: tuple(name for name in group.layers if name not in missing) for group in plan.groups}
    groups = tuple(replace(group, layers=left[group.name]) for group in plan.groups if left[group.name])
    learned = {name: tensors for name, tensors in plan.learned.items() if left[name]}
    on_samples = replace(plan, layers=layers, groups=groups, learned=learned)
    if plan.compressed_groups and not on_samples.compressed_groups:
        raise GradlabError(f"{trace.path}: {trace.left_out}, and no layer that the plan compresses was")
    return on_samples


def _needs_whole(plan: Plan, group: Group) -> str | None:
    codec = innermost(plan.build(group))
    if isinstance(codec, LearnedSelection):
        return "learned from the largest values of whole layers"
    if isinstance(codec, GradiVeQ) or group.name in plan.learned:
        return "cuts whole layers into slices, and those of a sample are others"
    return None


def layer_weights(trace: Trace) -> Mapping[str, float]:
    """By name, the elements of a sampled layer over those held; layers that are held whole are left out."""
    return {name: 1 / sample.share for name, sample in trace.samples.items()}


def for_whole_layers(steps: Iterable[ReplayStep], whole: Plan, held: Plan, world_size: int) -> list[ReplayStep]:
    """Multiply steps' bytes and seconds to those of whole layers; seconds are 0 if some of them are not held."""
    known = len(held.layers) == len(whole.layers)

    @functools.cache
    def scale(compressing: bool) -> float:
        return _ratio(*(plan.payload_bytes(world_size, compressing) for plan in (whole, held)))

    @functools.cache
    def ratios(name: str) -> tuple[float, float]:
        return _group_ratios(whole, held, name, world_size)

    return [_multiplied(step, scale(step.compressing), ratios, known) for step in steps]


def _multiplied(
    step: ReplayStep, scale: float, ratios: Callable[[str], tuple[float, float]], known: bool
) -> ReplayStep:
    costs = {}
    for name, cost in step.costs.items():
        payload, values = ratios(name)
        costs[name] = GroupCost(
            cost.payload_bytes * payload,
            cost.wire_bytes * payload,
            cost.codec_seconds * values,
            cost.codec_wall_seconds * values,
        )
    return replace(
        step,
        payload_bytes_mean=step.payload_bytes_mean * scale,
        payload_bytes_max=round(step.payload_bytes_max * scale),
        wire_bytes_mean=step.wire_bytes_mean * scale,
        wire_bytes_max=round(step.wire_bytes_max * scale),
        codec_seconds=known * (sum(cost.codec_seconds for cost in costs.values()) if costs else step.codec_seconds),
        codec_wall_seconds=known
        * (sum(cost.codec_wall_seconds for cost in costs.values()) if costs else step.codec_wall_seconds),
        costs=costs,
    )


def _group_ratios(whole: Plan, held: Plan, name: str, world_size: int) -> tuple[float, float]:
    """Payload and values of a group of whole layers, over those of the samples."""
    sizes = []
    for plan in (whole, held):
        group = next(group for group in plan.groups if group.name == name)
        members = plan.members(group)
        sizes.append((plan.build(group).forecast(members, world_size).payload, sum(layer.numel for layer in members)))
    (payload, numel), (held_payload, held_numel) = sizes
    return _ratio(payload, held_payload), _ratio(numel, held_numel)


def _ratio(whole: float, held: float) -> float:
    return whole / held if held else 1.0


def sample_remarks(trace: Trace) -> list[str]:
    """The remarks on a replay of samples, and of some layers only."""
    left_out = (
        f"{trace.left_out}: errors are those of the others, bytes are estimates for all, and seconds in codecs are not "
        "known."
    )
    sampled = (
        f"The trace holds {trace.extent}: errors are those of the samples, bytes and seconds are estimates for whole "
        "layers."
    )
    return [*([left_out] if trace.unrecorded else []), *([sampled] if trace.samples else [])]
