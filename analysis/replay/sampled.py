"""Replay a model's plan on a trace that holds samples of large layers.

Each group's codec runs on the samples of its layers, so errors are those of the samples. A layer's squared errors and
norms are divided by the share of it that is held, so that layers weigh as in the whole model. Bytes are multiplied by
the plan's forecast for whole layers over that for the samples, seconds in codecs by the ratio of the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def plan_on_samples(trace: Trace, plan: Plan) -> Plan:
    """Return the plan with every sampled layer in the shape that the trace holds; without samples the plan itself."""
    held = {name: sample for name, sample in trace.samples.items() if name in {layer.name for layer in plan.layers}}
    if not held:
        return plan
    for group in plan.compressed_groups:
        if why := _needs_whole(plan, group):
            require_whole(trace, group.layers, f"{group.codec} {why}")
    layers = tuple(held[layer.name].stored if layer.name in held else layer for layer in plan.layers)
    return replace(plan, layers=layers)


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


def for_whole_layers(step: ReplayStep, whole: Plan, held: Plan, world_size: int) -> ReplayStep:
    """Multiply a step's bytes and seconds to those of whole layers."""
    scale = _ratio(*(plan.payload_bytes(world_size, step.compressing) for plan in (whole, held)))
    costs = {}
    for name, cost in step.costs.items():
        payload, values = _group_ratios(whole, held, name, world_size)
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
        codec_seconds=sum(cost.codec_seconds for cost in costs.values()) if costs else step.codec_seconds,
        codec_wall_seconds=(
            sum(cost.codec_wall_seconds for cost in costs.values()) if costs else step.codec_wall_seconds
        ),
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


def sample_remark(trace: Trace) -> str:
    """The remark on a replay of samples."""
    return (
        f"The trace holds {trace.extent}: errors are those of the samples, bytes and seconds are estimates for whole "
        "layers."
    )
