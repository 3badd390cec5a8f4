"""Tasks for real ranks: trainings under torch.profiler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

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
