"""Try plans on your own training: run your command once for plain DDP, once for 16 bits, and once for each plan.

The command is that of your training, or of the recording, as it stands. Its lines of gradlab (TraceRecorder,
gradlab.compress, compress_fsdp, OuterStep, EmulatedNodes, and callbacks of Lightning, Accelerate and the Trainer)
take the plan of the run, record nothing, and end the process after --start and --steps. Steps of an OuterStep are
outer ones. Each run has to begin alike: seed the script, and let it begin anew or from a checkpoint that it does
not write itself in these steps.

The artifact is the plan with the fewest bytes whose loss is at most --max-loss above plain DDP's.

Examples:

  gradlab pilot trace --out plan.safetensors -- torchrun --nproc-per-node 2 train.py --record trace

  gradlab pilot trace --out plan.safetensors --plan a.safetensors --plan b.safetensors --steps 100 --budget 10min --
  accelerate launch train.py
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gradlab.analysis.forecast.lines_to_paste import lines_to_paste, lines_to_resume, where_to_paste
from gradlab.analysis.forecast.link import parse_seconds
from gradlab.analysis.forecast.to_try import ChosenPlans, chosen_plans
from gradlab.analysis.outputs import require_free
from gradlab.analysis.replay.named_method import loaded_plans
from gradlab.artifact import Artifact
from gradlab.cli.console import Answer, print_json, say
from gradlab.cli.options import MAX_LOSS_TEXT, AsJson, MaxLoss, Overwrite, Plans, TraceFolder, share_of_loss
from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.runtime.pilot.trials import DENSE, HALF, Trials
from gradlab.trace import Trace


def pilot(
    trace: TraceFolder,
    out: Annotated[Path, typer.Option(metavar="ARTIFACT", help="File for the best plan, if one holds.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The command that trains.")
    ] = None,
    steps: Annotated[int, typer.Option(min=8, max=100_000, help="Compressed steps of each run.")] = 60,
    start: Annotated[
        int | None, typer.Option(min=0, max=100_000, help="Dense steps before them. [default: the plans' warm-up]")
    ] = None,
    plan: Plans = None,
    max_loss: MaxLoss = MAX_LOSS_TEXT,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="The longest that all may take: 5min.")] = None,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the runs' output. [default: ARTIFACT.pilot]")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:

    if not command:
        raise GradlabError("no command that trains: put it last, behind --, such as -- torchrun train.py")
    if shutil.which(command[0]) is None:
        raise GradlabError(f"{command[0]}: no such command")
    work = _prepare(out, work, overwrite)
    allowed = share_of_loss(max_loss)
    until = None if budget is None else time.monotonic() + parse_seconds(budget)
    with Trace(trace) as opened:
        chosen = chosen_plans(opened, loaded_plans(plan or (), taken=(DENSE, HALF)))
    begin = chosen.warmup_steps if start is None else start
    trials = Trials(command, work.resolve(), steps, begin, allowed, until, lambda line: say(f"gradlab pilot, {line}"))
    _try(chosen, trials, out, overwrite, as_json)


def _prepare(out: Path, work: Path | None, overwrite: bool) -> Path:
    """Refuse files that are there, and remove the runs of an earlier pilot, and nothing else, from the folder."""
    for path in (out, Path(f"{out}.pilot.json")):
        require_free(path, overwrite)
    work = work or Path(f"{out}.pilot")
    for one in work.glob("run-*"):
        if (one / "trial.json").is_file():
            shutil.rmtree(one)
    return work


def _try(chosen: ChosenPlans, trials: Trials, out: Path, overwrite: bool, as_json: bool) -> None:
    """Run all trials, write the best plan's artifact and the result, and print it."""
    tried = trials.try_plans(chosen.plans, chosen.refused)
    best = tried.result.best
    if best is not None:
        provenance = {**chosen.provenance(best.name), "world_size": tried.ranks, "pilot": tried.to_json()}
        Artifact(trials.begun_late(trials.plans[best.name]), provenance).save(out, overwrite)
    write_whole(Path(f"{out}.pilot.json"), json.dumps(tried.to_json(), indent=1).encode())
    if as_json:
        print_json({**tried.to_json(), "artifact": None if best is None else str(out)})
        return
    lines = "" if best is None else _to_paste(out, tried.ranks, chosen.recorded)
    Answer([str(tried), f"{lines}\n{out if best else 'No artifact is written: no plan holds.'}"]).print()


def _to_paste(out: Path, ranks: int, recorded: Mapping[str, Any]) -> str:
    local, fsdp = recorded.get("averaged_ranks"), recorded.get("fully_shard") is True
    local = local if type(local) is int and local > 0 else 1
    lines = lines_to_paste(out, ranks // local, local, fsdp, recorded)
    resume = lines_to_resume(fsdp, recorded)
    return f"\n{where_to_paste(fsdp, recorded)}\n\n{lines}\n" + (resume and f"\n{resume}\n")
