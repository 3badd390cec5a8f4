"""Tasks for real ranks: attaching a plan in one call, compiled models, and passes that do not reach the hook."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.artifact import Artifact
from gradlab.capture import TraceRecorder
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime import CompressionState, Exchange, compression_hook
from gradlab.trace import Trace
from support.pool_groups import SPARE

STEPS = 6
WIDTH = 128  # of the network for which a plan is recommended


def network(width: int = 560) -> nn.Sequential:
    """Matrices of more than 1 MiB: torch.compile wants buckets as large as the first one at least."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def in_ddp(group: dist.ProcessGroup, form: str) -> tuple[nn.Module, DistributedDataParallel]:
    """What is called in training, and the DDP model in it."""
    bare: Any = network()
    if form == "compiled inside":
        bare = torch.compile(bare, backend="eager")
    elif form == "a compiled module inside":
        bare[2] = torch.compile(bare[2], backend="eager")
    model = DistributedDataParallel(bare, process_group=group, bucket_cap_mb=1)
    called: Any = torch.compile(model, backend="eager") if form == "compiled outside" else model
    return called, model


def batches(group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    stream = torch.Generator().manual_seed(dist.get_rank(group))
    for _ in range(STEPS):
        yield torch.randn(8, 16, generator=stream)


def train(group: dist.ProcessGroup, form: str, attach: Callable[..., CompressionState]) -> tuple[torch.Tensor, Any]:
    """Train; the parameters as one vector, and the run's report."""
    torch._dynamo.reset()
    called, model = in_ddp(group, form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "deterministic": True, "process_group": SPARE.get(dist.get_world_size(group))}
    with attach(called, **options) as state:
        for inputs in batches(group):
            optimizer.zero_grad()
            called(inputs).square().mean().backward()
            optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]), state.report()


def in_two_steps(called: Any, **options: Any) -> CompressionState:
    state = CompressionState(Plan.uniform(called, "powersgd", rank=2), called, **options)
    called.register_comm_hook(state, compression_hook)  # a compiled model hands it on
    return state


def one_call_is_two_steps(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    path = Path(folder) / f"plan-{dist.get_rank(group)}.safetensors"
    plan = Plan.uniform(network(), "powersgd", rank=2)
    Artifact(plan).save(path)
    before, _ = train(group, "plain", in_two_steps)
    by_plan, report = train(group, "plain", lambda model, **options: gradlab.compress(model, plan, **options))
    by_path, _ = train(group, "plain", lambda model, **options: gradlab.compress(model, str(path), **options))
    return {
        "equal": [torch.equal(before, by_plan), torch.equal(before, by_path)],
        "steps": report["iteration"],
        "ratio": report["compression_ratio"],
        "ratio_to_16_bits": report["ratio_to_16_bits"],
    }


def dense_steps_of(group: dist.ProcessGroup, bits: int) -> dict[str, Any]:
    """Train a model of so many bits in its plan's warm-up; what the report says is saved."""
    dtype = {16: torch.bfloat16, 32: torch.float32, 64: torch.float64}[bits]
    model = DistributedDataParallel(network().to(dtype), process_group=group)
    plan = Plan.uniform(model, "powersgd", rank=2, warmup_steps=2 * STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradlab.compress(
        model, plan, optimizer=optimizer, process_group=SPARE.get(dist.get_world_size(group))
    ) as state:
        for inputs in batches(group):
            model(inputs.to(dtype)).square().mean().backward()
        report = state.report()
        line = next(line for line in state.table().splitlines() if line.startswith("payload "))
    return {key: report[key] for key in ("compression_ratio", "ratio_to_16_bits")} | {"line": line}


def groups_that_send_too_much(group: dist.ProcessGroup) -> dict[str, Any]:
    """What attaching says of plans whose gathered messages are larger than 16-bit reduction's, and plain DDP's."""
    options: dict[str, Any] = {"process_group": SPARE.get(dist.get_world_size(group))}
    results: dict[str, Any] = {}
    for density, rules in ((0.1, None), (0.4, None), (0.9, None), (0.9, {"bytes_sent": "warn"}), (0.9, "ignore")):
        model = DistributedDataParallel(nn.Linear(64, 64), process_group=group)
        plan = Plan.uniform(model, "topk", density=density)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with gradlab.compress(model, plan, rules=rules, **options) as state:
                    found = [(one.rule, one.seen) for one in state.findings]
            except GradlabError as error:
                found = str(error)
        told = [str(one.message) for one in caught if "bytes of 16-bit" in str(one.message)]
        results[f"{density}, {rules}"] = {"found": found, "told": told}
    return results


def compiled_models_train_compressed(group: dist.ProcessGroup) -> dict[str, Any]:
    plan = Plan.uniform(network(), "powersgd", rank=2)

    def attach(called: nn.Module, **options: Any) -> CompressionState:
        return gradlab.compress(called, plan, **options)

    plain, _ = train(group, "plain", attach)
    results = {}
    for form in ("compiled inside", "a compiled module inside", "compiled outside"):
        compiled, report = train(group, form, attach)
        results[form] = {"equal": torch.equal(plain, compiled), "ratio": report["compression_ratio"]}
    return results


def a_compiled_model_is_recorded(group: dist.ProcessGroup, folder: str) -> bool:
    """Whether the recordings of a model and of what torch.compile makes of it are the same."""
    recorded = []
    for form in ("plain", "compiled outside"):
        torch._dynamo.reset()
        called, _ = in_ddp(group, form)
        path = Path(folder) / form
        with TraceRecorder(called, path) as recorder:
            for inputs in batches(group):
                called.zero_grad()
                called(inputs).square().mean().backward()
                recorder.annotate(loss=0.0)
        dist.barrier(group)
        with Trace(path) as trace:
            scalars = trace.scalars(dist.get_rank(group))
            recorded.append((trace.read("2.weight", dist.get_rank(group)), scalars["accumulation"]))
    return all(bool((one == other).all()) for one, other in zip(*recorded, strict=True))


# --- backward passes that do not reach the hook -----------------------------------------------------------------------


def unreached(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """What is said when a state is closed after each way to train past it."""
    inputs = torch.ones(2, 16)
    said: dict[str, list[str]] = {}

    @contextmanager
    def case(name: str, register: bool = True) -> Iterator[DistributedDataParallel]:
        model = in_ddp(group, "plain")[1]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            state = CompressionState(
                Plan.uniform(model, "topk"), model, process_group=SPARE.get(dist.get_world_size(group))
            )
            if register:
                model.register_comm_hook(state, compression_hook)
            yield model
            if name != "dropped":
                state.close()
                state.close()
            del state
            gc.collect()
        said[name] = [str(warning.message) for warning in warned]
        hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
        assert not model._forward_pre_hooks
        assert not any(hooks)

    with case("reached") as model:
        model(inputs).sum().backward()
    with case("no backward pass", register=False) as model, torch.no_grad():
        model(inputs)
    with case("not registered", register=False) as model:
        for _ in range(3):
            model(inputs).sum().backward()
    with case("under no_sync") as model, model.no_sync():
        model(inputs).sum().backward()
    with case("then reached") as model:
        with model.no_sync():
            model(inputs).sum().backward()
        model(inputs).sum().backward()
    with case("the bare module") as model:
        model.module(inputs).sum().backward()
    with case("dropped", register=False) as model:
        model(inputs).sum().backward()
    return said


def a_state_is_dropped_with_its_model(group: dist.ProcessGroup) -> bool:
    """Whether nothing keeps a registered state alive, once a script has let go of it and of the model."""
    model = in_ddp(group, "plain")[1]
    state = gradlab.compress(model, Plan.uniform(model, "topk"), process_group=SPARE.get(dist.get_world_size(group)))
    kept = weakref.ref(state)
    model(torch.ones(2, 16)).sum().backward()
    del model, state
    gc.collect()
    return kept() is None


# --- refusals ---------------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module around the DDP model, as training loops of some frameworks have it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class DeepSpeedEngine(nn.Module):
    """By the name that DeepSpeed's has: it is told by its name, and need not be installed."""


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def refusals(group: dist.ProcessGroup, folder: str) -> dict[str, dict[str, str]]:
    """What each way in says of each model that is not DDP's."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = in_ddp(group, "plain")[1]
    models = {
        "FSDP": FullyShardedDataParallel(network(), process_group=group, device_id=torch.device("cpu")),
        "FSDP2": fully_shard(network(), mesh=mesh),
        "a part in FSDP2": Holder(fully_shard(network(), mesh=mesh)),
        "DeepSpeed": DeepSpeedEngine(),
        "DataParallel": nn.DataParallel(network()),
        "bare": network(),
        "compiled and bare": torch.compile(network(), backend="eager"),
        "around it": Holder(model),
        "no module": [model],
    }
    plan = Plan.uniform(network(), "topk")
    ways: dict[str, Callable[[Any], Any]] = {
        "compress": lambda given: gradlab.compress(given, plan),
        "CompressionState": lambda given: CompressionState(plan, given),
        "TraceRecorder": lambda given: TraceRecorder(given, Path(folder) / "trace"),
    }
    return {name: {way: refusal(attempt, given) for way, attempt in ways.items()} for name, given in models.items()} | {
        "plan": {what: refusal(lambda given: gradlab.compress(model, given), what) for what in ("topk", "nowhere")}
    }


def refusal(attempt: Callable[[Any], Any], given: Any) -> str:
    try:
        attempt(given)
    except GradlabError as error:
        return str(error)
    return ""


def pasted(group: dist.ProcessGroup, lines: str, fsdp: bool = False, resume: str = "") -> dict[str, Any]:
    """Train with lines that a command printed, as a script that has them.

    resume: lines that save and load the state.
    fsdp: shard the model inside two nodes of two ranks each; otherwise it is in DDP.
    """
    names, parameters = to_paste_into(fsdp)
    exec(lines, names)
    for inputs in batches(group):
        names["optimizer"].zero_grad()
        names["called"](inputs).square().mean().backward()
        names["optimizer"].step()
    state, result = names.get("state"), {"ratio": None, "nodes": None}
    if isinstance(state, Exchange):
        with state:
            exec(resume, {"torch": torch, "state": state})
            report = state.report()
            result = {"ratio": report["compression_ratio"], "nodes": report.get("nodes")}
    trained = parameters().double()
    return result | {"finite": bool(torch.isfinite(trained).all()), "sum": float(trained.sum())}


def to_paste_into(fsdp: bool) -> tuple[dict[str, Any], Callable[[], torch.Tensor]]:
    """A script's names before it is trained, and its parameters as one vector."""
    model: Any = network(WIDTH)
    names: dict[str, Any] = {}
    if fsdp:
        names["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        names["model"] = names["called"] = fully_shard(model, mesh=names["mesh"]["shard"])
    else:
        names["ddp_model"] = names["called"] = DistributedDataParallel(model)
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)

    def parameters() -> torch.Tensor:
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
        return torch.cat([one.detach().reshape(-1) for one in whole])

    return names, parameters
