"""All runs of a pilot: plain DDP, 16 bits, and each plan, judged by their losses beside those of plain DDP."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gradlab.errors import GradlabError
from gradlab.plan import Plan, saving_of_sent
from gradlab.runtime.pilot.growth import chance_of
from gradlab.runtime.pilot.result import (
    LEAST_STEPS,
    Outcome,
    PilotResult,
    in_order,
    is_decided,
    looks,
    may_hold,
    outcome_of,
)
from gradlab.trial import Losses, TrialSettings
from gradlab.trial.run import LOG, Ended, run_trial

DENSE, AGAIN, HALF = "plain DDP", "plain DDP again", "16 bits"
_IN_LOOP = ("snapshot_bytes", "batch_bytes", "unlike")  # of a pilot in the training loop alone
_KEEP = 3  # plans that are to hold; those that send more are not tried
_PATIENCE = 10  # a run that takes longer than plain DDP's by this factor hangs
_STARTING = 60.0  # seconds that a run may take beyond that


@dataclass(frozen=True)
class Tried:
    """The result of all runs.

    failed: why plans have no outcome, by name.
    noise: two runs of plain DDP beside each other, where the runs did not begin alike; None: they did.
    start: dense steps that each run began with.
    """

    result: PilotResult
    failed: Mapping[str, str]
    noise: Outcome | None
    start: int
    ranks: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        noise = None if self.noise is None else self.noise.to_json()
        more = {"failed": dict(self.failed), "same_batches": noise is None, "noise": noise}
        more |= {"seconds": self.seconds, "dense_steps_before": self.start, "ranks": self.ranks}
        return {key: value for key, value in self.result.to_json().items() if key not in _IN_LOOP} | more

    def __str__(self) -> str:
        lines = [str(self.result), *(f"  {name}: out; {why}" for name, why in self.failed.items())]
        if self.noise is not None:
            one = self.noise
            lines.append(
                f"runs differ before any compression: batches, or the order of sums, are not the same in each run. Two "
                f"runs of plain DDP ended {one.excess:+.2%} ({one.low:+.2%} to {one.high:+.2%}) apart; smaller "
                "differences between plans are chance"
            )
        return "\n".join(lines)


@dataclass
class Trials:
    """The runs of one pilot, in folders of `work`: `start` dense steps, then `steps` compressed ones.

    until: time on `time.monotonic` at which all has to be over; None: never.
    say: receives a line on each run, which begins with the seconds since the first.
    """

    command: Sequence[str]
    work: Path
    steps: int
    start: int
    max_loss: float
    until: float | None = None
    say: Callable[[str], None] = lambda line: None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _found: list[Outcome] = field(default_factory=list)
    _failed: dict[str, str] = field(default_factory=dict)
    _late: list[str] = field(default_factory=list)
    _count: int = 0
    _runs: int = 0
    _dense: Losses = field(default_factory=Losses)
    _dense_seconds: float = 0.0
    _differ: bool = False

    def try_plans(self, plans: Mapping[str, Plan], refused: Mapping[str, str]) -> Tried:
        """Run the command for plain DDP, for 16 bits, and for each plan. refused: why others are not tried."""
        dense = Plan(next(iter(plans.values())).layers, ())
        half = Plan.uniform(dense.layers, "cast", dtype="bfloat16", minimum_dimensions=0, minimum_numel=1)
        self.plans = {HALF: half, **plans}
        self._runs = len(plans) + 2
        self._run_dense(dense)
        self._failed |= refused
        order = [HALF, *in_order({name: saving_of_sent(plan, self._ranks) for name, plan in plans.items()})]
        while order and not self._decided:
            self._try(order.pop(0))
        noise = self._noise(dense) if self._differ else None
        ranked = in_order({one.name: one.saving for one in self._found})
        outcomes = sorted(self._found, key=lambda one: ranked.index(one.name))
        result = PilotResult(tuple(outcomes), self.max_loss, tuple(self._late), tuple(order))
        return Tried(result, self._failed, noise, self.start, self._ranks, time.monotonic() - self.began)

    def begun_late(self, plan: Plan) -> Plan:
        """Return a plan that compresses from where pilots judge it."""
        return replace(plan, schedule=replace(plan.schedule, warmup_steps=self.start))

    # --- runs ---

    def _try(self, name: str) -> None:
        """Run the command under a plan, and note what came."""
        plan = self.plans[name]
        ended = None if self._over else self._run(name, plan, partial(self._is_enough, name, plan))
        if ended is None or (ended.problem is not None and self._over):
            self._late.append(name)
        elif why := self._failure(ended):
            self._failed[name] = why
            self._say(f"{name}: out; {why}")
        else:
            self._found.append(self._outcome(name, plan, ended.losses))
            self._differ |= not self._begins_alike(ended.losses)
            self._say(self._found[-1].line())

    def _run(self, name: str, plan: Plan, watch: Any = lambda losses: False) -> Ended:
        self._count += 1
        self._say(f"run {self._count} of {self._runs}, {name}")
        patience = time.monotonic() + _PATIENCE * self._dense_seconds + _STARTING if self._dense_seconds else None
        ends = [one for one in (self.until, patience) if one is not None]
        settings = TrialSettings(self.begun_late(plan), self.start + self.steps)
        return run_trial(self.command, self.work / f"run-{self._count:02d}", settings, watch, min(ends, default=None))

    def _run_dense(self, dense: Plan) -> None:
        ended = self._run(DENSE, dense)
        steps, least = ended.losses.steps, self.start + LEAST_STEPS
        words = " ".join(self.command)
        if ended.problem is not None:
            place = self.work / "run-01" / LOG
            raise GradlabError(f"{words}: plain DDP's run failed: {ended.problem}; the end of {place}:\n{ended.output}")
        if not ended.losses.by_rank:
            raise GradlabError(
                f"{words}: no line of gradlab ran in it, so plans cannot be tried; the script needs a TraceRecorder, "
                "gradlab.compress, compress_fsdp, OuterStep or EmulatedNodes on its model"
            )
        if ended.losses.exchanging < 2:
            raise GradlabError(f"{words}: one rank, which exchanges nothing; start two or more")
        if self._is_broken(ended.losses):
            raise GradlabError(
                f"{words}: the loss of plain DDP is not finite, so that plans cannot be compared with it"
            )
        if steps < least:
            raise GradlabError(
                f"{words}: trained {steps} steps, a pilot needs {least} or more: {self.start} (--start) of them dense"
            )
        if steps < self.start + self.steps:
            self._say(f"the script ends after {steps} steps, so the pilot is as long")
        self._dense, self._dense_seconds = ended.losses, ended.seconds
        left = (self._runs - 1) * ended.seconds
        self._say(f"plain DDP took {ended.seconds:.0f} s; {self._runs - 1} more runs, about {left:.0f} s at most")

    def _noise(self, dense: Plan) -> Outcome | None:
        """Compare two runs of plain DDP."""
        self._runs += 1
        ended = self._run(AGAIN, dense)
        if self._failure(ended):
            return outcome_of(AGAIN, [math.nan], [math.nan], saving_of_sent(dense, self._ranks))
        return self._outcome(AGAIN, dense, ended.losses)

    # --- judgement ---

    @property
    def _decided(self) -> bool:
        plans = (one for one in self._found if one.name != HALF)
        return is_decided(plans, self._steps, self.max_loss, _KEEP)

    @property
    def _ranks(self) -> int:
        return self._dense.exchanging

    @property
    def _steps(self) -> int:
        """Compressed steps of each run: the script may end earlier than it should."""
        return min(self.steps, self._dense.steps - self.start)

    @property
    def _over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def _outcome(self, name: str, plan: Plan, losses: Losses) -> Outcome:
        steps = slice(self.start, min(losses.steps, self._dense.steps))
        saving = saving_of_sent(plan, self._ranks)
        control = next((chance_of(one.low, one.high) for one in self._found if one.name == HALF), 0.0)
        return outcome_of(name, losses.means[steps], self._dense.means[steps], saving, control)

    def _is_enough(self, name: str, plan: Plan, losses: Losses) -> bool:
        """Whether a plan is clearly beyond the limit, or broken, before its run is over."""
        early = looks(self._steps, self._steps)[0]
        if self._is_broken(losses) or losses.steps - self.start < early:
            return self._is_broken(losses)
        return name != HALF and not may_hold(self._outcome(name, plan, losses), self.max_loss)

    def _is_broken(self, losses: Losses) -> bool:
        return any(map(math.isnan, losses.means))

    def _failure(self, ended: Ended) -> str:
        """Say why a run has no outcome; empty: it has one."""
        if ended.problem is not None:
            return ended.problem
        if len(ended.losses.by_rank) != len(self._dense.by_rank):
            return f"{len(ended.losses.by_rank)} ranks, plain DDP had {len(self._dense.by_rank)}"
        steps = min(ended.losses.steps, self._dense.steps)
        if steps < self.start + LEAST_STEPS and not self._is_broken(ended.losses):
            return f"trained {steps} steps, expected {self.start + LEAST_STEPS} or more"
        return ""

    def _begins_alike(self, losses: Losses) -> bool:
        """Whether all losses before the first compressed step are plain DDP's, bit for bit."""
        steps = max(1, self.start)
        return losses.first(steps) == self._dense.first(steps)

    def _say(self, line: str) -> None:
        self.say(f"{time.monotonic() - self.began:.0f} s: {line}")
