"""Read what a pilot was given."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from gradlab.ddp.groups import Ranks
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime.pilot.result import LEAST_STEPS

DENSE = "dense"
_LEAST_EXCHANGES = 4  # outer steps that say something of a plan


def seconds_of(budget: float | str | None) -> float:
    """Read a duration; infinite for None.

    >>> seconds_of("5min")
    300.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)?", str(budget).strip())
    if budget is not None and not found:
        raise GradlabError(f"budget = {budget!r}, expected seconds, or a text such as '90s', '5min' or '1h'")
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2] or "s"] if found else math.inf


def longest_of(steps: Any, longer: Any, keep: Any) -> int:
    """Return the steps of the longest round: `longer`, or twice `steps`; refuse numbers that make no pilot."""
    longest = 2 * steps if longer is None else longer
    for name, value, least, why in (
        ("steps", steps, LEAST_STEPS, ": fewer say nothing of a plan"),
        ("longer", longest, steps, ", as steps"),
        ("keep", keep, 1, ""),
    ):
        if type(value) is not int or value < least:
            raise GradlabError(f"{name} = {value!r}, expected {least} or more{why}")
    return int(longest)


def control_of(gradients: Any) -> tuple[str, Plan]:
    """Return a plan that hardly changes gradients, which shows how much of a difference is chance, with its name."""
    name, codec, dtype = ("8 bits", "block_scaled", "int8") if gradients.alone else ("16 bits", "cast", "bfloat16")
    return name, Plan.uniform(
        gradients.layers,
        codec,
        dtype=dtype,
        warmup_steps=0,
        minimum_dimensions=0,
        minimum_numel=1,
        group_bytes=gradients.group_bytes,
    )


def checked_plans(plans: Any, control: str, exchanges: int) -> dict[str, Plan]:
    """Return the plans as a dict of its own; refuse plans that a pilot of so many steps would judge falsely."""
    if not isinstance(plans, Mapping) or not plans:
        raise GradlabError(f"plans is {type(plans).__name__}, expected a dict of plans by name")
    for name, plan in plans.items():
        if not isinstance(plan, Plan):
            raise GradlabError(f"plans[{name!r}] is {type(plan).__name__}, expected a Plan")
        if name in (DENSE, control):
            raise GradlabError(f"plans[{name!r}]: a pilot has one of that name; choose another name")
        if plan.schedule.warmup_steps > exchanges // 2:
            raise GradlabError(
                f"plans[{name!r}] compresses from step {plan.schedule.warmup_steps} on, and a pilot of {exchanges} "
                "steps would judge it by dense ones; give it warmup_steps=0, or the pilot more steps"
            )
    return dict(plans)


def gradients_of(model: object, outer: Any, options: dict[str, Any]) -> Any:
    """Return how a model's ranks exchange gradients: one of `runtime.pilot.gradients`."""
    from gradlab.ddp.model import without_compile
    from gradlab.ddp.sharded_units import sharded_modules
    from gradlab.runtime.outer.step import OuterStep
    from gradlab.runtime.pilot import gradients

    if outer is not None:
        if not isinstance(outer, OuterStep):
            raise GradlabError(f"outer is {type(outer).__name__}, expected the OuterStep that the loop calls")
        return gradients.OuterGradients(model, outer, options)
    if sharded_modules(without_compile(model)):
        return gradients.FSDPGradients(model, options)
    return gradients.DDPGradients(model, options)


def exchanges_in(steps: int, every: int) -> int:
    """Return how many exchanges a pilot has, with one every so many steps; refuse too few."""
    if steps // every < _LEAST_EXCHANGES:
        raise GradlabError(
            f"steps = {steps} are {steps // every} outer steps, expected {_LEAST_EXCHANGES} or more: give "
            f"steps={_LEAST_EXCHANGES * every}"
        )
    return steps // every


class Together:
    """All ranks of a pilot.

    seconds: since the pilot began (by `time.monotonic`), of the slowest rank, when ranks last spoke.
    names: what messages call the ranks.
    """

    def __init__(self, ranks: Ranks, began: float) -> None:
        self._ranks, self._began, self.names = ranks, began, ranks.names
        self.seconds = 0.0

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Gather plain JSON from all ranks; raise on all of them, if one has a "problem"."""
        every = self._ranks.gather({"seconds": time.monotonic() - self._began, **own})
        self.seconds = max(one["seconds"] for one in every)
        problems = [one.get("problem") for one in every]
        for rank, problem in zip(self.names, problems, strict=True):
            if problem is not None:
                raise GradlabError(problem if len(set(problems)) == 1 else f"rank {rank}: {problem}")
        return every

    def say(self, line: str) -> None:
        """Print a line with the time, on the first rank."""
        if self._ranks.rank == 0:
            seconds = time.monotonic() - self._began
            print(f"gradlab pilot, {seconds:.0f} s: {line}", file=sys.stderr, flush=True)
