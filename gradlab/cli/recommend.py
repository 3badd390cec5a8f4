"""`gradlab recommend`: from a recording to an artifact and the lines to paste, or "do not compress"."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import OUT, print_json, print_warnings, progress_bars
from gradlab.cli.lines_to_paste import lines_to_paste, where_to_paste
from gradlab.cli.network_options import (
    MAX_LOSS_TEXT,
    ComputeSeconds,
    InsideLink,
    Latency,
    MaxLoss,
    TimedRun,
    node_of,
    profile_of_step,
    share_of_loss,
    whole_numbers,
)
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.forecast.recommendation import Recommendation
    from gradlab.analysis.report.examine import Tried
    from gradlab.artifact import Artifact
    from gradlab.ddp.optimizers import OptimizerSettings
    from gradlab.plan import Plan
    from gradlab.trace import Trace


def recommend(
    trace: Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")],
    out: Annotated[Path, typer.Option(metavar="ARTIFACT", help="File for the plan, if there is one to train with.")],
    nodes: Annotated[
        str, typer.Option(metavar="N[xR]", help="Number of nodes, and of ranks on each: 8, or 8x8.")
    ] = "8",
    bandwidth: Annotated[str, typer.Option(help="Speed of a node's link: 200mbit, 10gbit.")] = "1gbit",
    inside: InsideLink = "400gbit",
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Parameters are sharded among a node's ranks by FSDP2.")] = False,
    latency: Latency = "100us",
    max_loss: MaxLoss = MAX_LOSS_TEXT,
    compute_seconds: ComputeSeconds = None,
    run: TimedRun = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option(metavar="ARTIFACT", help="Choose from this plan too; may be given several times."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Replay a few steps only, which the answer then says.")] = False,
    workers: Processes = None,
    dask: Dask = None,
    average_ranks: AverageRanks = 1,
    overwrite: Annotated[bool, typer.Option(help="Replace an artifact that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decision and the lines as JSON.")] = False,
) -> None:
    """Choose a plan for your nodes and your link, write its artifact, and print the lines that train with it.

    Replays on the recording search each method that needs no fit for the setting that sends the fewest bytes within
    --max-loss. Plans given by --plan are replayed beside them. The fastest is taken, as `gradlab analyze` forecasts it,
    of the plans whose similar methods ended within --max-loss of dense training in nine of ten cases. If plain 16-bit
    reduction is about as fast, that is the answer. If no plan saves more than a forecast can tell, it is "do not
    compress", and no artifact is written. Faster plans, which may lose more, are written beside the artifact for
    `gradlab pilot`, which tries them on your own training.

    Examples:

      gradlab recommend trace --out plan.safetensors --nodes 8 --bandwidth 1gbit --compute-seconds 0.36s

      gradlab recommend trace --out plan.safetensors --nodes 8x8 --bandwidth 10gbit --max-loss 1% --run run.json

      gradlab recommend trace --out plan.safetensors --nodes 8x8 --fsdp --bandwidth 25gbit --compute-seconds 0.36s
    """
    from gradlab.analysis.forecast import Network
    from gradlab.analysis.forecast.candidates import without
    from gradlab.analysis.forecast.decide import NOTHING
    from gradlab.analysis.forecast.link import Link, parse_bandwidth, parse_seconds
    from gradlab.analysis.forecast.recommendation import BOLD, LIKELY, require_computing
    from gradlab.analysis.forecast.recommendation import recommend as choose
    from gradlab.analysis.outputs import require_free
    from gradlab.analysis.report.examine import families_of, remarks_on, try_recorded
    from gradlab.analysis.report.look import QUICK, THOROUGH
    from gradlab.artifact import Artifact
    from gradlab.cli.fit.options import optimizer_of_training
    from gradlab.trace import Trace

    for path in (out, _beside(out, LIKELY), _beside(out, BOLD)):
        require_free(path, overwrite)
    sharing, allowed, (count, ranks) = workers_of(workers, dask), share_of_loss(max_loss), _nodes_and_ranks(nodes)
    profile = profile_of_step(run, compute_seconds)
    require_computing(profile)
    if fsdp and ranks == 1:
        raise GradlabError("--fsdp: parameters are sharded among a node's ranks; name them, such as --nodes 8x8")
    network = Network(
        [Link(parse_bandwidth(bandwidth), parse_seconds(latency))],
        (count,),
        profile,
        node=node_of(ranks, inside, fsdp=fsdp),
    )
    paths, look = plan or [], QUICK if quick else THOROUGH
    stems = len({path.stem for path in paths}) == len(paths)
    given = {path.stem if stems else str(path): Artifact.load(path) for path in paths}
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        _check_recording(opened)
        optimizer = optimizer_of_training(opened, None)
        families, plans = families_of(opened, look), {name: artifact.plan for name, artifact in given.items()}
        named = {one.name: one.plan for family in families.values() for one in family.candidates} | plans
        conflicts = {name: why for name, one in named.items() if (why := _conflict(one, optimizer, ranks, fsdp))}
        tried = try_recorded(
            opened,
            without(families, conflicts),
            {name: one for name, one in plans.items() if name not in conflicts},
            provenances={name: artifact.provenance for name, artifact in given.items()},
            network=network,
            max_loss=allowed,
            look=look,
            workers=sharing,
            progress=progress,
        )
        remarks = [*remarks_on(opened, look), *tried.remarks, *_left_out(conflicts)]
    if tried.speed is None:
        raise GradlabError(" ".join(remarks) or f"{trace}: no plan could be forecast")
    found = choose(tried.speed)
    chosen = _plan_to_write(found, tried.plans, nodes_of_several=ranks > 1)
    if chosen is not None:
        _artifact_of(chosen, tried, given, optimizer).save(out, overwrite)
    artifact_path = None if chosen is None else out
    to_try = _proposed(found, tried, given, out, optimizer, overwrite)
    pilot = _pilot_command(trace, out, to_try, artifact_path)
    dense_first = 0 if chosen is None else tried.plans[chosen].schedule.warmup_steps
    lines = "" if found.decision == NOTHING else lines_to_paste(artifact_path, count, ranks, fsdp)
    if as_json:
        written: dict[str, Any] = {"paste": lines, "remarks": remarks}
        written |= {"artifact": artifact_path and str(artifact_path)}
        written |= {"pilot": pilot, "artifacts_to_try": [str(path) for path in to_try], "warmup_steps": dense_first}
        print_json({**found.to_json(), **written, "frontier": [row.to_json() for row in tried.frontier]})
        return
    _tell(
        found,
        remarks,
        where_to_paste(fsdp),
        lines,
        [*_beginning_line(dense_first), *_pilot_lines(pilot)],
        artifact_path,
    )


def _artifact_of(
    name: str, tried: Tried, given: Mapping[str, Artifact], optimizer: OptimizerSettings | None
) -> Artifact:
    from gradlab.analysis.fit.uniform import uniform_artifact

    return given.get(name) or uniform_artifact(tried.plans[name], tried.replays[name], optimizer=optimizer)


def _proposed(
    found: Recommendation,
    tried: Tried,
    given: Mapping[str, Artifact],
    out: Path,
    optimizer: OptimizerSettings | None,
    overwrite: bool,
) -> list[Path]:
    """Write what a pilot is to try beside the artifact: plan.likely.safetensors, plan.bold.safetensors."""
    paths = []
    for one in found.proposals:
        paths.append(_artifact_of(one.plan, tried, given, optimizer).save(_beside(out, one.risk), overwrite))
    return paths


def _beside(out: Path, which: str) -> Path:
    return out.with_name(f"{out.stem}.{which}{out.suffix}")


def _pilot_command(trace: Path, out: Path, to_try: Sequence[Path], artifact: Path | None) -> str:
    """Write the command that tries plans on the user's own training; empty where there is none to try."""
    plans = [path for path in (artifact, *to_try) if path is not None]
    if not plans:
        return ""
    words = ["gradlab", "pilot", str(trace), "--out", str(_beside(out, "best"))]
    words += [word for path in plans for word in ("--plan", str(path))]
    return f"{shlex.join(words)} -- torchrun ..."


def _conflict(plan: Plan, optimizer: OptimizerSettings | None, ranks: int, fsdp: bool) -> str:
    """Say why the lines to paste would be refused with a plan; empty: they train."""
    from gradlab.plan.node_rules import conflict_between_nodes, conflict_on_shards
    from gradlab.plan.optimizer_rules import conflict_of

    if optimizer is not None and (conflict := conflict_of(plan, optimizer)):
        return str(conflict)
    if fsdp:
        return conflict_on_shards(plan)
    return conflict_between_nodes(plan) if ranks > 1 else ""


def _left_out(conflicts: Mapping[str, str]) -> list[str]:
    """Say once for each reason which plans were left out."""
    by_reason: dict[str, list[str]] = {}
    for name, why in conflicts.items():
        by_reason.setdefault(why, []).append(name)
    return [
        f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} left out: {why}."
        for why, names in by_reason.items()
    ]


def _tell(
    found: Recommendation, remarks: Sequence[str], where: str, lines: str, more: Sequence[str], artifact: Path | None
) -> None:
    """Print the answer for people, with the lines to paste, what else there is to say, and the artifact."""
    OUT.print(found.text, markup=False)
    print_warnings(remarks)
    if lines:
        OUT.print(f"\n{where}\n\n{lines}", markup=False)  # not indented: it is pasted
    for paragraph in more:
        OUT.print(f"\n{paragraph}", markup=False)
    OUT.print(f"\n{artifact or 'No artifact is written: there is no plan to load.'}", markup=False)


def _beginning_line(dense_first: int) -> list[str]:
    if not dense_first:
        return []
    return [f"The plan compresses after {dense_first} dense steps: it was judged from there on."]


def _pilot_lines(pilot: str) -> list[str]:
    if not pilot:
        return []
    return [
        "To try it on your own training, with the command that made the recording in place of `torchrun ...`:",
        pilot,
    ]


def _check_recording(trace: Trace) -> None:
    """Refuse what nothing can be recommended from."""
    if trace.world_size == 1:
        raise GradlabError(f"{trace.path}: recorded on one rank: what plans do to an exchange is not known")
    if trace.local_steps:
        raise GradlabError(f"{trace.path}: holds {trace.local_steps}, for which gradlab analyze has the answer")


def _nodes_and_ranks(text: str) -> tuple[int, int]:
    """Read "8" or "8x8": nodes, and ranks on each."""
    if not re.fullmatch(r"\d+(x\d+)?", text.lower()):
        raise GradlabError(
            f"--nodes {text[:80]!r}: expected one number of nodes, such as 8, or with the ranks of each, such as 8x8"
        )
    nodes, cross, ranks = text.lower().partition("x")
    [count] = whole_numbers(nodes, "--nodes", "8 or 8x8")[:1]
    [on_each] = whole_numbers(ranks, "--nodes", "8 or 8x8")[:1] if cross else [1]
    return count, on_each


def _plan_to_write(found: Recommendation, plans: Mapping[str, Plan], nodes_of_several: bool) -> str | None:
    """Name the plan of the artifact: the one recommended; of 16 bits between nodes of several ranks that of `cast`."""
    from gradlab.analysis.forecast.candidates import HALF_PLAN
    from gradlab.analysis.forecast.decide import HALF

    half = found.decision == HALF and nodes_of_several and HALF_PLAN in plans
    return HALF_PLAN if half else found.plan
