"""Watch a run by the rules of `gradlab.executor.rules`: each is told once, on rank 0, or ends the run on all ranks.

A rank looks at its own measured steps. Its findings wait for the next step, whose agreement on finite gradients also
carries in the same four bytes whether any rank found something. If one did, the ranks gather their findings between
the steps. So a run without findings sends nothing more, N ranks give one warning, and an error is raised by all of them
after the same step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from gradlab.ddp.optimizers import HeldLayers
from gradlab.errors import GradlabError
from gradlab.executor import PlanRun, rules
from gradlab.executor.rules import Finding
from gradlab.executor.watch import GroupMeasures, RankWatch
from gradlab.plan.optimizer_rules import conflict_of
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
        self._run, self._options = run, options
        self._levels = rules.levels(options.rules)
        self._watch = RankWatch(run.plan, run.codecs, run.settings.plain_sgd)
        # Under momentum or a preconditioner kept residuals were measured to do no harm (`residual_statement`).
        keeping = self._watch.feedback.items() if run.settings.plain_sgd else ()
        self._keeping = [name for name, feedback in keeping if not feedback.follows]
        self._kept = tuple(layer for name in self._keeping for layer in run.groups[name].layers)
        self._ratio: float | None = None  # largest residual norm over gradient norm, of groups that keep theirs
        self._rates: Mapping[str, float] = {}
        self._largest_rate = 0.0
        self._not_finite = 0  # steps in a row

    # --- what a rank sees ---

    def see_groups(self, held: HeldLayers) -> None:
        """Look at parameter groups that were added to an optimizer; refuse those that apply what the plan applies."""
        if (settings := held.settings()) and (conflict := conflict_of(self._run.plan, settings)):
            raise GradlabError(f"a parameter group was added: {conflict}")

    def see_rates(self, now: Mapping[str, float]) -> None:
        """Look at a step's learning rates, by layer name."""
        before, self._rates = self._rates, now
        if not self._kept or not now or now == before:
            return
        self._largest_rate = max(self._largest_rate, *now.values())
        if before:
            old, new = ([rates.get(layer, 0.0) for layer in self._kept] for rates in (before, now))
            factor = rules.rate_change(old, new, self._largest_rate)
            self.add([rules.rates_change(self._run.iteration, factor, self._ratio)])

    def see_step(self, record: StepRecord, measured: Mapping[str, GroupMeasures]) -> None:
        """Look at a step; measured: by group, empty in a step that was not."""
        if not record.finite or not measured:
            return
        steps = record.step - self._run.plan.schedule.warmup_steps + 1
        self.add(self._watch.see(record.step, steps, measured, self._rates))
        kept = [measured[name] for name in self._keeping if name in measured]
        self._ratio = max([0.0, *(one.residual / one.gradient for one in kept if one.gradient > 0)])

    def add(self, found: Sequence[Finding | None]) -> bool:
        """Take in what was found in the step, here or elsewhere. Returns whether anything has yet to be told."""
        for one in found:
            if one is not None and self._levels[one.rule] != "ignore" and not self._knows(one.key):
                self.pending.append(one)
        return bool(self.pending)

    def _knows(self, key: tuple[str, str | None]) -> bool:
        return any(one.key == key for one in self.findings)

    # --- what ranks tell each other ---

    def settle(self, record: StepRecord, noticed: bool) -> None:
        """End a step: gather what ranks found, if any did (`noticed`); warn once, or raise the same everywhere.

        A run whose steps are not finite `non_finite_limit` times in a row ends.
        """
        self._not_finite = 0 if record.finite else self._not_finite + 1
        now = None if record.finite else self._non_finite(record)
        if not noticed and now is None:
            return
        if now is not None and (record.non_finite_layers or now.remedy != rules.RULES[now.rule]):
            self.pending.append(now)  # it names something of this rank
        gathered = self._everyone.ranks.gather([one.to_json() for one in self.pending])
        self.pending = []
        of_ranks = [[Finding.from_json(one) for one in of_rank] for of_rank in gathered]
        found = rules.merged(of_ranks, self._everyone.names)
        if now is not None and all(one.rule != now.rule for one in found):
            found.append(now)  # the same on all ranks: none of them had named a layer
        self.tell(found)

    def _non_finite(self, record: StepRecord) -> Finding | None:
        """This rank's finding on a step that was not finite. All ranks say it in the same step, or end the run."""
        ends = self._not_finite >= self._options.non_finite_limit
        silent = self._levels["non_finite"] == "ignore" or self._knows(("non_finite", None))
        looks = self._run.overflowed and (ends or not silent)
        state = rules.spoiled(self._run.codecs, self._run.states) if looks else ""
        if ends:
            cause = state or f"now in {', '.join(record.non_finite_layers[:3]) or 'another rank'}"
            scale = f"the loss scale is {record.loss_scale:g}" if self._options.scaled else "there is no loss scaler"
            raise GradlabError(
                f"gradients were not finite in {self._not_finite} steps in a row ({cause}; {scale}): the run "
                "does not recover; look at the loss, the learning rate, and the first step at which this began"
            )
        if silent:
            return None
        return rules.non_finite(record.step, self._not_finite, self._options.scaled, record.non_finite_layers, state)

    def tell(self, findings: Sequence[Finding]) -> None:
        """Warn of findings, the same on all ranks, on rank 0 and once by rule; raise those that are errors."""
        told, warned = {one.key for one in self.told}, {one.rule for one in self.told}
        fresh = [one for one in findings if self._levels[one.rule] != "ignore" and one.key not in told]
        self.told += fresh
        for name, line in rules.by_rule(fresh, self._everyone.world_size).items():
            if self._levels[name] == "error":
                raise GradlabError(line)
            if self._everyone.rank == 0 and name not in warned:
                warnings.warn(f"gradlab: {line}", stacklevel=4)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Confirmed findings of all ranks, and this rank's findings since the last report."""
        return (*self.told, *self.pending)
