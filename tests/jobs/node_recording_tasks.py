"""Tasks for real ranks that record what travels between nodes, under DDP and under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import TraceRecorder
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.runtime import CompressionState, compression_hook
from gradlab.runtime.shard_times import ShardTimes
from jobs.fsdp_tasks import Network, backward, in_pieces, local_gradients, mesh_of, sharded

STEPS = 8  # of which three have to be timed, on a machine that others may keep busy
UNUSED_AT, PARTLY_AT = 1, 2  # steps: a block that no rank uses; one that the first rank alone leaves out


def _blocks(step: int, rank: int, partly: bool) -> int:
    if step == UNUSED_AT or (partly and step == PARTLY_AT and rank == 0):
        return 2
    return 3


def _in_ddp(group: dist.ProcessGroup) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Network(), process_group=group, bucket_cap_mb=0.01, find_unused_parameters=True)


def _train(model: Any, rank: int, recorder: TraceRecorder | None, partly: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, rank, step, blocks=_blocks(step, rank, partly))
        if recorder is not None:
            recorder.annotate(loss=float(rank))
        optimizer.step()


def under_ddp(group: dist.ProcessGroup, nodes: int, folder: str) -> dict[str, Any]:
    """The same training three times: not recorded, of every rank, and of nodes. Whether parameters are the same."""
    rank, mesh = dist.get_rank(group), mesh_of(group, nodes)
    parameters, reports = [], []
    for name, within in (("", None), ("ranks", None), ("nodes", mesh["shard"])):
        model = _in_ddp(group)
        recorder = TraceRecorder(model, Path(folder) / name, within=within) if name else None
        _train(model, rank, recorder, partly=True)
        if recorder is not None:
            reports.append(recorder.close())
            backward(model, rank, STEPS)  # after close it averages on
        parameters.append([parameter.detach().clone() for parameter in model.parameters()])
    dist.barrier(group)
    same = all(
        torch.equal(one, other) for trained in parameters for one, other in zip(parameters[0], trained, strict=True)
    )
    return {"same": same, "written": [report.steps_written for report in reports]}


def under_fsdp(group: dist.ProcessGroup, nodes: int, folder: str, divide: float | None) -> dict[str, Any]:
    """The same training under FSDP2, and in DDP with the same order of sums; and native HSDP's parameters.

    divide: the number of ranks, if FSDP is to divide a sum by it.
    """
    rank, mesh = dist.get_rank(group), mesh_of(group, nodes)
    model = _in_ddp(group)
    state = CompressionState(Plan(layers_of(model)), model, within=mesh["shard"])
    recorder = TraceRecorder(model, Path(folder) / "ddp", within=mesh["shard"], wrap=(state, compression_hook))
    _train(model, rank, recorder, partly=False)
    recorder.close()
    state.close()
    native, ours = sharded(mesh, divide=divide), sharded(mesh, divide=divide)
    _train(native, rank, None, partly=False)
    with TraceRecorder(ours, Path(folder) / "fsdp", every=1) as recorder:  # under native HSDP, too
        _train(ours, rank, recorder, partly=False)
    pairs = zip(native.parameters(), ours.parameters(), strict=True)
    same = all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)
    before = local_gradients(ours)
    backward(ours, rank, STEPS)
    dist.barrier(group)
    return {"same": same, "goes_on": bool(before)}


def of_pieces(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """Training with a loss that is taken in pieces, timed by a doctor and then recorded, and native HSDP's: the last
    step's gradients, and the steps that the doctor saw."""
    rank, mesh = dist.get_rank(group), mesh_of(group, 2)
    native, ours = sharded(mesh, ends=1), sharded(mesh, ends=1)
    seen = ShardTimes(ours, "test")
    seen.start()
    for step in range(4):
        if step == 2:
            seen.stop()
            recorder = TraceRecorder(ours, Path(folder) / "pieces", every=1)
        for model in (native, ours):
            model.zero_grad()
            in_pieces(model, rank, step)
    recorder.close()
    both = zip(native.parameters(), ours.parameters(), strict=True)
    pairs = [(one.grad.to_local(), other.grad.to_local()) for one, other in both]
    gradients = {name: parameter.grad.full_tensor().tolist() for name, parameter in native.named_parameters()}
    return {"same": all(torch.equal(*pair) for pair in pairs), "seen": len(seen.rows()), "gradients": gradients}


def refusals(group: dist.ProcessGroup, folder: str) -> dict[str, str]:
    """What a recorder says of what does not fit, on this rank."""
    mesh, path = mesh_of(group, 2), Path(folder) / "none"
    hooked = sharded(mesh["shard"])
    first = TraceRecorder(hooked, Path(folder) / "first", between=mesh["replicate"])
    attempts = {
        "no between": lambda: TraceRecorder(sharded(mesh["shard"]), path),
        "wrap": lambda: TraceRecorder(
            sharded(mesh["shard"]), path, between=mesh["replicate"], wrap=(None, compression_hook)
        ),
        "native": lambda: TraceRecorder(sharded(mesh), path, between=mesh["shard"]),
        "hooked": lambda: TraceRecorder(hooked, path, between=mesh["replicate"]),
        "between in DDP": lambda: TraceRecorder(_in_ddp(group), path, between=mesh["replicate"]),
        "whole group": lambda: TraceRecorder(_in_ddp(group), path, within=3),
        "bare": lambda: TraceRecorder(nn.Linear(2, 2), path),  # type: ignore[arg-type]
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = ""
        except GradlabError as error:
            said[name] = str(error)
    first.close()
    return {**said, "written": str(path.exists())}
