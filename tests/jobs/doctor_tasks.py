"""A checkup by `gradlab doctor`, and `gradlab.doctor` around steps, on real ranks."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.analysis.forecast.diagnosis import read_link
from gradlab.capture import TraceRecorder
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.runtime import compress_fsdp
from gradlab.runtime.doctor import COLLECTIVES, Checkup, Measured, Message, Timed, measure
from jobs import fsdp_tasks, tensor_parallel_tasks


@mock.patch("gradlab.runtime.doctor._WORK_SECONDS", 0.02)
@mock.patch("gradlab.runtime.doctor._MOST", 2**21)  # of bytes; a busy machine would otherwise take all that it may
def checkup(group: dist.ProcessGroup, local: int) -> dict[str, Any] | str:
    """Measure shortly, as if so many ranks were on each node; or what is said of that."""
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE=str(local)):
        try:
            return measure(torch.device("cpu"), 0.05, group).to_json()
        except GradlabError as error:
            return str(error)


class Training:
    """Steps with momentum, over buckets of a layer each, on batches and dropout from torch's own generator."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, 4))
        self.model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.001)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(dist.get_rank(group))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 24)).square().mean().backward()
            self.optimizer.step()

    def parameters(self) -> list[list[float]]:
        return [parameter.tolist() for parameter in self.model.module.parameters()]


def found_on(ranks: int, local: int = 1) -> Checkup:
    """Make up what `measure` would find on a link of 1 Gbit/s between nodes of so many ranks."""
    timed = [Timed(kind, nbytes, 1e-4 + nbytes * 8e-9) for kind in COLLECTIVES for nbytes in (2**12, 2**20)]
    found = Measured(ranks // local, tuple(timed), (Message((0, 1), 1e-5, 1e9),))
    nodes = tuple(rank // local for rank in range(ranks))
    return Checkup(("host",) * ranks, nodes, found, found if local > 1 else None, (1.0,) * ranks)


def measuring(group: dist.ProcessGroup, local: int = 1) -> Any:
    """Have a doctor take this for what it measured."""
    found = found_on(group.size(), local)
    return mock.patch("gradlab.training.doctor.measure", autospec=True, return_value=found)


AFTER = ("compress", "TraceRecorder")


def around_steps(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """Train with and without a doctor's block in the middle, plainly after it, then with a recorder or compression."""
    out, text, reports = Path(folder), io.StringIO(), []
    with measuring(group), redirect_stdout(text):
        equal = {
            after: _ended(group, folder, after, out / f"{after}.json", reports)
            == _ended(group, folder, after, None, reports)
            for after in AFTER
        }
    rate, lines = read_link(out / "compress.json").bits_per_second, text.getvalue().splitlines()
    return {"equal": equal, "summary": reports[0].summary(), "rate": rate, "lines": lines[: len(lines) // 2]}


def _ended(
    group: dist.ProcessGroup, folder: str, after: str, out: Path | None, reports: list[Any]
) -> list[list[float]]:
    """Return the parameters after a training, and append what a doctor with `out` found."""
    training = Training(group)
    attached: Any
    training.steps(2)
    with gradlab.doctor(training.model, out) if out else nullcontext() as report:
        training.steps(4)
    reports.append(report)
    dist.barrier(group)
    training.steps(1)
    if after == "compress":
        plan = Plan.uniform(training.model, "topk", density=0.1)
        attached = gradlab.compress(training.model, plan, optimizer=training.optimizer)
    else:
        attached = TraceRecorder(training.model, Path(folder) / f"trace of {out is not None}")
    with attached:
        training.steps(2)
    return training.parameters()


def around_sharded_steps(group: dist.ProcessGroup, way: str) -> dict[str, Any]:
    """Train under FSDP2 with and without a doctor's block in the middle, then plainly, then compressed.

    way: "all": shards on all ranks; "nodes": native HSDP between nodes of two; "parts": tensor parallelism in nodes.
    """
    text, ended, report = io.StringIO(), [], None
    with measuring(group, {"all": 1, "nodes": 2, "parts": 2}[way]), redirect_stdout(text):
        for measured in (True, False):
            model = _sharded_model(group, way)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            _sharded_steps(model, optimizer, way, 1)
            with gradlab.doctor(model) if measured else nullcontext() as made:
                _sharded_steps(model, optimizer, way, 4)
            report = made if measured else report
            _sharded_steps(model, optimizer, way, 1)
            options = {"within": DeviceMesh.from_group(group, "cpu")} if way == "all" else {}
            with compress_fsdp(model, Plan(layers_of(model)), optimizer=optimizer, **options):  # type: ignore[arg-type]
                _sharded_steps(model, optimizer, way, 1)
            ended.append([parameter.to_local().tolist() for parameter in model.parameters()])
    assert report is not None
    return {"equal": ended[0] == ended[1], "summary": report.summary(), "lines": text.getvalue().splitlines()}


def _sharded_model(group: dist.ProcessGroup, way: str) -> Any:
    if way == "parts":
        return tensor_parallel_tasks.cut(tensor_parallel_tasks.mesh_of(group))
    mesh = fsdp_tasks.mesh_of(group, 1 if way == "all" else 2)
    return fsdp_tasks.sharded(mesh["shard"] if way == "all" else mesh)


def _sharded_steps(model: Any, optimizer: torch.optim.Optimizer, way: str, count: int) -> None:
    """Steps of two micro-batches, after the second of which gradients are reduced."""
    for step in range(count):
        optimizer.zero_grad()
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            if way == "parts":
                tensor_parallel_tasks.backward(model, dist.get_rank(), step)
            else:
                model(torch.arange(step + dist.get_rank(), step + dist.get_rank() + 6)).square().mean().backward()
        optimizer.step()


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """Return what is said where nothing can be measured, and whether training goes on as in plain DDP."""
    hooked, plain, training = Training(group), Training(group), Training(group)
    hooked.model.register_comm_hook(None, fp16_compress_hook)
    sharded = fully_shard(nn.Linear(8, 8), mesh=DeviceMesh.from_group(group, "cpu"))
    sharded.set_all_reduce_hook(print)
    models = {"hooked": hooked.model, "bare": nn.Linear(2, 2), "sharded": sharded}
    said, text = {name: _refusal(model) for name, model in models.items()}, io.StringIO()
    with measuring(group), redirect_stdout(text):
        with gradlab.doctor(training.model) as report:
            said |= {"early": _raised(report.summary), "twice": _refusal(training.model)}
        torch.manual_seed(dist.get_rank(group))
        with suppress(KeyError), gradlab.doctor(training.model):
            training.steps(2)
            raise KeyError("batch")
        training.steps(2)
    torch.manual_seed(dist.get_rank(group))
    plain.steps(4)
    return {**said, "printed": text.getvalue(), "equal": str(training.parameters() == plain.parameters())}


@mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="1")
def alone(group: dist.ProcessGroup) -> str:
    """Return what one rank hears."""
    return _refusal(Training(group).model)


def _refusal(model: object) -> str:
    return _raised(lambda: gradlab.doctor(model))


def _raised(call: Any) -> str:
    try:
        call()
    except GradlabError as error:
        return str(error)
    return "nothing"
