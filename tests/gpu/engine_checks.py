"""The engine on the device, in real ranks: against plain DDP, against lockstep, overflow, resume, order of streams."""

from __future__ import annotations

import functools
import importlib
import io
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from outcome import NOT_RUN, Check, Difference, Outcome, Place, all_true
from subjects import SHAPES, Prescribed, cases, gradients, lockstep, plan_for
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradlab import codecs
from gradlab.codec import Batch, Context, Exchanged, Tensors, exchange_group
from gradlab.collectives import Coroutine
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.runtime import (
    Communicator,
    CompressionState,
    Exchange,
    OuterStep,
    compress_fsdp,
    compression_hook,
    drive,
)
from jobs.outer_tasks import Oracle, adamw, batch, network
from jobs.outer_tasks import plan_of as plan_of_network

STEPS = 6
BUCKET_MIB = 0.01  # several buckets
SLEEP_CYCLES = 20_000_000  # about 10 ms of a GPU
# The same arithmetic on the same device, in deterministic mode. A library may still choose another kernel.
SAME_DEVICE = 1e-4


def plan_of(case: str) -> Plan:
    return plan_for(case, "layer", feedback=True)


def sleep(device: torch.device) -> None:
    """Hold up what the device is asked for from now on; the CPU goes on, if it is not the device."""
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    else:
        time.sleep(0.002)


class Late(torch.autograd.Function):
    """The identity, whose gradient is written late."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        sleep(gradient.device)
        return gradient.clone()  # behind the delay


class LatePrescribed(Prescribed):
    """A prescribed model whose gradients are all written late."""

    def forward(self, gradients: Any) -> torch.Tensor:
        return torch.stack([(Late.apply(p) * gradients[n]).sum().float() for n, p in self.named_parameters()]).sum()


class LateTopK(codecs.get("topk")):  # type: ignore[misc]
    """Top-k that encodes and decodes late: what it returns is written long after it has returned it."""

    name = "late_topk"

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        device = next(iter(grads.values())).device
        sleep(device)
        done = yield from super().exchange(grads, state, context)
        sleep(device)
        return replace(done, mean={name: tensor.clone() for name, tensor in done.mean.items()})


def wrapped(place: Place, model: torch.nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    """A prescribed model on the device, in DDP."""
    ids = [place.device] if place.device.type == "cuda" else None
    model = (model or Prescribed(SHAPES)).to(place.device)
    return DistributedDataParallel(model, ids, bucket_cap_mb=BUCKET_MIB, process_group=place.group, **options)


class Run:
    """A prescribed model that trains compressed. A context manager."""

    def __init__(self, place: Place, plan: Plan, model: torch.nn.Module | None = None, scaler: Any = None) -> None:
        self.place, self.scaler = place, scaler
        self.model = wrapped(place, model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.state = CompressionState(
            plan,
            self.model,
            optimizer=self.optimizer,
            scaler=scaler,
            deterministic=True,
            process_group=place.spare,
        )
        self.model.register_comm_hook(self.state, compression_hook)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.state.__exit__(*raised)

    def step(self, step: int, spoil: Callable[[Tensors], None] | None = None) -> Tensors:
        """Train on one rank's gradients of a step: the averaged gradients, with the loss scale on them."""
        grads = gradients(self.place.rank, step, self.place.device)
        if spoil is not None:
            spoil(grads)
        self.optimizer.zero_grad()
        loss = self.model(grads)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        # At once, in the training stream: a copy that did not wait for the engine would be of something else.
        averaged = averages(self.model)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        return averaged

    def states(self) -> Tensors:
        return dict(self.state.state_dict()["states"])

    def parameters(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self.model.module.named_parameters()}


def averages(model: DistributedDataParallel) -> Tensors:
    return {name: p.grad.detach().clone() for name, p in model.module.named_parameters() if p.grad is not None}


# --- the checks -----------------------------------------------------------------------------------------------------


def identity_is_plain_ddp(place: Place) -> Outcome:
    """Bit for bit on up to two ranks, where a sum has one order; of more, within N eps of what is summed."""
    plain, difference = wrapped(place), Difference()
    # With the backend's own all-reduce, as DDP has it, and so without Run.
    model = wrapped(place)
    with CompressionState(Plan.uniform(model, "identity"), model, process_group=place.spare) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(STEPS):
            for one in (plain, model):
                one.zero_grad()
                one(gradients(place.rank, step, place.device)).backward()
            difference.add_all(f"step {step}", averages(model), averages(plain))
    return difference.outcome(0.0 if place.world_size <= 2 else place.world_size * torch.finfo(torch.float32).eps)


def engine_is_lockstep(place: Place, case: str) -> Outcome:
    """Every gradient of a run, against the same plan in one process on the same device."""
    expected = lockstep(plan_of(case), place.world_size, STEPS, place.device)
    difference = Difference()
    with Run(place, plan_of(case)) as run:
        for step in range(STEPS):
            got = run.step(step)
            difference.add_all(f"step {step}", {name: got[name] for name in expected[step]}, expected[step])
    return difference.outcome(SAME_DEVICE)


def ranks_agree(place: Place) -> Outcome:
    """PowerSGD with the backend's all-reduce: all ranks apply the same bits."""
    model, difference = wrapped(place), Difference()
    with CompressionState(plan_of("powersgd"), model, process_group=place.spare) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(STEPS):
            model.zero_grad()
            model(gradients(place.rank, step, place.device)).backward()
            for name, mean in averages(model).items():
                first = mean.clone()
                if first.numel():
                    dist.broadcast(first, 0, group=place.group)
                difference.add(f"step {step} {name}", mean, first)
    return difference.outcome(0.0)


def scaler_overflow(place: Place) -> Outcome:
    """An infinity on the last rank in step 3: every rank skips it, no state moves, and the next step is sound."""

    def spoil(grads: Tensors) -> None:
        if place.rank == place.world_size - 1:
            grads["conv"].view(-1)[0] = torch.inf

    scaler = torch.amp.GradScaler(place.device.type, init_scale=1024.0)
    with Run(place, plan_of("topk"), scaler=scaler) as run:
        for step in range(3):
            run.step(step)
        states, parameters = run.states(), run.parameters()
        seen = run.step(3, spoil)
        held, still, scale = Difference(), Difference(), scaler.get_scale()
        held.add_all("state", run.states(), states)
        still.add_all("parameter", run.parameters(), parameters)
        after = run.step(4)
        moved = Difference()
        moved.add_all("parameter", run.parameters(), parameters)
    return all_true(
        {
            "there is a state": any(bool(tensor.any()) for tensor in states.values()),
            "every rank sees no finite gradient": not any(bool(t.isfinite().any()) for t in seen.values()),
            "states unmoved": held.bitwise,
            "step skipped": still.bitwise,
            "scale halved": scale == 512.0,
            "next step finite": all(bool(tensor.isfinite().all()) for tensor in after.values()),
            "next step moves": not moved.bitwise,
        }
    )


def scale_changes_nothing(place: Place) -> Outcome:
    """A loss scale, a power of two that grows, leaves gradients and states as they are without one."""
    scaler, difference = torch.amp.GradScaler(place.device.type, init_scale=256.0, growth_interval=2), Difference()
    with Run(place, plan_of("powersgd")) as plain:
        expected = [plain.step(step) for step in range(STEPS)]
        states = plain.states()
    with Run(place, plan_of("powersgd"), scaler=scaler) as scaled:
        for step in range(STEPS):
            scale = scaler.get_scale()
            got = {name: gradient / scale for name, gradient in scaled.step(step).items()}
            difference.add_all(f"step {step}", got, expected[step])
        difference.add_all("state", scaled.states(), states)
    return difference.outcome(SAME_DEVICE)


def resumed_is_unbroken(place: Place, case: str) -> Outcome:
    """Six steps, and three, then three more in a new model and state from a file's bytes."""
    with Run(place, plan_of(case)) as whole:
        expected = [whole.step(step) for step in range(STEPS)]
        states = whole.states()
    file, half = io.BytesIO(), STEPS // 2
    with Run(place, plan_of(case)) as first:
        for step in range(half):
            first.step(step)
        torch.save({"model": first.model.module.state_dict(), "compression": first.state.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu", weights_only=True)
    difference = Difference()
    with Run(place, plan_of(case)) as second:
        second.model.module.load_state_dict(saved["model"])
        second.state.load_state_dict(saved["compression"])
        for step in range(half, STEPS):
            difference.add_all(f"step {step}", second.step(step), expected[step])
        difference.add_all("state", second.states(), states)
    return difference.outcome(SAME_DEVICE)


def late_gradients(place: Place, case: str) -> Outcome:
    """Gradients that are written long after the hook was called: as if they were not late."""
    with Run(place, plan_of(case)) as prompt:
        expected = [prompt.step(step) for step in range(STEPS)]
    difference = Difference()
    with Run(place, plan_of(case), LatePrescribed(SHAPES)) as late:
        for step in range(STEPS):
            difference.add_all(f"step {step}", late.step(step), expected[step])
    return difference.outcome(SAME_DEVICE)


def late_codec(place: Place) -> Outcome:
    """Averages that are written long after the engine let DDP go on: the training stream waits for them."""
    codecs.register(LateTopK)
    difference = Difference()

    def plan(codec: str) -> Plan:
        return Plan.uniform(layers_of(Prescribed(SHAPES)), codec, density=0.07)

    with Run(place, plan("topk")) as prompt:
        expected = [prompt.step(step) for step in range(STEPS)]
    with Run(place, plan("late_topk")) as late:
        for step in range(STEPS):
            difference.add_all(f"step {step}", late.step(step), expected[step])
    return difference.outcome(SAME_DEVICE)


def late_memory(place: Place) -> Outcome:
    """Gradients as views of buckets that are written late and freed early: memory is not taken while it is in use."""
    expected = lockstep(plan_of("topk"), place.world_size, STEPS, place.device)
    model, difference = wrapped(place, LatePrescribed(SHAPES), gradient_as_bucket_view=True), Difference()
    with CompressionState(plan_of("topk"), model, deterministic=True, process_group=place.spare) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(STEPS):
            model.zero_grad()
            model(gradients(place.rank, step, place.device)).backward()
            # New memory, filled at once: what the allocator gave back too early would be overwritten.
            _ = [torch.full((n,), torch.nan, device=place.device) for n in (65, 1152, 2100, 3600, 4096)]
            difference.add_all(f"step {step}", averages(model), {**averages(model), **expected[step]})
    return difference.outcome(SAME_DEVICE)


def exchange_in_line(place: Place) -> Outcome:
    """Without DDP and without a thread, on gradients that are written late in the caller's own stream."""
    expected, difference = lockstep(plan_of("powersgd"), place.world_size, STEPS, place.device), Difference()
    parameters = Prescribed(SHAPES).to(place.device).named_parameters()
    with Exchange(plan_of("powersgd"), parameters, place.spare, deterministic=True) as exchange:
        for step in range(STEPS):
            grads = gradients(place.rank, step, place.device)
            sleep(place.device)
            grads = {name: gradient.clone() for name, gradient in grads.items()}
            exchange.step(grads)
            difference.add_all(f"step {step}", {name: grads[name] for name in expected[step]}, expected[step])
    return difference.outcome(SAME_DEVICE)


def driven(place: Place, case: str) -> Outcome:
    """One exchange of each layer's codec by `drive`."""
    assert place.spare is not None
    plan, difference = plan_of(case), Difference()
    [expected] = lockstep(plan, place.world_size, 1, place.device)
    grads, communicator = gradients(place.rank, 0, place.device), Communicator(place.spare, deterministic=True)
    for group in plan.groups:
        context = Context(place.rank, place.world_size, 0, group.name, plan.seed)
        own = {name: grads[name] for name in group.layers}
        done = drive(
            exchange_group(plan.build(group, place.device), Batch.of(own, plan.members(group)), {}, context),
            communicator,
        )
        difference.add_all("step 0", done.mean, {name: expected[name] for name in group.layers})
    return difference.outcome(SAME_DEVICE)


def loaded_artifact(place: Place) -> Outcome:
    """A plan with learned tensors, saved, loaded on every rank, and run on the device."""
    from gradlab.artifact import Artifact

    importlib.import_module("safetensors")  # on all ranks alike: without it one alone would fail, below
    plan, difference = plan_of("gradiveq"), Difference()
    path = place.folder / "plan.safetensors"
    if place.rank == 0:
        Artifact(plan).save(path, overwrite=True)
    dist.barrier(group=place.group)
    expected = lockstep(plan, place.world_size, STEPS, place.device)
    model = wrapped(place)
    with CompressionState.load(path, model, deterministic=True, process_group=place.spare) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(STEPS):
            model.zero_grad()
            model(gradients(place.rank, step, place.device)).backward()
            got = averages(model)
            difference.add_all(f"step {step}", {name: got[name] for name in expected[step]}, expected[step])
    return difference.outcome(SAME_DEVICE)


def recorded(place: Place) -> Outcome:
    """A trace of gradients that are written late holds them, bit for bit."""
    from gradlab.capture import TraceRecorder
    from gradlab.trace import Trace

    path, cpu, difference = place.folder / "trace", torch.device("cpu"), Difference()
    model = wrapped(place, LatePrescribed(SHAPES))
    with TraceRecorder(model, path, overwrite=True):
        for step in range(STEPS):
            model.zero_grad()
            model(gradients(place.rank, step, place.device)).backward()
    dist.barrier(group=place.group)
    with Trace(path) as trace:
        for recording in trace.iterate():
            got = {name: torch.tensor(value) for name, value in recording.gradients[place.rank].items()}
            expected = gradients(place.rank, recording.index, cpu)
            difference.add_all(f"step {recording.index}", got, expected)
    return difference.outcome(0.0)


def shards_agree(place: Place, codec: str) -> Outcome:
    """FSDP2, each rank a node of one: all nodes get the same gradients of their shards, bit for bit."""
    if place.world_size == 1:
        return Outcome(NOT_RUN, "needs two ranks")
    mesh = init_device_mesh(place.device.type, (place.world_size, 1), mesh_dim_names=("replicate", "shard"))
    model, difference = network().to(place.device), Difference()
    plan = plan_of_network(codec, {})
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = adamw(model)
    with compress_fsdp(model, plan, between=mesh["replicate"], optimizer=optimizer, deterministic=True):
        for step in range(STEPS):
            inputs, wanted = (one.to(place.device) for one in batch(place.rank, step))
            optimizer.zero_grad()
            (model(inputs) - wanted).square().mean().backward()
            for name, parameter in model.named_parameters():
                mean = parameter.grad.to_local()
                first = mean.clone()
                dist.broadcast(first, 0, group=place.group)
                difference.add(f"step {step} {name}", mean, first)
            optimizer.step()
    return difference.outcome(0.0)


def outer_steps(place: Place, codec: str, delay: int) -> Outcome:
    """Local steps on the device, with outer steps of two fragments, beside all workers in one process on the CPU."""
    plan = Plan(layers_of(network()), ()) if codec == "identity" else plan_of_network(codec, {"dtype": "int8"})
    oracle, difference = Oracle(plan, place.world_size, 4, 2, delay, 0.5), Difference()
    model = network().to(place.device)
    optimizer = adamw(model)
    numbers = {"every": 4, "fragments": 2, "delay": delay, "group": place.group, "deterministic": True}
    with OuterStep(plan, model, **numbers) as outer:
        for step in range(1, 17):
            inputs, wanted = (one.to(place.device) for one in batch(place.rank, step))
            optimizer.zero_grad()
            (model(inputs) - wanted).square().mean().backward()
            optimizer.step()
            outer.step()
            oracle.step(step)
        theirs = dict(oracle.models[place.rank].named_parameters())
        difference.add_all("end", {name: p.detach() for name, p in model.named_parameters()}, theirs)
    return difference.outcome(1e-2)  # of a quantizer whose codes another device's last bits may turn


CHECKS: dict[str, Check] = {
    "identity is plain DDP": identity_is_plain_ddp,
    "ranks agree, with all-reduce": ranks_agree,
    "GradScaler: overflow": scaler_overflow,
    "GradScaler: the scale changes nothing": scale_changes_nothing,
    "streams: late gradients, identity": functools.partial(late_gradients, case="identity"),
    "streams: late gradients, topk": functools.partial(late_gradients, case="topk"),
    "streams: late gradients, powersgd": functools.partial(late_gradients, case="powersgd"),
    "streams: late codec": late_codec,
    "streams: late gradients in bucket views": late_memory,
    "Exchange, in line": exchange_in_line,
    "drive: topk": functools.partial(driven, case="topk"),
    "drive: qsgd, ring": functools.partial(driven, case="qsgd, ring"),
    "artifact, loaded": loaded_artifact,
    "recording of late gradients": recorded,
    **{f"engine is lockstep: {case}": functools.partial(engine_is_lockstep, case=case) for case in cases()},
    **{
        f"outer steps: {codec}, {delay} late": functools.partial(outer_steps, codec=codec, delay=delay)
        for codec in ("identity", "block_scaled")
        for delay in (0, 2)
    },
    **{f"FSDP2: {codec}": functools.partial(shards_agree, codec=codec) for codec in ("topk", "qsgd")},
    **{f"resume: {name}": functools.partial(resumed_is_unbroken, case=name) for name in codecs.names()},
}
