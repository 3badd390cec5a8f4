"""Watch a run by the rules of `gradlab.executor.rules`: each is told once, on rank 0, or ends the run on all ranks.

A rank looks at its own measured steps. Its findings wait for the next step, whose agreement on finite gradients also
carries in the same four bytes whether any rank found something. If one did, the ranks gather their findings between
the steps. So a run without findings sends nothing more, N ranks give one warning, and an error is raised by all of them
after the same step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradlab import version
from gradlab.ddp.agreement import Ranks
from gradlab.ddp.optimizers import HeldLayers
from gradlab.errors import GradlabError
from gradlab.executor import PlanRun, rules
from gradlab.executor.rules import Finding
from gradlab.executor.sent import error_over_ranks, mean_error
from gradlab.executor.watch import GroupMeasures, RankWatch
from gradlab.plan.optimizer_rules import compressed_layers, conflict_of
from gradlab.runtime.engine.options import RunOptions
from gradlab.runtime.engine.statistics import StepRecord
from gradlab.runtime.network.communicator import Communicator


class RuleWatch:
    """Rules that watch one rank's run.

    told: findings of any rank that all ranks have.
    pending: findings of this rank that the others do not have yet.
    """

    def __init__(self, run: PlanRun, options: RunOptions, everyone: Communicator) -> None:
        self._everyone = everyone
        self.told: list[Finding] = []
        self.pending: list[Finding] = []
        self._run = run
        self._levels = rules.levels(options.rules)
        self._scaled = options.scaled
        self._known: set[tuple[str, str | None]] = set()
        self._muted: dict[tuple[str, str | None], int] = {}  # until which step, as the other ranks did not see it
        self._warned: set[str] = set()
        watched = [rule for rule, level in self._levels.items() if level != "ignore"]
        self._watch = RankWatch(run.plan, run.codecs, run.settings.plain_sgd, watched)
        # Under momentum or a preconditioner kept residuals were measured to do no harm (`residual_statement`).
        keeping = self._watch.feedback.items()
        kept = [name for name, feedback in keeping if run.settings.plain_sgd and not feedback.follows]
        self._kept = tuple(layer for name in kept for layer in run.groups[name].layers)
        self._ratio: float | None = None  # largest residual norm over gradient norm, of groups that keep theirs
        self._rates: Mapping[str, float] = {}
        self._largest_rate = 0.0

    # --- what a rank sees ---

    def see_groups(self, held: HeldLayers) -> None:
        """Look at parameter groups that were added to an optimizer; refuse those that apply what the plan applies."""
        plan, settings = self._run.plan, held.settings()
        if settings and (conflict := conflict_of(plan, settings)):
            raise GradlabError(f"a parameter group was added: {conflict}")
        following = any(feedback.follows for feedback in self._watch.feedback.values())
        if following and not held.plain_sgd(compressed_layers(plan)):
            seen = f"residuals follow the learning rate, and a parameter group was added, of {settings}"
            self._find(rules.finding("rates_followed", seen, 1, 0, step=self._run.iteration))

    def see_rates(self, now: Mapping[str, float]) -> None:
        """Look at a step's learning rates, by layer name."""
        before, self._rates = self._rates, now
        if not self._kept or not now or now == before:
            return
        self._largest_rate = max(self._largest_rate, *now.values())
        if before:
            old, new = ([rates.get(layer, 0.0) for layer in self._kept] for rates in (before, now))
            factor = rules.rate_change(old, new, self._largest_rate)
            self._find(rules.rates_change(self._run.iteration, factor, self._ratio))

    def see_step(self, record: StepRecord, measured: Mapping[str, GroupMeasures]) -> None:
        """Look at a step; measured: by group, empty in a step that was not."""
        if not record.finite or not measured:
            return
        steps = record.step - self._run.plan.schedule.warmup_steps + 1
        for one in self._watch.see(record.step, steps, measured, self._rates):
            self._find(one)
        kept = [
            measured[name]
            for name, feedback in self._watch.feedback.items()
            if name in measured and not feedback.follows
        ]
        self._ratio = max([0.0, *(one.residual / one.gradient for one in kept if one.gradient > 0)])

    def add(self, found: Sequence[Finding]) -> bool:
        """Take in what was found elsewhere in the step. Returns whether anything has yet to be told."""
        for one in found:
            self._find(one)
        return bool(self.pending)

    def _find(self, one: Finding | None) -> None:
        if one is None or self._level(one) == "ignore" or (one.step or 0) < self._muted.get(one.key, 0):
            return
        if one.key not in self._known:
            self._known.add(one.key)
            self.pending.append(one)

    def _level(self, one: Finding) -> str:
        return self._levels[one.rule]

    # --- what ranks tell each other ---

    def settle(self, record: StepRecord, noticed: bool, in_a_row: int) -> None:
        """End a step: gather what ranks found, if any did (`noticed`); warn once, or raise the same everywhere."""
        now = None if record.finite else self._non_finite(record, in_a_row)
        overflows = self._overflows()
        if not noticed and now is None and not overflows:
            return
        if overflows and (one := rules.state_overflows(record.step, overflows, self._run.largest_state())) is not None:
            self.pending.append(one)
        if now is not None and record.non_finite_layers:
            self.pending.append(now)
        own = {"found": [one.to_json() for one in self.pending], "means": self._watch.means}
        gathered = self._everyone.ranks.gather(own)
        self.pending = []
        merged = rules.merged([[Finding.from_json(one) for one in of_rank["found"]] for of_rank in gathered])
        confirmed = [self._confirmed(one, [of_rank["means"] for of_rank in gathered]) for one in merged]
        found = [one for one in confirmed if one is not None]
        if now is not None and all(one.rule != now.rule for one in found):
            found.append(now)  # the same on all ranks: none of them had named a layer
        self.tell(found)

    def _confirmed(self, one: Finding, means: Sequence[Mapping[str, Any]]) -> Finding | None:
        """Decide from all ranks' answers on a rank's finding; each knows a part (`error_over_ranks`).

        A suspicion that they do not share may come again after twice as many steps.
        """
        if one.rule != "mean_error" or one.group is None:
            return one
        known = {rank: of_rank[one.group] for rank, of_rank in enumerate(means) if one.group in of_rank}
        joint = mean_error(one.group, one.step, error_over_ranks(list(known.values())))
        if joint is None:
            self._known.discard(one.key)
            self._muted[one.key] = 2 * (one.step or 0)
            return None
        return replace(joint, ranks=tuple(known))

    def _non_finite(self, record: StepRecord, in_a_row: int) -> Finding | None:
        """This rank's finding on a step that was not finite. All ranks say it in the same step."""
        one = rules.non_finite(record.step, in_a_row, self._scaled, record.non_finite_layers)
        return None if one is None or self._level(one) == "ignore" or one.key in self._known else one

    def _overflows(self) -> int:
        """Steps in a row in which states made results infinite, if that is to be told now; the same on all ranks."""
        known = ("state_overflows", None) in self._known or self._levels["state_overflows"] == "ignore"
        return 0 if known or self._run.overflows < rules.OVERFLOWS else self._run.overflows

    def tell(self, findings: Sequence[Finding]) -> None:
        """Warn of findings, the same on all ranks, on rank 0 and once by rule; raise those that are errors."""
        fresh = [one for one in findings if self._level(one) != "ignore" and one.key not in {o.key for o in self.told}]
        self.told += fresh
        self._known |= {one.key for one in fresh}
        by_rule: dict[str, list[Finding]] = {}
        for one in fresh:
            by_rule.setdefault(one.rule, []).append(one)
        sentences = {name: rules.sentence(of_rule, self._everyone.world_size) for name, of_rule in by_rule.items()}
        for name, line in sentences.items():
            if self._levels[name] == "warn" and self._everyone.rank == 0 and name not in self._warned:
                warnings.warn(f"gradlab: {line}", stacklevel=4)
        self._warned |= set(by_rule)
        if errors := [line for name, line in sentences.items() if self._levels[name] == "error"]:
            raise GradlabError(errors[0])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Confirmed findings of all ranks, and this rank's findings since the last report."""
        return (*self.told, *(one for one in self.pending if one.rule != "mean_error"))


def compare_versions(ranks: Ranks) -> list[Finding]:
    """Compare the versions of gradlab and torch on all ranks: the same findings everywhere. A collective."""
    own = {"gradlab": version.VERSION, "torch": str(torch.__version__)}
    one = rules.different_versions(ranks.gather(own))
    return [] if one is None else [one]
