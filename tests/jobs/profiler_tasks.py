"""Tasks for real ranks: trainings under torch.profiler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from gradlab.plan import Plan
from jobs.ddp_tasks import train

STEPS = 3


def ranges(group: dist.ProcessGroup, all_threads: bool) -> dict[str, Any]:
    """Gradlab's ranges by name in a trace of a compressed run, and whether it trained as one without a profiler."""
    plain = train(group, STEPS, _plan)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
        watched = train(group, STEPS, _plan)
    names = Counter(event.name for event in seen.events() if event.name.startswith("gradlab::"))
    return {
        "names": dict(names),
        "equal": torch.equal(plain["parameters"], watched["parameters"]),
        "buckets": watched["buckets"],
        "groups": len(watched["state"].run.groups),
    }


def _plan(model: torch.nn.Module) -> Plan:
    return Plan.uniform(model, "powersgd", rank=2)


def plain_trace(group: dist.ProcessGroup, path: str) -> int:
    """Write the trace of some steps of a plain training, on rank 0; return the number of its parameters."""
    inner = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    model = DistributedDataParallel(inner, process_group=group, bucket_cap_mb=0.5)
    when = schedule(wait=2, warmup=1, active=STEPS)  # buckets are made anew after the first step
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=when) as seen:
        for _ in range(3 + STEPS):
            model(torch.ones(8, 256)).square().mean().backward()
            seen.step()
    if dist.get_rank(group) == 0:
        seen.export_chrome_trace(path)
    return sum(parameter.numel() for parameter in model.parameters())
