"""What the checks run on: the contract suite's codecs, settings, plans and gradients, in lockstep on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradlab.codec import Batch, Codec, Context, Tensors, exchange_group
from gradlab.collectives import run_lockstep
from gradlab.plan import Plan
from support.contract import SETTINGS, cases, codec_of, plan_for
from support.prescribed import SHAPES, Prescribed
from support.prescribed import gradients as drawn

__all__ = ["SETTINGS", "SHAPES", "Prescribed", "cases", "codec_of", "exchange", "gradients", "lockstep", "plan_for"]

States = dict[str, list[Tensors]]  # by group, by rank


def gradients(rank: int, step: int, device: torch.device) -> Tensors:
    """One rank's gradients at one step, drawn on the CPU, so that they are the same everywhere."""
    return {name: gradient.to(device) for name, gradient in drawn(SHAPES, rank, step).items()}


def lockstep(plan: Plan, world_size: int, steps: int, device: torch.device) -> list[Tensors]:
    """Run a plan on `gradients` with all ranks in this process: by step, the averaged gradient by layer name."""
    codecs = {group.name: plan.build(group, device) for group in plan.groups}
    states: States = {name: [{}] * world_size for name in codecs}
    history = []
    for step in range(steps):
        grads = [gradients(rank, step, device) for rank in range(world_size)]
        means, states = exchange(plan, codecs, grads, states, step)
        history.append(means)
    return history


def exchange(
    plan: Plan, codecs: Mapping[str, Codec], grads: Sequence[Tensors], states: States, iteration: int
) -> tuple[Tensors, States]:
    """One step of a plan from each rank's gradients: the average by layer name, and the new states."""
    means: Tensors = {}
    after: States = {}
    for group in plan.groups:
        coroutines = [
            exchange_group(
                codecs[group.name],
                Batch.of({name: own[name] for name in group.layers}, plan.members(group)),
                states[group.name][rank],
                Context(rank, len(grads), iteration, group.name, plan.seed),
            )
            for rank, own in enumerate(grads)
        ]
        results = run_lockstep(coroutines)
        after[group.name] = [result.value.state for result in results]
        means |= results[0].value.mean
    return means, after
