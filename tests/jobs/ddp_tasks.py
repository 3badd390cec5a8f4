"""Tasks for real ranks: training under DDP with our hook beside plain DDP and PyTorch's own hooks."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

from gradlab.artifact import Artifact
from gradlab.codec import Batch, Context, Exchanged, Tensors
from gradlab.codecs.identity import Identity
from gradlab.collectives import AllToAll, Broadcast, Coroutine, Gather, Mean, Parts, run_lockstep
from gradlab.ddp.model import synchronised_layers
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import FEEDBACK, Group, Plan, Schedule, Wrap
from gradlab.runtime import Communicator, CompressionState, compression_hook, drive
from gradlab.runtime.checkpoint import sealed
from gradlab.runtime.network.communicator import LEAST_BYTES
from gradlab.runtime.saved import RankFiles
from support.contract import agree, lockstep
from support.image_network import image_network
from support.pool_groups import SPARE
from support.prescribed import Prescribed, gradients
from support.prescribed import layers as prescribed_layers
from support.small_disk import fill
from support.stacks import Stacks, several_plan, several_shapes

SMALL_BUCKETS = 0.005  # MiB


def train(
    group: dist.ProcessGroup,
    steps: int,
    plan: Callable[[nn.Module], Plan] | None = None,
    bucket_cap_mb: float = SMALL_BUCKETS,
    adaptive: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train the network on random images; with a plan, compressed. Parameters as one vector, and what was seen.

    adaptive: with AdamW in place of SGD with momentum.
    """
    rank = dist.get_rank(group)
    model = DistributedDataParallel(image_network(), process_group=group, bucket_cap_mb=bucket_cap_mb)
    kind = torch.optim.AdamW(model.parameters(), lr=1e-3) if adaptive else None
    optimizer = kind or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    buckets: list[int] = []
    state = None
    if plan is not None:
        options.setdefault("process_group", SPARE.get(dist.get_world_size(group)))
        state = CompressionState(plan(model), model, optimizer=optimizer, **options)

        # DDP looks at annotations: exact ones, or none.
        def counting(state, bucket):  # type: ignore[no-untyped-def]
            if bucket.index() == 0:
                buckets.clear()  # what counts is the last step: buckets are rebuilt after the first
            buckets.append(bucket.index())
            return compression_hook(state, bucket)

        model.register_comm_hook(state, counting)
    stream = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        images = torch.randn(8, 1, 8, 8, generator=stream)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), torch.randint(10, (8,), generator=stream)).backward()
        optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    if state is not None:
        state.close()
    return {"parameters": flat, "buckets": 1 + max(buckets, default=0), "state": state}


def identity_equals_plain_ddp(group: dist.ProcessGroup, steps: int) -> dict[str, Any]:
    plain = train(group, steps)["parameters"]
    ours = train(group, steps, lambda model: Plan.uniform(model, "identity"))
    return {
        "equal": torch.equal(plain, ours["parameters"]),
        "buckets": ours["buckets"],
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("gradlab")],
    }


def warm_up_equals_plain_ddp(group: dist.ProcessGroup) -> dict[str, Any]:
    """Dense warm-up steps of a compressing plan are plain DDP's; the step after is not. And bytes by step."""

    def plan(model: nn.Module) -> Plan:
        return Plan.uniform(model, "topk", density=0.05, warmup_steps=5)

    ours = {steps: train(group, steps, plan) for steps in (5, 6)}
    state, world_size = ours[6]["state"], dist.get_world_size(group)
    return {
        "equal": [torch.equal(train(group, steps)["parameters"], run["parameters"]) for steps, run in ours.items()],
        "payload": [record.payload_bytes for record in state.statistics.steps],
        "forecast": [state.plan.payload_bytes(world_size, compressing) for compressing in (False, True)],
    }


def long_run(
    group: dist.ProcessGroup,
    codec: str,
    steps: int,
    settings: dict[str, Any],
    wrappers: Sequence[str] | None = None,
    adaptive: bool = False,
) -> dict[str, Any]:
    """Whether all ranks hold the same parameters after many steps."""
    around = {} if wrappers is None else {"wrappers": [Wrap(name) for name in wrappers]}
    done = train(group, steps, lambda model: Plan.uniform(model, codec, **around, **settings), adaptive=adaptive)
    flat = done["parameters"]
    return {
        "agree": agree(flat, group),
        "finite": bool(flat.isfinite().all()),
        "buckets": done["buckets"],
        "report": done["state"].report(),
    }


def against_torch_powersgd(group: dist.ProcessGroup, rank: int, steps: int, dtype: str) -> list[float]:
    """Per step the largest relative difference of our PowerSGD from PyTorch's hook: one bucket, the same first Q."""
    shapes = {"conv": (16, 8, 3, 3), "wide": (24, 300), "tall": (300, 17), "vector": (65,)}
    dense_steps = 2
    kind = getattr(torch, dtype)
    theirs = DistributedDataParallel(Prescribed(shapes, kind), process_group=group)
    ours = DistributedDataParallel(Prescribed(shapes, kind), process_group=group)
    torch_state = torch_powersgd.PowerSGDState(
        group, rank, start_powerSGD_iter=dense_steps, min_compression_rate=1, random_seed=7
    )
    order: list[str] = []
    names = {parameter: name for name, parameter in theirs.module.named_parameters()}

    def remembering(state, bucket):  # type: ignore[no-untyped-def]
        order[:] = [names[parameter] for parameter in bucket.parameters()]
        return torch_powersgd.powerSGD_hook(state, bucket)

    theirs.register_comm_hook(torch_state, remembering)
    plan = Plan.uniform(ours, "powersgd", rank=rank, warmup_steps=dense_steps, error_feedback=True, minimum_numel=1)
    largest = []
    with CompressionState(plan, ours, process_group=SPARE.get(dist.get_world_size(group))) as state:
        ours.register_comm_hook(state, compression_hook)
        for step in range(steps):
            if step == dense_steps:
                _give_first_q(state, shapes, order, rank, 7, kind)
            for model in (theirs, ours):
                model.zero_grad()
                model(_with_signal(gradients(shapes, dist.get_rank(group), step, kind))).backward()
            pairs = [(getattr(theirs.module, name).grad, getattr(ours.module, name).grad) for name in shapes]
            largest.append(max(float((b - a).abs().max() / a.abs().max()) for a, b in pairs))
    return largest


def _with_signal(noise: Tensors) -> Tensors:
    """Noise under a lasting signal of rank 4, as gradients have it: in noise alone no direction is the better one."""
    made = {}
    for name, grad in noise.items():
        matrix = grad.reshape(grad.shape[0], -1)
        draw = torch.Generator().manual_seed(len(name))
        left = torch.randn(matrix.shape[0], 4, generator=draw, dtype=torch.float64).to(grad.dtype)
        right = torch.randn(4, matrix.shape[1], generator=draw, dtype=torch.float64).to(grad.dtype)
        strength = torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=grad.dtype)
        made[name] = ((left * strength) @ right + 0.1 * matrix).reshape(grad.shape)
    return made


def _give_first_q(
    state: CompressionState,
    shapes: dict[str, tuple[int, ...]],
    order: list[str],
    rank: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Draw Q as PyTorch's hook does: seeded once, one matrix after another in the bucket's order."""
    saved = state.state_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(seed).randint(1_000_000_000))
        for name in order:
            if len(shapes[name]) > 1:
                columns = int(np.prod(shapes[name][1:]))
                saved["states"][f"{name}::{name}/q"] = torch.randn(1, columns, rank, dtype=dtype)[0].T.contiguous()
    state.load_state_dict(sealed(saved))


def every_request(group: dist.ProcessGroup, deterministic: bool, relay_below: int) -> dict[str, Any]:
    """A coroutine that asks for every kind of collective, several at once: process group against lockstep."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    expected = run_lockstep([_asks_everything(r, world_size) for r in range(world_size)])[rank]
    communicator = Communicator(group, deterministic=deterministic, check_requests=True)
    communicator.relay_below = relay_below
    answers = drive(_asks_everything(rank, world_size), communicator)
    for answer, wanted in zip(answers, expected.value, strict=True):
        # The order of a sum is the backend's: the bound is N eps sum|g| / N, with |g| below 5 here.
        rounding = 5 * world_size * torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0
        torch.testing.assert_close(answer, wanted, rtol=0, atol=rounding)
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(answers, expected.value, strict=True)),
        "payload": [communicator.payload_bytes, expected.payload_bytes],
    }


def _asks_everything(rank: int, world_size: int) -> Coroutine[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(rank)
    root = world_size - 1
    answers: list[torch.Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        answers.append((yield Mean(torch.randn(7, 3, generator=draw).to(dtype))))
    whole, bits, mean = yield (
        Gather(torch.arange(5, dtype=torch.int32) + rank),
        Gather(torch.tensor([rank], dtype=torch.uint8)),
        Mean(torch.randn((), generator=draw)),
    )
    answers += [*whole, *bits, mean]
    ragged, none, halves = yield (
        Gather(torch.arange(3 * rank, dtype=torch.float64), varying=True),
        Gather(torch.empty(0, dtype=torch.int16), varying=True),
        Gather(torch.full((rank + 1,), 0.5, dtype=torch.bfloat16), varying=True),
    )
    answers += [*ragged, *none, *halves]
    for count in (5, LEAST_BYTES):  # of one rank alone: between three it is not padded
        answers += yield Gather(torch.full((count * (rank == root),), 7, dtype=torch.uint8), varying=True)
    lengths = tuple(2 * to for to in range(world_size))
    known, pairs = yield (
        Gather(torch.full((lengths[rank],), float(rank), dtype=torch.float64), lengths=lengths),
        Gather(torch.arange(world_size - rank, dtype=torch.uint8), lengths=tuple(range(world_size, 0, -1))),
    )
    answers += [*known, *pairs]
    first, second = yield Broadcast(torch.full((4,), float(rank)), 0), Broadcast(torch.tensor(rank), root)
    answers += [first, second]
    parts = yield AllToAll(tuple(torch.full((to + 1,), 10 * rank + to, dtype=torch.int64) for to in range(world_size)))
    answers += parts
    lengths = tuple(range(world_size))
    answers += yield AllToAll(Parts(torch.arange(float(sum(lengths))) + 100 * rank, lengths))
    # Rank 0 sends nothing, and the last rank is sent nothing: alone they take part without a byte.
    last = tuple(torch.arange(rank * (to == world_size - 1)) for to in range(world_size))
    ragged, pairs, lone = yield (
        AllToAll(
            tuple(torch.arange(float(rank * (world_size - 1 - to))) + 10 * rank for to in range(world_size)),
            varying=True,
        ),
        AllToAll(tuple(torch.full((rank,), to, dtype=torch.uint8) for to in range(world_size)), varying=True),
        AllToAll(last, varying=True, served=frozenset({world_size - 1})),
    )
    answers += [*ragged, *pairs, *lone]
    answers += yield AllToAll(last, varying=True, served=frozenset({world_size - 1}))
    answers += yield from _large_parts(rank, world_size)
    answers.append((yield Mean(torch.empty(0))))
    return answers


def _large_parts(rank: int, world_size: int) -> Coroutine[list[torch.Tensor]]:
    """Parts that are worth messages between pairs, though not on all ranks: of one size or of each rank its own."""
    answers: list[torch.Tensor] = []
    for count in (LEAST_BYTES // 4 - 1, LEAST_BYTES // 4):
        sizes = [count if to == 0 else to - 1 for to in range(world_size)]
        answers += yield AllToAll(tuple(torch.full((n,), float(10 * rank + to)) for to, n in enumerate(sizes)))
        lengths = tuple(count if source == world_size - 1 else source for source in range(world_size))
        known, parts = yield (
            Gather(torch.arange(float(lengths[rank])) + rank, lengths=lengths),
            AllToAll(tuple(torch.full((2,), float(rank - to)) for to in range(world_size))),
        )
        answers += [*known, *parts]
    return answers


class Failing(Identity):
    """A codec with a defect."""

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if context.iteration == 2:
            raise ArithmeticError("the defect")
        return (yield from super().exchange(grads, state, context))


def codec_that_raises(group: dist.ProcessGroup) -> dict[str, Any]:
    """What the training loop sees of a defect in a codec, and of going on afterwards."""
    shapes = {"conv": (16, 8, 3, 3), "wide": (12, 300)}
    model = DistributedDataParallel(Prescribed(shapes), process_group=group, bucket_cap_mb=0.01)
    messages = []
    state = CompressionState(Plan.uniform(model, "topk"), model, process_group=SPARE.get(dist.get_world_size(group)))
    state.run.codecs["wide"] = Failing()
    model.register_comm_hook(state, compression_hook)
    for step in range(4):
        try:
            model(gradients(shapes, dist.get_rank(group), step)).backward()
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    state.close()
    return {"messages": messages, "threads": [t.name for t in threading.enumerate() if "gradlab" in t.name]}


def refusals(group: dist.ProcessGroup, folder: str) -> dict[str, str]:
    """What each wrong construction says, on this rank."""
    rank, spare = dist.get_rank(group), SPARE.get(dist.get_world_size(group))
    shapes = {"conv": (16, 8, 3, 3), "wide": (12, 300)}
    bare = Prescribed(shapes)
    model = DistributedDataParallel(bare, process_group=group)
    other = Plan.uniform(Prescribed({"conv": (16, 8, 3, 3), "wide": (12, 30), "more": (5, 5)}), "topk")
    differing = Plan.uniform(model, "topk", density=0.01 if rank == 0 else 0.02)
    messages = {}
    here = Artifact(Plan.uniform(model, "topk")).save(Path(folder) / "plan.safetensors") if rank == 0 else None
    attempts: dict[str, Callable[[], Any]] = {
        "bare": lambda: CompressionState(Plan.uniform(bare, "topk"), bare),
        "other model": lambda: CompressionState(other, model, process_group=spare),
        "ranks differ": lambda: CompressionState(differing, model, process_group=spare),
        "options differ": lambda: CompressionState(
            Plan.uniform(model, "topk"), model, segment_bytes=1000 + rank, process_group=spare
        ),
        "rules differ": lambda: CompressionState(
            Plan.uniform(model, "topk"), model, rules={"non_finite": ("error", "ignore")[rank]}, process_group=spare
        ),
        "one file missing": lambda: CompressionState.load(here if rank == 0 else "nowhere", model),
        "sparse": lambda: _with_sparse_embedding(group),
        "wrong state": lambda: _train_with("no state", group),
        "foreign parameter": lambda: _train_with(
            CompressionState(Plan.uniform(model, "topk"), model, process_group=spare), group
        ),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            messages[name] = ""
        except (GradlabError, RuntimeError) as error:
            messages[name] = str(error)
    with CompressionState(Plan.uniform(model, "topk"), model, process_group=spare) as state:
        model.register_comm_hook(state, compression_hook)
        try:
            model.register_comm_hook(state, compression_hook)
            messages["twice"] = ""
        except RuntimeError as error:
            messages["twice"] = str(error)
        try:
            CompressionState(Plan.uniform(model, "topk"), model, process_group=spare)
        except GradlabError as error:
            messages["second state"] = str(error)
    return messages


def _with_sparse_embedding(group: dist.ProcessGroup) -> None:
    bare = nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Linear(8, 40))
    model = DistributedDataParallel(bare, process_group=group)
    CompressionState(Plan.uniform(model, "topk"), model, process_group=SPARE.get(dist.get_world_size(group)))


def _train_with(state: Any, group: dist.ProcessGroup) -> None:
    shapes = {"conv": (16, 8, 3, 3)}
    model = DistributedDataParallel(Prescribed(shapes), process_group=group)
    model.register_comm_hook(state, compression_hook)
    model(gradients(shapes, 0, 0)).backward()


def use_after_close(group: dist.ProcessGroup) -> str:
    """What a backward says after the state was closed."""
    shapes = {"conv": (16, 8, 3, 3)}
    model = DistributedDataParallel(Prescribed(shapes), process_group=group)
    state = CompressionState(Plan.uniform(model, "topk"), model, process_group=SPARE.get(dist.get_world_size(group)))
    model.register_comm_hook(state, compression_hook)
    model(gradients(shapes, 0, 0)).backward()
    state.close()
    state.close()
    try:
        model(gradients(shapes, 0, 1)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def ignored_parameter(group: dist.ProcessGroup) -> dict[str, Any]:
    """A model of which DDP is told to leave one layer alone."""
    shapes = {"conv": (16, 8, 3, 3), "wide": (12, 300)}
    bare = Prescribed(shapes)
    everything = Plan.uniform(bare, "topk", density=1.0)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(bare, [".conv"])
    model = DistributedDataParallel(bare, process_group=group)
    spare, rank, world_size = SPARE.get(dist.get_world_size(group)), dist.get_rank(group), dist.get_world_size(group)
    try:
        CompressionState(everything, model, process_group=spare)
        refused = ""
    except GradlabError as error:
        refused = str(error)
    layers = [layer for layer, _ in synchronised_layers(model)]
    with CompressionState(Plan.uniform(layers, "topk", density=1.0), model, process_group=spare) as state:
        model.register_comm_hook(state, compression_hook)
        model(gradients(shapes, rank, 0)).backward()
    mean = sum(gradients(shapes, r, 0)["wide"] for r in range(world_size)) / world_size
    return {"refused": refused, "averaged": torch.allclose(bare.wide.grad, mean)}


def save_and_load(group: dist.ProcessGroup, stacks: Stacks) -> dict[str, Any]:
    """Six steps at a falling learning rate against three, a checkpoint through torch.save, and three in a new state."""
    shapes = several_shapes(stacks)
    rank = dist.get_rank(group)
    spare = SPARE.get(dist.get_world_size(group))

    optimizer: torch.optim.Optimizer

    def steps(state: CompressionState, model: nn.Module, span: range) -> list[torch.Tensor]:
        model.register_comm_hook(state, compression_hook)
        seen = []
        for step in span:
            model.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            model(gradients(shapes, rank, step)).backward()
            optimizer.step()
            seen.append(torch.cat([p.grad.reshape(-1).clone() for p in model.parameters()]))
        return seen

    def fresh() -> tuple[CompressionState, nn.Module]:
        nonlocal optimizer
        model = DistributedDataParallel(Prescribed(shapes), process_group=group, bucket_cap_mb=0.01)
        plan = several_plan(stacks, layers_of(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return CompressionState(plan, model, optimizer=optimizer, deterministic=True, process_group=spare), model

    state, model = fresh()
    with state:
        straight = steps(state, model, range(6))
    state, model = fresh()
    with state:
        steps(state, model, range(3))
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
    file.seek(0)
    state, model = fresh()
    with state:
        saved = torch.load(file, weights_only=True)
        state.load_state_dict(saved)
        resumed = steps(state, model, range(3, 6))
        refused = []
        wrong = (("rank", 99), ("world_size", 99), ("plan", "f" * 64), ("format", 2), ("states", None))
        for key, value in wrong:
            try:
                state.load_state_dict({**saved, key: value})
            except GradlabError as error:
                refused.append(str(error))
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(straight[3:], resumed, strict=True)),
        "keys": sorted(saved["states"]),
        "refused": refused,
    }


def mixed_groups(group: dist.ProcessGroup) -> dict[str, Any]:
    """Several codecs in one plan, a group over two buckets, dense layers between; against lockstep, deterministic."""
    shapes = {"a": (16, 8, 3, 3), "b": (12, 300), "c": (300, 7), "d": (65,), "e": (40, 40)}
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    model = DistributedDataParallel(Prescribed(shapes), process_group=group, bucket_cap_mb=0.008)
    uniform = Plan.uniform(model, "topk")
    groups = (
        Group("ends", ("a", "e"), "topk", {"density": 0.1}, FEEDBACK),
        Group("middle", ("b",), "powersgd", {"rank": 2}, FEEDBACK),
    )
    plan = Plan(uniform.layers, groups, Schedule(1), seed=5)
    reference = lockstep(plan, world_size, 3, lambda r, t: gradients(shapes, r, t + 1))
    equal = True
    with CompressionState(
        plan,
        model,
        deterministic=True,
        segment_bytes=1,
        measure_every=1,
        check_requests=True,
        process_group=SPARE.get(world_size),
    ) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(4):
            model.zero_grad()
            model(gradients(shapes, rank, step)).backward()
            if step:
                # Iterations count from the run's start; lockstep's own count differs, but these codecs do not use it.
                for results in reference[step - 1].values():
                    for name, mean in results[rank].value.mean.items():
                        equal = equal and torch.equal(getattr(model.module, name).grad, mean)
        records = list(state.statistics.steps)
    return {
        "equal": equal,
        "errors": [sorted(record.errors) for record in records],
        "bytes": [(sum(r.bucket_payload_bytes.values()), r.payload_bytes) for r in records if r.compressing],
        "in_time": all(record.wait_seconds > 0 for record in records),
    }


def chrome_trace(
    group: dist.ProcessGroup, codec: str = "powersgd", settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The events of one chosen step, and what the report, the table and the scalars say of the same run."""
    done = train(
        group,
        6,
        lambda model: Plan.uniform(model, codec, **(settings or {"rank": 2})),
        trace_steps=(4,),
        measure_every=2,
        segment_bytes=4096,
    )
    state = done["state"]
    return {
        "events": state.chrome_trace(),
        "report": state.report(),
        "table": state.table(),
        "scalars": state.scalars(),
        "errors": [bool(record.errors) for record in state.statistics.steps],
        "buckets": done["buckets"],
    }


def bad_options(group: dist.ProcessGroup) -> dict[str, str]:
    """What rank 1's wrong option makes every rank say; rank 0's own are sound."""
    rank, spare = dist.get_rank(group), SPARE.get(dist.get_world_size(group))
    model = DistributedDataParallel(Prescribed({"wide": (12, 300)}), process_group=group)
    plan = Plan.uniform(model, "topk")
    wrong: dict[str, dict[str, Any]] = {
        "segment_bytes": {"segment_bytes": "8"},
        "measure_every": {"measure_every": 2.5},
        "non_finite_limit": {"non_finite_limit": float("nan")},
        "trace_steps": {"trace_steps": 5},
        "a step of trace_steps": {"trace_steps": "ab"},
        "history": {"history": -1},
        "timeout": {"timeout": 30},
        "optimizer": {"optimizer": "sgd"},
        "scaler": {"scaler": "s"},
    }
    messages = {}
    for name, options in wrong.items():
        try:
            CompressionState(plan, model, **{"process_group": spare, **(options if rank == 1 else {})})
            messages[name] = ""
        except GradlabError as error:
            messages[name] = str(error)
    return messages


def bad_checkpoints(group: dist.ProcessGroup) -> dict[str, Any]:
    """What a state says of its own checkpoint with one entry changed; it stays as it was."""
    rank, spare = dist.get_rank(group), SPARE.get(dist.get_world_size(group))
    shapes = {"wide": (12, 300), "tall": (300, 7)}
    model = DistributedDataParallel(Prescribed(shapes), process_group=group)
    with CompressionState(Plan.uniform(model, "powersgd", rank=1), model, process_group=spare) as state:
        model.register_comm_hook(state, compression_hook)
        model(gradients(shapes, rank, 0)).backward()
        sound = state.state_dict()
        key = "wide::wide/residual"
        residual = sound["states"][key]
        states: dict[str, Any] = {
            "shape": {**sound["states"], key: residual[:1]},
            "transposed": {**sound["states"], key: residual.T},
            "integers": {**sound["states"], key: residual.long()},
            "int8 alone": {**sound["states"], key: residual.to(torch.int8)},
            "sparse": {**sound["states"], key: residual.to_sparse()},
            "NaN": {**sound["states"], key: residual * torch.nan},
            "no layer": {**sound["states"], "wide::deep/residual": residual},
            "no group": {**sound["states"], "deep::wide/residual": residual},
            "no name": {**sound["states"], 5: residual},
            "list": [residual],
        }
        wrong = {name: {**sound, "states": value} for name, value in states.items()}
        wrong |= {f"iteration {value}": {**sound, "iteration": value} for value in (-5, 10**30, "1", [1])}
        wrong |= {f"rate {value}": {**sound, "learning_rates": {"wide": value}} for value in (math.nan, "x")}
        wrong |= {"format": {**sound, "format": torch.ones(2)}, "nothing": None}
        factor = "wide::wide/q"
        for name, changed in {
            "another entry": {"wide::wide/velocity": residual.clone()},
            "a column less": {factor: sound["states"][factor][:, 1:]},
            "many rows": {factor: sound["states"][factor].repeat(30, 1)},
            "no rows": {factor: sound["states"][factor][:0]},
        }.items():
            wrong[name] = {**sound, "states": {**sound["states"], **changed}}
        messages = {}
        for name, value in wrong.items():
            try:
                state.load_state_dict(sealed(value) if isinstance(value, dict) else value)
                messages[name] = ""
            except GradlabError as error:
                messages[name] = str(error)
        flipped = residual.clone()
        flipped.view(-1).view(torch.int32)[5] ^= 1
        damaged = {
            "damaged": {**sound, "states": {**sound["states"], key: flipped}},
            "missing": {**sound, "states": {factor: sound["states"][factor]}},
            "added": {**sound, "states": {**sound["states"], "wide::wide/more": residual.clone()}},
            "rates": {**sound, "learning_rates": {"wide": 0.5}},
            "more": {**sound, "note": 1},
            "unsealed": {name: value for name, value in sound.items() if name != "sha256"},
        }
        for name, value in damaged.items():
            try:
                state.load_state_dict(value)
                messages[name] = ""
            except GradlabError as error:
                messages[name] = str(error)
        for name, several in {
            "none": None,
            "one of two": [sound],
            "keys": [sound, sealed({**sound, "rank": 1, "states": {}})],
        }.items():
            try:
                state.load_state_dicts(several, "split")
                messages[name] = ""
            except GradlabError as error:
                messages[name] = str(error)
        after = state.state_dict()
    same = all(torch.equal(after["states"][key], value) for key, value in sound["states"].items())
    return {"said": messages, "unchanged": same and after["iteration"] == sound["iteration"]}


def states_that_differ(group: dist.ProcessGroup) -> str:
    """What ranks say that continue from different sets of states."""
    rank, spare = dist.get_rank(group), SPARE.get(dist.get_world_size(group))
    shapes = {"wide": (12, 300)}
    model = DistributedDataParallel(Prescribed(shapes), process_group=group)
    with CompressionState(Plan.uniform(model, "powersgd", rank=1), model, process_group=spare) as state:
        model.register_comm_hook(state, compression_hook)
        model(gradients(shapes, rank, 0)).backward()
        saved = state.state_dict()
        state.load_state_dict(sealed({**saved, "states": saved["states"] if rank == 0 else {}}))
        try:
            model(gradients(shapes, rank, 1)).backward()
        except RuntimeError as error:
            return str(error)
    return ""


def learns_without_its_first_layer(group: dist.ProcessGroup) -> list[list[int]]:
    """The clock of an LGC group whose first layer has no gradient anywhere, iteration by iteration."""
    shapes, rank = {"first": (20, 20), "second": (30, 30)}, dist.get_rank(group)
    model = DistributedDataParallel(Prescribed(shapes), process_group=group, find_unused_parameters=True)
    settings = {"density": 0.05, "training_steps": 2, "optimizer": "adam", "loss": "mean", "most_error": 1e9}
    keeps = (Wrap("error_feedback"),)
    plan = Plan(prescribed_layers(shapes), (Group("lgc", ("first", "second"), "lgc_ring", settings, keeps),))
    clocks = []
    with CompressionState(plan, model) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(4):
            grads = gradients(shapes, rank, step)
            model(grads | {"first": torch.zeros(shapes["first"])}).backward()
            states = state.state_dict()["states"]
            clocks.append([int(value) for value in states["lgc::first/clock"]])
            assert "lgc::first/residual" not in states
    return clocks


def layers_without_gradients(group: dist.ProcessGroup) -> list[dict[str, bool]]:
    """What becomes of a layer that has no gradient on rank 0, then on no rank, then on all: held, and zero."""
    shapes, rank = {"first": (20, 20), "second": (30, 30)}, dist.get_rank(group)
    model = DistributedDataParallel(Prescribed(shapes), process_group=group, find_unused_parameters=True)
    plan = Plan.uniform(model, "topk", density=0.1, wrappers=(Wrap("error_feedback"),))
    history: list[dict[str, bool]] = []
    with CompressionState(plan, model, process_group=SPARE.get(dist.get_world_size(group))) as state:
        model.register_comm_hook(state, compression_hook)
        for step, missing in enumerate(([], [0], [0, 1, 2, 3], [])):
            grads = gradients(shapes, rank, step)
            before = state.state_dict()["states"]
            model.zero_grad()
            model(grads | ({"first": torch.zeros(shapes["first"])} if rank in missing else {})).backward()
            after = state.state_dict()["states"]
            held = {name: _equal(before, after, f"{name}::{name}/residual") for name in shapes}
            history.append({**held, "zero": not bool(model.module.first.grad.any())})
    return history


def _equal(before: Tensors, after: Tensors, key: str) -> bool:
    return key in before and torch.equal(before[key], after[key])


def checkpoints_on_a_full_disk(group: dist.ProcessGroup, disk: str) -> dict[str, Any]:
    """Save, save again where the disk is full, and continue from what is there: what is said, and the iteration."""
    rank, shapes = dist.get_rank(group), {"wide": (100, 300)}
    model = DistributedDataParallel(Prescribed(shapes), process_group=group)
    with CompressionState(Plan.uniform(model, "topk", density=0.01), model) as state:
        model.register_comm_hook(state, compression_hook)
        files = RankFiles(state, model, None)
        model(gradients(shapes, rank, 0)).backward()
        files.save(Path(disk) / "run", "state")
        sound = {path.name: path.read_bytes() for path in Path(disk, "run").iterdir()}
        dist.barrier(group)
        if rank == 0:
            fill(Path(disk), 150_000)  # for one rank's state, not for two
        dist.barrier(group)
        model(gradients(shapes, rank, 1)).backward()
        said = []
        for folder in ("run", "other"):
            try:
                files.save(Path(disk) / folder, "state")
            except GradlabError as error:
                said.append(str(error))
        dist.barrier(group)
        left = {path.name: path.read_bytes() for path in Path(disk, "run").iterdir()}
        whole = left[f"state_rank_{rank}.pt"] == sound[f"state_rank_{rank}.pt"]
        before, problem = state.iteration, ""
        try:
            files.load(Path(disk) / "run", "state", "nothing to do")
        except GradlabError as error:
            problem = str(error)
        return {"said": said, "old": whole, "iteration": state.iteration, "before": before, "problem": problem}
