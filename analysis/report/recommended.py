"""Recommend a plan on a recording: which plans can train there, the artifacts of the answer, and lines to paste."""

from __future__ import annotations

import glob
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradlab.analysis.fit.uniform import uniform_artifact
from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.candidates import HALF_PLAN, without
from gradlab.analysis.forecast.decide import HALF, NOTHING, SPEED_NOISE
from gradlab.analysis.forecast.frontier import Tried
from gradlab.analysis.forecast.lines_to_paste import lines_to_paste, lines_to_resume, where_to_paste
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.forecast.networks import TAKEN, listed
from gradlab.analysis.forecast.plans import traffic_text, with_parameters
from gradlab.analysis.forecast.recommendation import BOLD, LIKELY, Recommendation
from gradlab.analysis.forecast.state import state_text
from gradlab.analysis.measure.emptiness import require_gradients
from gradlab.analysis.outputs import require_free
from gradlab.analysis.report.examine import families_of, remarks_on, replay_start, try_recorded
from gradlab.analysis.report.look import QUICK, THOROUGH
from gradlab.artifact import Artifact
from gradlab.ddp.optimizers import OptimizerSettings
from gradlab.errors import GradlabError
from gradlab.formatting import format_counted, format_seconds
from gradlab.plan import Plan
from gradlab.plan.gpu_groups import in_gpu_groups
from gradlab.plan.optimizer_rules import conflict_of
from gradlab.plan.shards import conflict_between_nodes, conflict_on_shards
from gradlab.progress import Progress
from gradlab.trace import Trace

_TIMES_ELSEWHERE = [
    "Recorded on a GPU, but codecs were timed on this processor: `gradlab doctor --out link.json` times them there. "
    "Then give `--bandwidth link.json`."
]
RISKS = (LIKELY, BOLD)  # of plans that are written beside the answer's, for a pilot


@dataclass(frozen=True)
class Files:
    """Names of an answer's files: plan.safetensors, and plan.bold.safetensors for a pilot. by_link: they bear link
    speeds, too, as plan.100mbit+1gbit.safetensors.
    """

    out: Path
    by_link: bool = False

    @classmethod
    def chosen(cls, out: Path, rates: Sequence[float], overwrite: bool) -> Files:
        """Choose names that are free, before the work.

        Raises:
            GradlabError: if there are files of an earlier answer for one of the links, and they are not overwritten.
        """
        for path in (out, *(beside(out, risk) for risk in RISKS)):
            require_free(path, overwrite=True)
        taken = any(os.path.lexists(cls(out).path(risk, ())) for risk in ("", *RISKS))
        if len(rates) == 1 and (overwrite or not taken):
            return cls(out)
        there = [path for path in cls(out).there(rates) if path != out]
        if there and not overwrite:
            raise GradlabError(f"{there[0]} exists already: choose another name or ask to overwrite it (--overwrite)")
        return cls(out, by_link=True)

    def path(self, risk: str, rates: Sequence[float]) -> Path:
        """Name the file of a plan. risk: that of a plan for a pilot, or empty; rates: its links' speeds."""
        words = [risk, "+".join(map(_in_name, rates)) if self.by_link else ""]
        return beside(self.out, ".".join(word for word in words if word)) if any(words) else self.out

    def there(self, rates: Sequence[float]) -> list[Path]:
        """List the files that are there of earlier answers: those of some of these links, and that of no link."""
        words = {_in_name(rate) for rate in rates}
        begins = f"{self.out.stem}."
        found = sorted(self.out.parent.glob(f"{glob.escape(begins)}*{glob.escape(self.out.suffix)}"))
        of_links = [path for path in found if words & _links_in(path.name, begins, self.out.suffix)]
        return [*([self.out] if os.path.lexists(self.out) else []), *of_links]


def _in_name(rate: float) -> str:
    """Write a link speed as part of a file's name: 100mbit."""
    return "unlimited" if math.isinf(rate) else spell_rate(rate).removesuffix("/s").replace(" ", "").lower()


def _links_in(name: str, begins: str, suffix: str) -> set[str]:
    words = name.removeprefix(begins).removesuffix(suffix)
    for risk in RISKS:
        words = words.removeprefix(f"{risk}.")
    return set(words.split("+"))


@dataclass(frozen=True)
class Chosen:
    """Links with one answer: their places and speeds, what they take, its artifact, lines to paste, and the memory that
    it takes."""

    places: Sequence[int]
    rates: Sequence[float]
    take: str
    artifact: Path | None
    warmup_steps: int
    paste: str
    state: str = ""

    @property
    def links(self) -> str:
        """The links in prose: "100 Mbit/s and 1 Gbit/s"."""
        return listed([*map(spell_rate, self.rates)])

    def to_json(self) -> dict[str, Any]:
        artifact = self.artifact and str(self.artifact)
        return {"paste": self.paste, "artifact": artifact, "warmup_steps": self.warmup_steps}


@dataclass(frozen=True)
class Saved:
    """Consequences of the answer: artifacts, others for a pilot, and the lines to paste.

    kept: files of earlier answers, which stay as they are.
    """

    trace: Path
    best: Path
    chosen: Sequence[Chosen]
    to_try: Sequence[Path]
    fsdp: bool
    recorded: Mapping[str, Any]
    kept: Sequence[Path]

    def to_json(self) -> dict[str, Any]:
        return {"pilot": self.pilot, "artifacts_to_try": [str(path) for path in self.to_try]}

    def at(self, place: int) -> dict[str, Any]:
        """Write what the link at a place is answered by, as plain JSON."""
        [one] = [one for one in self.chosen if place in one.places]
        return one.to_json()

    @property
    def artifacts(self) -> list[Path]:
        """Artifacts of the plans to take."""
        return [one.artifact for one in self.chosen if one.artifact is not None]

    @property
    def pilot(self) -> str:
        """The command that tries plans on the user's own training; empty if there is none to try."""
        plans = [*self.artifacts, *self.to_try]
        if not plans:
            return ""
        words = ["gradlab", "pilot", str(self.trace), "--out", str(self.best)]
        words += [word for path in plans for word in ("--plan", str(path))]
        return f"{shlex.join(words)} -- COMMAND"

    def lines(self) -> list[str]:
        """The lines to paste, not indented, what else there is to say, and the artifacts."""
        lines = [f"\n{self._where(one)}\n\n{one.paste}" for one in self.chosen if one.paste]
        if warmup := max(one.warmup_steps for one in self.chosen):
            plan = "A plan compresses" if len(self.chosen) > 1 else "The plan compresses"
            lines.append(f"\n{plan} after {warmup} dense steps: it was judged from there on.")
        lines += [f"\n{one.state}." for one in self.chosen if one.state]
        if self.artifacts and (resume := lines_to_resume(self.fsdp, self.recorded)):
            lines.append(f"\n{resume}")
        if self.pilot:
            lines.append("\nTo try plans on your own training, for COMMAND give the one that made the recording:")
            lines.append(f"\n{self.pilot}")
        if self.kept:
            lines.append(f"\nFiles of earlier answers stay: {listed([*map(str, self.kept)])}.")
        files = [f"{one.artifact}{self._for(one)}" for one in self.chosen if one.artifact is not None]
        return [*lines, "\n" + ("\n".join(files) or "No artifact is written: this answer needs none.")]

    def _where(self, one: Chosen) -> str:
        """Say where lines to paste go, and for which of several links they are."""
        where = where_to_paste(self.fsdp, self.recorded)
        return where if len(self.chosen) == 1 else f"At {one.links}: {one.take}. {where}"

    def _for(self, one: Chosen) -> str:
        return "" if sum(len(each.places) for each in self.chosen) == 1 else f": {one.take}, at {one.links}"


@dataclass(frozen=True)
class Search:
    """Plans to choose from: those of the recording's model, and those given.

    given: artifacts by name.
    network: one number of nodes, and at least one link.
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
        empty = require_gradients(trace, replay_start(trace, look))
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
        times = _TIMES_ELSEWHERE if self._on_gpu and self.network.processor is None else []
        return tried, [*remarks_on(trace, look), *empty, *tried.remarks, *_left_out(conflicts), *times]

    def traffic(self, found: Sequence[Recommendation], tried: Tried) -> list[str]:
        """Say on FSDP2's shards how long each kind of traffic takes on the first link, and what parameters in 8 bits
        would save; nothing elsewhere."""
        if not self.fsdp or tried.speed is None:
            return []
        name = found[0].plan or next(iter(tried.speed.forecasts))
        made = tried.speed.forecasts[name]
        usual = made.comparisons[0][1].compressed.seconds
        quantized = with_parameters(made, tried.plans[name], "int8").seconds
        said = [f"{name} on FSDP2's shards between {traffic_text(made.nodes[0], made.network)}."]
        if quantized < (1 - SPEED_NOISE) * usual:
            said.append(
                f'With parameters gathered in 8 bits, too, compress_fsdp(..., parameters="int8"), a step takes '
                f"{format_seconds(quantized)} instead of {format_seconds(usual)}."
            )
        return said

    def save(self, found: Sequence[Recommendation], tried: Tried, files: Files, overwrite: bool) -> Saved:
        """Write an artifact for each plan that a link takes, and beside them what a pilot is to try."""
        links = [link.bits_per_second for link in self.network.links]
        taken: dict[tuple[str, str | None], list[int]] = {}
        to_try: dict[tuple[str, str], list[float]] = {}
        for place, one in enumerate(found):
            taken.setdefault((one.decision, self._plan_of(one, tried)), []).append(place)
            for proposal in one.proposals:
                to_try.setdefault((proposal.plan, proposal.risk), []).append(links[place])
        plans = {plan for _, plan in taken}
        chosen = []
        for (decision, plan), places in taken.items():
            rates = [links[place] for place in places]
            path = None if plan is None else self._write(plan, tried, files.path("", rates), overwrite)
            paste = lines_to_paste(path, self.network.nodes[0], self._ranks, self.fsdp, self.trace.metadata)
            warmup = 0 if plan is None else tried.plans[plan].schedule.warmup_steps
            take = found[places[0]].plan or TAKEN[decision]
            state = "" if plan is None else state_text(tried.plans[plan], self.network)
            chosen.append(Chosen(places, rates, take, path, warmup, "" if decision == NOTHING else paste, state))
        likely = [
            self._write(plan, tried, files.path(risk, rates), overwrite)
            for (plan, risk), rates in to_try.items()
            if plan not in plans
        ]
        written = {*likely, *(one.artifact for one in chosen)}
        return Saved(
            trace=self.trace.path,
            best=files.path("best", links),
            chosen=chosen,
            to_try=likely,
            fsdp=self.fsdp,
            recorded=self.trace.metadata,
            kept=[path for path in files.there(links) if path not in written] if files.by_link else [],
        )

    def _plan_of(self, one: Recommendation, tried: Tried) -> str | None:
        """The plan whose artifact trains as recommended: between nodes of several ranks 16 bits are codec `cast`'s."""
        half = one.decision == HALF and self._ranks > 1 and HALF_PLAN in tried.plans
        return HALF_PLAN if half else one.plan

    def _write(self, name: str, tried: Tried, path: Path, overwrite: bool) -> Path:
        times = self.trace.times
        told = {"optimizer": self._optimizer, "recorded_computing": times and times.computing}
        made = self.given.get(name) or uniform_artifact(tried.plans[name], tried.replays[name], **told)
        if self._on_gpu and name not in self.given:
            made = replace(made, plan=in_gpu_groups(made.plan))
        return made.save(path, overwrite)

    @property
    def stands_in(self) -> str:
        """Say which recorded ranks were judged in place of nodes of several ranks; empty: nodes were recorded."""
        if self.trace.of_nodes or self._ranks == 1:
            return ""
        return f"{format_counted(self.trace.world_size, 'recorded rank')} are judged in place of nodes' means"

    @property
    def _on_gpu(self) -> bool:
        return self.network.on_accelerator or self.trace.on_gpu

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
