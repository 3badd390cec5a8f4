"""A compressed reduce-scatter: every rank gets the mean of one part of the gradients, and sends each part once.

What a rank sends to the owner of a part is its codec's message of that part alone. So it is for codecs that one rank
computes alone: LoCo, SDP4Bit and ZeRO++ compress a reduce-scatter like this. An owner decodes the messages of all
ranks; every other rank decodes nothing but its own, for the residual, which it has of every part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradlab.codec import Codec, Compressor, Context, Exchanged, Tensors, exchange_group
from gradlab.codec.wrapper import innermost
from gradlab.collectives import AllToAll, Coroutine, Gather, as_requests, mean_of_node
from gradlab.errors import GradlabError
from gradlab.plan import Plan

ALLOWED = ("error_feedback", "hadamard")


def check_alone(plan: Plan) -> None:
    """Refuse a plan whose codecs do not work in a reduce-scatter.

    Args:
        plan: to be run.

    Raises:
        GradlabError: naming the group, and what its codec or a wrapper does.
    """
    for group in plan.compressed_groups:
        codec = innermost(plan.build(group))
        if not isinstance(codec, Compressor) or not codec.gathered or codec.varying:
            what = "messages whose size depends on the gradient" if codec.varying else "means over ranks on its way"
            raise GradlabError(
                f"group {group.name}: codec {group.codec} takes {what}; a reduce-scatter is for codecs that one rank "
                "computes alone, such as block_scaled, qsgd, sign or topk"
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
    """Run a codec on every rank's part of one group.

    Args:
        codec: with its wrappers, of `check_alone`.
        parts: of the gradients by layer name, one dict per rank that will have the mean of it, all of equal shapes.
        states: of each part.
        contexts: of each part: this rank's number, and the world size for the part that it gets, else 1.
        mine: position of the part that this rank gets.
        scaled_by: the loss scale that the gradients are multiplied by.

    Returns:
        A result per part. The mean is that of all ranks at `mine`; elsewhere it is this rank's own contribution.
    """
    runs = [
        exchange_group(codec, part, state, context, scaled_by=scaled_by)
        for part, state, context in zip(parts, states, contexts, strict=True)
    ]
    asked = [as_requests(next(run)) for run in runs]
    messages = [[_gathered(request) for request in requests] for requests in asked]
    answers = yield tuple(AllToAll(tuple(of_part)) for of_part in zip(*messages, strict=True))
    results = []
    for place, (run, own) in enumerate(zip(runs, messages, strict=True)):
        try:
            run.send(tuple(list(answer) for answer in answers) if place == mine else tuple([one] for one in own))
        except StopIteration as stop:
            results.append(stop.value)
        else:
            raise GradlabError("a reduce-scatter is for codecs that ask once")
    return results


def reduce_scatter_dense(parts: Sequence[Tensors], mine: int) -> Coroutine[Tensors]:
    """Average every rank's part uncompressed, in rank order, 16-bit values in float32.

    Args:
        parts: as above.
        mine: as above.

    Returns:
        The means at `mine`, by layer name.
    """
    names = list(parts[mine])
    answers = yield tuple(AllToAll(tuple(part[name] for part in parts)) for name in names)
    return {name: mean_of_node(list(of_all)) for name, of_all in zip(names, answers, strict=True)}


def _gathered(request: object) -> torch.Tensor:
    if not isinstance(request, Gather) or request.varying or request.lengths is not None:
        raise GradlabError(f"a reduce-scatter cannot serve {type(request).__name__}")
    return request.tensor
