"""Processor time that a plan of many groups takes: to make, to forecast, and to report on.

    python benchmarks/plan_scale.py [groups ...]

Each should grow in proportion to the number of groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import process_time
from typing import Any

from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.runtime.engine.statistics import StepRecord
from gradlab.runtime.run_report import codec_rows, layer_rows, residual_statement

GROUPS = (250, 1000, 4000)
STEPS = 20  # measured steps that are reported on


def record(plan: Plan) -> StepRecord:
    """A measured step of every group."""
    names = [group.name for group in plan.groups]
    return StepRecord(
        step=0,
        compressing=True,
        group_payload_bytes=dict.fromkeys(names, 100),
        group_seconds=dict.fromkeys(names, (1e-4, 1e-4)),
        errors=dict.fromkeys(names, (1.0, 2.0)),
        residual_norms=dict.fromkeys(names, 1.0),
    )


def report(plan: Plan, steps: list[StepRecord]) -> list[dict[str, Any]]:
    """What grows with the groups in `CompressionState.report()`."""
    residual_statement(plan, None)
    plan.payload_bytes(8)
    return codec_rows(layer_rows(plan, steps))


def seconds(work: Callable[[], Any]) -> float:
    begin = process_time()
    work()
    return process_time() - begin


def main() -> None:
    print(f"{'groups':>8} {'uniform':>10} {'payload':>10} {'report':>10}   seconds of one processor")
    warm = Plan.uniform([Layer("warm.weight", (32, 32), "linear")], "topk")  # imports what is imported at first use
    report(warm, [record(warm)])
    for groups in map(int, sys.argv[1:] or GROUPS):
        layers = [Layer(f"layer{n}.weight", (32, 32), "linear") for n in range(groups)]
        made: list[Plan] = []
        times = [seconds(lambda: made.append(Plan.uniform(layers, "topk", density=0.05)))]  # noqa: B023
        [plan] = made
        times.append(seconds(lambda: plan.payload_bytes(8)))  # noqa: B023
        steps = [record(plan)] * STEPS
        times.append(seconds(lambda: report(plan, steps)))  # noqa: B023
        print(f"{groups:8} " + " ".join(f"{time:10.3f}" for time in times))


if __name__ == "__main__":
    main()
