"""Tasks for real ranks: L-GreCo's plan, fitted to what DDP recorded of a model, at work between nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.artifact import Artifact
from gradlab.capture import TraceRecorder
from gradlab.trace import Trace
from jobs.fsdp_tasks import Network, backward
from jobs.node_tasks import attached

REFERENCES: dict[str, dict[str, Any]] = {"powersgd": {"rank": 4}, "topk": {"density": 0.05}}
STEPS = 16


def fitted(group: dist.ProcessGroup, local_ranks: int, folder: str) -> dict[str, list[str]]:
    """Record plain DDP and fit a plan of each codec to the means of nodes, into `folder`/<codec>.safetensors.

    The settings that layers have, by codec.
    """
    model = _parallel(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with TraceRecorder(model, Path(folder) / "trace", optimizer=optimizer):
        for step in range(STEPS):
            _step(model, optimizer, dist.get_rank(group), step)
    dist.barrier(group)
    settings = {}
    if dist.get_rank(group) == 0:
        with Trace(Path(folder) / "trace", average_ranks=local_ranks) as trace:
            for codec, reference in REFERENCES.items():
                fit = fit_lgreco(trace, codec, reference)
                fit.artifact().save(Path(folder) / f"{codec}.safetensors")
                settings[codec] = [str(dict(one.settings)) for one in fit.plan.compressed_groups]
    dist.barrier(group)
    return settings


def between_nodes(group: dist.ProcessGroup, local_ranks: int, path: str) -> dict[str, Any]:
    """Six steps under hierarchical DDP: bytes counted and forecast, and whether all ranks have the same parameters."""
    model = _parallel(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = attached(group, model, Artifact.load(path).plan, local_ranks, optimizer=optimizer)
    for step in range(6):
        _step(model, optimizer, dist.get_rank(group), step)
    report, counted = state.report(), state.statistics.steps[-1].payload_bytes
    state.close()
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(everyone, values, group=group)
    return {
        "counted": counted,
        "forecast": report["forecast_payload_bytes"],
        "agree": all(torch.equal(one, values) for one in everyone),
        "finite": bool(values.isfinite().all()),
    }


def _parallel(group: dist.ProcessGroup) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Network(), process_group=group, bucket_cap_mb=0.005)


def _step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    backward(model, rank, step)
    optimizer.step()
