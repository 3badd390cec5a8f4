"""A compressed reduce-scatter: every rank gets the mean of one part of the gradients, and sends each part once.

A rank sends to the owner of a part its codec's message of that part alone. That holds for codecs that one rank
computes alone: LoCo, SDP4Bit and ZeRO++ compress a reduce-scatter like this. An owner decodes the messages of all
ranks; every other rank decodes nothing but its own, for the residual, which it has of every part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradlab.codec import Codec, Compressor, Context, Exchanged, Tensors, exchange_group
from gradlab.codec.wrapper import innermost
from gradlab.collectives import AllToAll, Coroutine, Gather, as_requests, mean_of_node
from gradlab.errors import GradlabError
from gradlab.executor.watch import GroupMeasures, gradient_norms, measure, residual_norms
from gradlab.plan import Group, Plan
from gradlab.plan.plan import between

ALLOWED = ("error_feedback", "hadamard")


def one_way(plan: Plan) -> Plan:
    """Return a plan as a reduce-scatter runs it: without two-way compression that a few ranks go without.

    A codec or a wrapper that does not work there is refused.
    """
    alone = between(plan, 1)
    for group in alone.groups:
        _check(alone, group)
    return alone


def _check(plan: Plan, group: Group) -> None:
    if group.plainly_dense:
        return
    codec = innermost(plan.build(group))
    if not isinstance(codec, Compressor) or codec.traits.own_exchange:
        raise GradlabError(
            f"group {group.name}: codec {group.codec} takes means over ranks on its way; a reduce-scatter is for "
            "codecs that one rank computes alone, such as block_scaled, qsgd, sign or topk"
        )
    if others := [wrap.name for wrap in group.wrappers if wrap.name not in ALLOWED]:
        raise GradlabError(
            f"group {group.name}: wrapper {others[0]} has no place in a reduce-scatter, only {', '.join(ALLOWED)}"
        )


def reduce_scatter_group(
    codec: Codec,
    parts: Sequence[Tensors],
    states: Sequence[Tensors],
    contexts: Sequence[Context],
    mine: int,
    scaled_by: float = 1.0,
) -> Coroutine[list[Exchanged]]:
    """Run a codec on the part of one group for each rank, all of equal shapes; return a result per part. The mean at
    `mine` is that of all ranks (its context has the world size); elsewhere it is this rank's own contribution."""
    runs = [
        exchange_group(codec, part, state, replace(context, one_round=True), scaled_by=scaled_by)
        for part, state, context in zip(parts, states, contexts, strict=True)
    ]
    asked = [as_requests(next(run)) for run in runs]
    messages = [[_gathered(request) for request in requests] for requests in asked]
    like = [request for request in asked[mine] if isinstance(request, Gather)]
    answers = yield tuple(
        AllToAll(parts, one.varying, one.most) for parts, one in zip(zip(*messages, strict=True), like, strict=True)
    )
    results = []
    for place, (run, own) in enumerate(zip(runs, messages, strict=True)):
        try:
            run.send(tuple(list(answer) for answer in answers) if place == mine else tuple([one] for one in own))
        except StopIteration as stop:
            results.append(stop.value)
        else:
            raise GradlabError("a reduce-scatter is for codecs that ask once")
    return results


def measure_parts(
    codec: Codec, done: Sequence[Exchanged], parts: Sequence[Tensors], scaled_by: float = 1.0
) -> GroupMeasures:
    """Measure for the rules what a rank keeps of all parts of one group."""
    of_parts = [
        measure(codec, one, residual_norms(one), gradient_norms(codec, part, one, {}, scaled_by))
        for one, part in zip(done, parts, strict=True)
    ]
    return GroupMeasures(
        residual=math.hypot(*(one.residual for one in of_parts)),
        gradient=math.hypot(*(one.gradient for one in of_parts)),
    )


def reduce_scatter_dense(parts: Sequence[Tensors], mine: int) -> Coroutine[Tensors]:
    """Average every rank's part uncompressed, in rank order, 16-bit values in float32; return the means at `mine`."""
    names = list(parts[mine])
    answers = yield tuple(AllToAll(tuple(part[name] for part in parts)) for name in names)
    return {name: mean_of_node(list(of_all)) for name, of_all in zip(names, answers, strict=True)}


def _gathered(request: object) -> torch.Tensor:
    if not isinstance(request, Gather) or request.lengths is not None:
        raise GradlabError(f"a reduce-scatter cannot serve {type(request).__name__}")
    return request.tensor
