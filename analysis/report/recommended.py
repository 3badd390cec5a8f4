"""Recommend a plan on a recording: which plans can train there, the artifacts of the answer, and lines to paste."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlab.analysis.fit.uniform import uniform_artifact
from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.candidates import HALF_PLAN, without
from gradlab.analysis.forecast.decide import HALF, NOTHING
from gradlab.analysis.forecast.frontier import Tried
from gradlab.analysis.forecast.lines_to_paste import lines_to_paste, lines_to_resume, where_to_paste
from gradlab.analysis.forecast.recommendation import Recommendation
from gradlab.analysis.report.examine import families_of, remarks_on, try_recorded
from gradlab.analysis.report.look import QUICK, THOROUGH
from gradlab.artifact import Artifact
from gradlab.ddp.optimizers import OptimizerSettings
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import conflict_of
from gradlab.plan.shards import conflict_between_nodes, conflict_on_shards
from gradlab.progress import Progress
from gradlab.trace import Trace


@dataclass(frozen=True)
class Saved:
    """Consequences of the answer: the artifact, others for a pilot, and the lines to paste."""

    trace: Path
    out: Path
    artifact: Path | None
    to_try: Sequence[Path]
    warmup_steps: int
    paste: str
    fsdp: bool
    recorded: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "paste": self.paste,
            "artifact": self.artifact and str(self.artifact),
            "pilot": self.pilot,
            "artifacts_to_try": [str(path) for path in self.to_try],
            "warmup_steps": self.warmup_steps,
        }

    @property
    def pilot(self) -> str:
        """The command that tries plans on the user's own training; empty if there is none to try."""
        plans = [path for path in (self.artifact, *self.to_try) if path is not None]
        if not plans:
            return ""
        words = ["gradlab", "pilot", str(self.trace), "--out", str(beside(self.out, "best"))]
        words += [word for path in plans for word in ("--plan", str(path))]
        return f"{shlex.join(words)} -- torchrun ..."

    def lines(self) -> list[str]:
        """The lines to paste, not indented, what else there is to say, and the artifact."""
        where = where_to_paste(self.fsdp, self.recorded, half=self.artifact is None)
        lines = [f"\n{where}\n\n{self.paste}"] if self.paste else []
        if self.warmup_steps:
            lines.append(f"\nThe plan compresses after {self.warmup_steps} dense steps: it was judged from there on.")
        if self.artifact and (resume := lines_to_resume(self.fsdp, self.recorded)):
            lines.append(f"\n{resume}")
        if self.pilot:
            lines.append(
                "\nTo try it on your own training, with the command that made the recording in place of `torchrun ...`:"
            )
            lines.append(f"\n{self.pilot}")
        return [*lines, f"\n{self.artifact or 'No artifact is written: there is no plan to load.'}"]


@dataclass(frozen=True)
class Search:
    """Plans to choose from: those of the recording's model, and those given.

    given: artifacts by name.
    network: one number of nodes and one link.
    fsdp: whether parameters are sharded among a node's ranks.
    quick: whether a few steps only are replayed.
    """

    trace: Trace
    given: Mapping[str, Artifact]
    network: Network
    fsdp: bool
    quick: bool

    def tried(self, max_loss: float, workers: int, progress: Progress) -> tuple[Tried, list[str]]:
        """Replay and forecast the plans that can train here. Returns remarks, too."""
        trace, look = self.trace, QUICK if self.quick else THOROUGH
        if trace.world_size == 1:
            raise GradlabError(f"{trace.path}: recorded on one rank: what plans do to an exchange is not known")
        if trace.local_steps:
            raise GradlabError(f"{trace.path}: holds {trace.local_steps}, for which gradlab analyze has the answer")
        families, plans = families_of(trace, look), {name: artifact.plan for name, artifact in self.given.items()}
        named = {one.name: one.plan for family in families.values() for one in family.candidates} | plans
        conflicts = {name: why for name, plan in named.items() if (why := self._conflict(plan))}
        tried = try_recorded(
            trace,
            without(families, conflicts),
            {name: plan for name, plan in plans.items() if name not in conflicts},
            provenances={name: artifact.provenance for name, artifact in self.given.items()},
            network=self.network,
            max_loss=max_loss,
            look=look,
            workers=workers,
            progress=progress,
        )
        return tried, [*remarks_on(trace, look), *tried.remarks, *_left_out(conflicts)]

    def save(self, found: Recommendation, tried: Tried, out: Path, overwrite: bool) -> Saved:
        """Write the artifact, and beside it what a pilot is to try: plan.likely.safetensors, plan.bold.safetensors."""

        def write(name: str, path: Path) -> Path:
            plan, replay = tried.plans[name], tried.replays[name]
            times = self.trace.times
            told = {"optimizer": self._optimizer, "recorded_computing": times and times.computing}
            made = self.given.get(name) or uniform_artifact(plan, replay, **told)
            return made.save(path, overwrite)

        # Between nodes of several ranks 16 bits are those of codec `cast`.
        half = found.decision == HALF and self._ranks > 1 and HALF_PLAN in tried.plans
        chosen = HALF_PLAN if half else found.plan
        artifact = None if chosen is None else write(chosen, out)
        to_try = [write(one.plan, beside(out, one.risk)) for one in found.proposals]
        paste = lines_to_paste(artifact, self.network.nodes[0], self._ranks, self.fsdp, self.trace.metadata)
        return Saved(
            trace=self.trace.path,
            out=out,
            artifact=artifact,
            to_try=to_try,
            warmup_steps=0 if chosen is None else tried.plans[chosen].schedule.warmup_steps,
            paste="" if found.decision == NOTHING else paste,
            fsdp=self.fsdp,
            recorded=self.trace.metadata,
        )

    @property
    def _ranks(self) -> int:
        return 1 if self.network.node is None else self.network.node.local_ranks

    @property
    def _optimizer(self) -> OptimizerSettings | None:

        return OptimizerSettings.from_metadata(self.trace.metadata)

    def _conflict(self, plan: Plan) -> str:
        """Why the lines to paste would be refused with a plan; empty: they train."""
        if self._optimizer is not None and (conflict := conflict_of(plan, self._optimizer)):
            return str(conflict)
        if self.fsdp:
            return conflict_on_shards(plan)
        return conflict_between_nodes(plan) if self._ranks > 1 else ""


def _left_out(conflicts: Mapping[str, str]) -> list[str]:
    """Say once for each reason which plans were left out."""
    by_reason: dict[str, list[str]] = {}
    for name, why in conflicts.items():
        by_reason.setdefault(why, []).append(name)
    return [
        f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} left out: {why}."
        for why, names in by_reason.items()
    ]


def beside(out: Path, which: str) -> Path:
    """Name the file of another plan beside an artifact: plan.bold.safetensors."""
    return out.with_name(f"{out.stem}.{which}{out.suffix}")
