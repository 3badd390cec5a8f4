"""Processor time that a plan of many groups takes: to make, to forecast, and to report on.

    python benchmarks/plan_scale.py [groups ...]

Each should grow in proportion to the number of groups. What is reported on are real steps, of one rank.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from time import process_time
from typing import TypeVar

import torch
import torch.distributed as dist

from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.runtime import Exchange

GROUPS = (250, 1000, 4000)
STEPS = 5  # measured steps that are reported on
SHAPE = (32, 32)
Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds of one processor, and the result."""
    begin = process_time()
    result = work()
    return process_time() - begin, result


def times(groups: int) -> list[float]:
    """Of `Plan.uniform`, `payload_bytes` and `report`, for a plan of so many groups."""
    layers = [Layer(f"layer{n}.weight", SHAPE, "linear") for n in range(groups)]
    making, plan = timed(lambda: Plan.uniform(layers, "topk", density=0.05))
    forecasting, _ = timed(lambda: plan.payload_bytes(8))
    parameters = {layer.name: torch.zeros(SHAPE, requires_grad=True) for layer in layers}
    with Exchange(plan, parameters.items(), measure_every=1) as exchange:
        for _ in range(STEPS):
            exchange.step({name: torch.randn(SHAPE) for name in parameters})
        reporting, _ = timed(exchange.report)
    return [making, forecasting, reporting]


def main() -> None:
    """Print the table for the numbers of groups on the command line."""
    warnings.filterwarnings("ignore", message="gradlab: world size 1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    times(2)  # imports what is imported at first use
    print(f"{'groups':>8} {'uniform':>10} {'payload':>10} {'report':>10}   seconds of one processor")
    for groups in map(int, sys.argv[1:] or GROUPS):
        print(f"{groups:8d} " + " ".join(f"{seconds:10.3f}" for seconds in times(groups)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
