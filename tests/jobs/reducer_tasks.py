"""Tasks for real ranks: layers that DDP's reducer has and the model does not train, or the other way; and copies."""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import gradlab
from gradlab.capture import TraceRecorder
from gradlab.ddp.copies import Detached
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.runtime import compress_fsdp
from gradlab.runtime.outer.in_ddp import LocalSteps
from gradlab.trace import Trace
from support.pool_groups import SPARE

STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


class Adapter(nn.Module):
    """A low-rank update beside a frozen layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.ones(2, inner.in_features))
        self.up = nn.Parameter(torch.zeros(inner.out_features, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(inputs) + inputs @ self.down.T @ self.up.T
        return result


def unfreeze_bias(net: nn.Sequential) -> None:
    net[0].bias.requires_grad_(True)


def add_adapter(net: nn.Sequential) -> None:
    net[0] = Adapter(net[0])  # type: ignore[arg-type]


def exchange_head(net: nn.Sequential) -> None:
    net[2] = nn.Linear(32, 8)


def swap(net: nn.Sequential) -> None:
    """As many layers are trained as before, and of the same sizes."""
    net[2].weight = nn.Parameter(net[2].weight.detach().clone())


CHANGES: dict[str, Callable[[nn.Sequential], None]] = {
    "unfrozen bias": unfreeze_bias,
    "adapter": add_adapter,
    "replaced": exchange_head,
    "swapped": swap,
}


def in_ddp(group: dist.ProcessGroup, frozen: bool = True, **options: Any) -> tuple[nn.Sequential, Any]:
    net = network()
    net[0].requires_grad_(not frozen)
    return net, DistributedDataParallel(net, process_group=group, **options)


def spare(group: dist.ProcessGroup) -> dict[str, Any]:
    return {"process_group": SPARE.get(dist.get_world_size(group))}


def inputs_of(group: dist.ProcessGroup, step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank(group)))


def backward(model: nn.Module, group: dist.ProcessGroup, step: int) -> None:
    model(inputs_of(group, step)).square().mean().backward()


def said(work: Callable[[], object]) -> str:
    """The error that work raises, or else what it warns of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            work()
        except GradlabError as error:
            return str(error)
        except RuntimeError as error:
            return f"RuntimeError: {error}"
    return " ".join(str(one.message) for one in warned)


def changed_before(group: dist.ProcessGroup, folder: str) -> dict[str, list[str]]:
    """What a plan and a recorder say of a model that was changed between DDP and them."""
    refusals = {}
    for name, change in CHANGES.items():
        net, model = in_ddp(group)
        change(net)
        plan = Plan.uniform(model, "identity")
        refusals[name] = [
            said(lambda model=model, plan=plan: gradlab.compress(model, plan, **spare(group))),
            said(lambda model=model: TraceRecorder(model, Path(folder) / "trace")),
        ]
    with mock.patch("gradlab.ddp.averaged._of_reducer", return_value=[]):  # a torch whose reducer shows nothing
        net, model = in_ddp(group)
        unfreeze_bias(net)
        state = gradlab.compress(model, Plan.uniform(model, "identity"), **spare(group))
        refusals["not shown"] = [said(lambda: backward(model, group, 0))]
        state.close()
    return refusals


def changed_while_attached(group: dist.ProcessGroup, folder: str, change: str, way: str) -> str:
    """What is said when a model is changed in training, after the first step or, late, before the state is closed."""
    net, model = in_ddp(group)

    def train() -> None:
        if way == "recorder":
            attached: Any = TraceRecorder(model, Path(folder) / "trace")
        else:
            rules = "error" if way == "error" else None
            plan = Plan.uniform(model, "identity" if way == "identity" else "powersgd")
            attached = gradlab.compress(model, plan, rules=rules, **spare(group))
        with attached:
            for step in range(STEPS):
                if step == (STEPS - 1 if way == "at close" else 1):
                    CHANGES[change](net)
                    if way == "at close":
                        break
                backward(model, group, step)
            if way in ("identity", "powersgd"):
                assert [one.rule for one in attached.findings] == ["layer_not_averaged"]

    return said(train)


def frozen_after_ddp(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """What comes of layers that are frozen between DDP and a plan, and thawed later."""
    model = in_ddp(group, frozen=False)[1]
    model.module[0].requires_grad_(False)
    refused = said(lambda: gradlab.compress(model, Plan.uniform(model, "identity"), **spare(group)))
    trained = []
    for compressed in (False, True):
        net, model = in_ddp(group, frozen=False, find_unused_parameters=True)
        net[0].requires_grad_(False)
        if compressed:
            state = gradlab.compress(model, Plan.uniform(model, "identity"), **spare(group))
        for step in range(STEPS):
            backward(model, group, step)
        trained.append(torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None]))
    net[0].weight.requires_grad_(True)
    thawed = said(lambda: backward(model, group, STEPS))
    state.close()
    unrecorded = [
        said(lambda layers=layers: thawed_while_recorded(group, Path(folder) / layers.strip("*."), layers))
        for layers in ("[02].*", "*.bias", "2.*")
    ]
    return {"refused": refused, "equal": torch.equal(*trained), "thawed": thawed, "unrecorded": unrecorded}


def thawed_while_recorded(group: dist.ProcessGroup, path: Path, layers: str) -> None:
    net, model = in_ddp(group, frozen=False, find_unused_parameters=True)
    net[0].requires_grad_(False)
    with TraceRecorder(model, path, layers=layers):
        backward(model, group, 0)
        net[0].requires_grad_(True)
        backward(model, group, 1)


def added_under_fsdp(group: dist.ProcessGroup, folder: str) -> list[str]:
    """What compression and a recorder say of a layer that is added after `fully_shard`, while they are attached."""
    messages = []
    for way in ("compress", "record"):
        net, mesh = network(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net[0], mesh=mesh["shard"])
        fully_shard(net, mesh=mesh["shard"])

        def train(net: nn.Sequential = net, mesh: Any = mesh, way: str = way) -> None:
            attached: Any = (
                compress_fsdp(net, Plan.uniform(net, "topk"), between=mesh["replicate"])
                if way == "compress"
                else TraceRecorder(net, Path(folder) / "fsdp", between=mesh["replicate"])
            )
            with attached:
                for step in range(3):
                    if step == 2:
                        net[0].register_parameter("scale", nn.Parameter(torch.ones(32)))
                    backward(net, group, step)

        messages.append(said(train))
    return messages


class WithModule(nn.Module):
    """Has a part called `module`, as DDP has, beside a parameter of the same name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(16, 32))
        self.module = nn.Linear(32, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(inputs @ self.weight)
        return result


def a_module_called_module(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """Record a model with a part called `module`, and train it by plans that name it so, and as plans did before."""
    model = DistributedDataParallel(WithModule(), process_group=group)
    with TraceRecorder(model, folder):
        backward(model, group, 0)
    dist.barrier(group)
    with Trace(folder) as trace:
        recorded = [layer.name for layer in trace.layers]
        found = torch.from_numpy(trace.read("module.weight", dist.get_rank(group))[0])
    model = DistributedDataParallel(WithModule(), process_group=group)
    with model.no_sync():
        backward(model, group, 0)
    same = torch.equal(found, model.module.module.weight.grad.flatten())
    before = nn.Sequential(OrderedDict(module=nn.Linear(16, 32), head=nn.Linear(32, 16)))
    renamed = [replace(layer, name=layer.name.removeprefix("module.")) for layer in layers_of(before)]
    measured = []
    for net, plan in ((WithModule(), WithModule()), (before, renamed)):
        wrapped = DistributedDataParallel(net, process_group=group)
        with gradlab.compress(wrapped, Plan.uniform(plan, "powersgd", rank=1), **spare(group)) as state:
            backward(wrapped, group, 1)
            measured.append(sorted(state.statistics.steps[-1].errors))
    return {"recorded": recorded, "same": same, "measured": measured}


# --- join -------------------------------------------------------------------------------------------------------------


def uneven_inputs(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """Train ranks on different numbers of batches, averaging over those that have one: plain, recorded, compressed."""
    trained = []
    for recorded in (False, True):
        model = in_ddp(group, frozen=False)[1]
        recorder = TraceRecorder(model, Path(folder) / "trace") if recorded else None
        join(model, group)
        trained.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    assert recorder is not None
    recorder.close()
    model = in_ddp(group, frozen=False)[1]
    with gradlab.compress(model, Plan.uniform(model, "identity"), **spare(group)):
        refused = said(lambda: join(model, group))
    return {"equal": torch.equal(*trained), "refused": refused}


def join(model: Any, group: dist.ProcessGroup) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + 2 * dist.get_rank(group)):
            optimizer.zero_grad()
            backward(model, group, step)
            optimizer.step()


# --- copies -----------------------------------------------------------------------------------------------------------


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "save": saved,
}


def copies(group: dist.ProcessGroup, folder: str, way: str) -> None:
    """Copy a model before and after a step with something attached, as with plain DDP: asserts what holds.

    DDP is copied on all ranks of the default group alone.
    """
    plain, expected = train_and_copy(group, None)
    attached: list[Any] = []

    def attach(model: Any, optimizer: torch.optim.Optimizer) -> None:
        if way == "recorder":
            attached.append(TraceRecorder(model, Path(folder) / "trace", optimizer=optimizer))
        elif way == "local steps":
            attached.append(LocalSteps(model, optimizer, Plan.uniform(model, "identity")))
        else:
            attached.append(gradlab.compress(model, Plan.uniform(model, "identity"), optimizer=optimizer))

    trained, found = train_and_copy(group, attach)
    state = attached[0].outer if way == "local steps" else attached[0]
    for name, model in found.items():
        if way != "local steps":  # whose gradients stay with each rank
            assert torch.equal(plain, trained), name
            assert torch.equal(gradients(expected[name]), gradients(model)), name
        with gradlab.compress(model, Plan.uniform(model, "topk")) as anew:  # the copy has no hook
            backward(model, group, STEPS)
        assert anew.iteration == 1, name
    detached = copy.deepcopy(state)
    assert isinstance(detached, Detached)
    assert not hasattr(detached, "iteration")
    assert "copies are detached" in said(lambda: detached.close())
    attached[0].close()
    dist.barrier(group)
    if way == "recorder":
        with Trace(Path(folder) / "trace") as trace:
            assert len(trace.steps) == STEPS


def train_and_copy(
    group: dist.ProcessGroup, attach: Callable[[Any, torch.optim.Optimizer], None] | None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Train a model with copies taken before and after; its last gradients, and the copies after a pass of their own.

    Also averages weights in every step, as an exponential moving average does.
    """
    model = in_ddp(group, frozen=False)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if attach is not None:
        attach(model, optimizer)
    made = {f"{name} before": make(model) for name, make in COPIES.items()}
    moving = AveragedModel(model)
    for step in range(STEPS):
        model.zero_grad()
        backward(model, group, step)
        optimizer.step()
        moving.update_parameters(model)
    assert copy.deepcopy(optimizer).state_dict().keys() == saved(optimizer).state_dict().keys()
    made |= {f"{name} after": make(model) for name, make in COPIES.items()}
    with torch.no_grad():
        inputs = inputs_of(group, STEPS)
        now = [one for name, one in made.items() if "after" in name]
        outputs = [one(inputs) for one in (model, model.module, copy.deepcopy(model.module), *now)]
        assert moving(inputs).isfinite().all()
    assert all(torch.equal(outputs[0], other) for other in outputs)
    mine = gradients(model)
    for one in made.values():
        one.zero_grad()
        backward(one, group, STEPS)
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(ranks, gradients(one), group=group)
        assert all(torch.equal(ranks[0], other) for other in ranks), "a copy averages as DDP does"
    return mine, made


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])
