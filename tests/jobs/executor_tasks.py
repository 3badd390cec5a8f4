"""Tasks for real ranks: the drivers of a plan's steps against each other."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.analysis.replay import lockstep_of, replay_steps
from gradlab.capture import TraceRecorder
from gradlab.codec import Batch, Context, Exchanged, Tensors
from gradlab.codecs.topk import TopK
from gradlab.collectives import Coroutine
from gradlab.ddp.groups import group_like
from gradlab.errors import GradlabError
from gradlab.executor import LockstepPlan
from gradlab.layout import layers_of
from gradlab.plan import FEEDBACK, Group, Plan
from gradlab.runtime import CompressionState, Exchange, compression_hook
from gradlab.trace import Trace
from jobs.matrix_cells import Network
from support.pool_groups import SPARE
from support.prescribed import Prescribed, gradients
from support.stacks import Stack, Stacks, several_plan, several_shapes

SHAPES = {"conv": (16, 8, 3, 3), "wide": (24, 150), "tall": (200, 18), "vector": (65,)}
STEPS = 6


def inline(group: dist.ProcessGroup, stacks: Stacks, at_once: bool) -> dict[str, Any]:
    """`Exchange` on whole steps, or layer by layer as a hook has them, against lockstep and under no DDP."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shapes = {**SHAPES, **several_shapes(stacks)}
    model = Prescribed(shapes)
    plan = several_plan(stacks, layers_of(model))
    plan = replace(plan, groups=(*plan.groups, Group("both", ("wide", "tall"), "topk", {"density": 0.1}, FEEDBACK)))
    reference = LockstepPlan(plan, world_size, plain_sgd=True, hold_unused=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same, resumed = True, Exchange(plan, model.named_parameters(), group, optimizer=optimizer, deterministic=True)
    exchange = resumed
    for step in range(STEPS):
        if step == 3:  # go on from a checkpoint
            resumed = Exchange(
                plan, model.named_parameters(), group, optimizer=optimizer, deterministic=True, hold_unused=True
            )
            resumed.load_state_dict(exchange.state_dict())
            exchange = resumed
        rate = 0.1 * (step + 1)
        optimizer.param_groups[0]["lr"] = rate
        grads: dict[str, torch.Tensor | None] = dict(gradients(shapes, rank, step))
        if step == 4:
            grads["wide"] = None  # on every rank
        before = [_whole(gradients(shapes, r, step), step == 4) for r in range(world_size)]
        expected = reference.step(step, before, {layer.name: rate for layer in plan.layers})
        given = {name: torch.zeros(shapes[name]) if g is None else g for name, g in grads.items()}
        if at_once:
            exchange.step(given)
        else:
            exchange.begin()
            for name, gradient in reversed(given.items()):
                exchange.add({name: gradient})
            exchange.finish()
        for ranks in expected.exchanged.values():
            same = same and all(torch.equal(given[name], mean) for name, mean in ranks[rank].mean.items())
    theirs, ours = reference.runs[rank], exchange.run.states
    same_states = all(
        torch.equal(ours[name][key], value) for name, s in theirs.states.items() for key, value in s.items()
    )
    return {
        "same": same,
        "same_states": same_states and exchange.run.learning_rates == theirs.learning_rates,
        "payload": [exchange.statistics.steps[-1].payload_bytes, expected.payload[rank]],
        "iteration": exchange.report()["iteration"],
    }


def _whole(gradients: Tensors, without: bool) -> Tensors:
    return {name: torch.zeros_like(g) if without and name == "wide" else g for name, g in gradients.items()}


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    """What `Exchange` says of wrong use."""
    rank = dist.get_rank(group)
    model = Prescribed(SHAPES)
    plan = Plan.uniform(layers_of(model), "topk", density=0.1)

    def message_of(work: Any) -> str:
        try:
            work()
        except GradlabError as error:
            return str(error)
        return ""

    def fresh() -> Exchange:
        return Exchange(plan, model.named_parameters(), group)

    grads = gradients(SHAPES, rank, 0)
    messages = {
        "other parameters": message_of(lambda: Exchange(plan, [("conv", model.conv)], group)),
        "options differ": message_of(lambda: Exchange(plan, model.named_parameters(), group, segment_bytes=100 + rank)),
        "unknown layer": message_of(lambda: fresh().step({"deep": grads["conv"]})),
        "shape": message_of(lambda: fresh().step({**grads, "conv": grads["conv"][:1]})),
        "only some": message_of(lambda: fresh().step({name: grads[name] for name in ("conv", "vector")})),
        "finish first": message_of(lambda: fresh().finish()),
        "begin twice": message_of(lambda: _begun(fresh()).begin()),
        "add twice": message_of(lambda: [exchange.add({"conv": grads["conv"]}) for exchange in [_begun(fresh())] * 2]),
        "load in a step": message_of(lambda: _begun(fresh()).load_state_dict({})),
        "load many in a step": message_of(lambda: _begun(fresh()).load_state_dicts([], "sum")),
    }
    closed = fresh()
    closed.close()
    messages["closed"] = message_of(lambda: closed.step(grads))
    broken = fresh()
    message_of(broken.finish)
    messages["after an error"] = message_of(lambda: broken.step(grads))
    wrapped = DistributedDataParallel(model, process_group=group)
    with CompressionState(plan, wrapped, process_group=SPARE.get(dist.get_world_size(group))) as state:
        by_hand = [lambda: state.step(grads), state.begin, lambda: state.add(grads), state.finish]
        messages["fed by DDP"] = min(message_of(work) for work in by_hand)
        wrapped.register_comm_hook(state, compression_hook)
        wrapped(grads).backward()  # it goes on as ever
        messages["steps"] = str(state.iteration)
    return messages


def _begun(exchange: Exchange) -> Exchange:
    exchange.begin()
    return exchange


class Failing(TopK):
    """A codec with a defect on rank 0, in step 1."""

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if context.rank == 0 and context.iteration == 1:
            raise ArithmeticError("the defect")
        return (yield from super().exchange(grads, state, context))


def one_rank_fails(group: dist.ProcessGroup, where: str) -> dict[str, Any]:
    """What each rank is told if rank 0 fails in a step, on a group with a short timeout that outlives the failure."""
    rank = dist.get_rank(group)
    model = Prescribed(SHAPES)
    plan = Plan.uniform(layers_of(model), "topk", density=0.1)
    own = group_like(group, timedelta(seconds=2), torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(exchange: Exchange) -> None:
        for step in range(3):
            grads = gradients(SHAPES, rank, step)
            fails = rank == 0 and step == 1
            if fails and where == "begin":
                del optimizer.param_groups[0]["lr"]
            exchange.begin()
            if fails and where == "close":
                exchange.close()
            for name in [*grads][: -1 if fails and where == "finish" else None]:
                exchange.add({name: grads[name]})
            exchange.finish()

    outcome: dict[str, Any] = {}
    # An earlier run on the same group, whose failure is not the next one's.
    with Exchange(plan, model.named_parameters(), own) as earlier:
        earlier._driver.leave("long ago")
    try:
        with Exchange(plan, model.named_parameters(), own, optimizer=optimizer) as exchange:
            if where == "before the first step" and rank == 0:
                raise ArithmeticError("the defect")
            if where == "add":
                exchange.run.codecs["wide"] = Failing()
            train(exchange)
    except (GradlabError, ArithmeticError, KeyError) as error:
        outcome = {"kind": type(error).__name__, "message": str(error)}
    outcome["iteration"] = exchange.iteration
    dist.barrier(group)
    dist.destroy_process_group(own)
    return outcome


def recorded(group: dist.ProcessGroup, folder: str, codec: str, wrapping: str) -> dict[str, Any]:
    """Record a run with layers that no rank uses, train it again compressed, and replay the recording."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def backward(model: DistributedDataParallel, optimizer: torch.optim.SGD, step: int) -> Tensors:
        """Gradients of a step whose optimizer leaves the parameters as they are."""
        draw = torch.Generator().manual_seed(1000 * step + rank)
        # Left out by rank 0 alone in step 1, and by all ranks in steps 2 and 4.
        branch = not ((rank == 0 and step == 1) or step in (2, 4))
        model(torch.randn(6, 1, 8, 8, generator=draw), branch).square().mean().backward()
        gradients = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
        model.zero_grad()
        optimizer.step()
        return gradients

    def fresh() -> DistributedDataParallel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = Network()
        return DistributedDataParallel(network, process_group=group, find_unused_parameters=True, bucket_cap_mb=0.01)

    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TraceRecorder(model, folder, optimizer=optimizer, metadata={"plain_sgd": True}):
        for step in range(STEPS):
            backward(model, optimizer, step)
    model = fresh()
    plan = Stack(codec, wrapping).plan(layers_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = []
    with CompressionState(
        plan, model, optimizer=optimizer, deterministic=True, process_group=SPARE.get(world_size)
    ) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(STEPS):
            applied.append(backward(model, optimizer, step))
        same, held = True, []
        dist.barrier(group)
        with Trace(Path(folder)) as trace:
            replayed = lockstep_of(trace, plan)
            for step, (result, _) in enumerate(replay_steps(trace, replayed, 0, STEPS)):
                held.append(sorted(result.held))
                for ranks in result.exchanged.values():
                    for name, mean in ranks[rank].mean.items():
                        got = applied[step].get(name)
                        same = same and (not mean.any() if got is None else torch.equal(got, mean))
        theirs, ours = replayed.runs[rank], state.run.states
        same_states = ours.keys() == theirs.states.keys() and all(
            torch.equal(ours[name][key], value) for name, s in theirs.states.items() for key, value in s.items()
        )
        sent = [(step.payload_bytes, step.wire_bytes) for step in state.statistics.steps]
        return {"same": same, "same_states": same_states, "held": held, "sent": sent}
