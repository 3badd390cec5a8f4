"""`gradlab evaluate`: replay artifacts on a trace, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.cli.console import OUT, command_line, print_json, print_table, print_warnings, progress_bars
from gradlab.cli.figures import require_figure, write_figure
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.replay.result import Replay


def evaluate(
    trace: Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")],
    artifacts: Annotated[list[Path], typer.Argument(metavar="ARTIFACT...", help="Artifacts to replay.")],
    start: Annotated[int, typer.Option(help="Position of the first recorded step to replay, from 0.")] = 0,
    stop: Annotated[int | None, typer.Option(help="Position after the last one; default: to the end.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="REPORT", help="Write a report with plots here.")] = None,
    cycle: Annotated[
        Path | None,
        typer.Option(
            metavar="FIGURE",
            help="Of one artifact: draw which iterations are dense, sampled and compressed, after GradiVeQ's Fig. 6 "
            "(.svg, .pdf).",
        ),
    ] = None,
    workers: Processes = None,
    dask: Dask = None,
    average_ranks: AverageRanks = 1,
    overwrite: Annotated[bool, typer.Option(help="Replace a report that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every step.")] = False,
) -> None:
    """Replay artifacts on recorded gradients with the code that trains: error, cosine, bytes, time, by layer and step.

    With several artifacts it also says whether they keep their order all through the recording.

    Errors of an artifact fitted on this trace are those of iterations after its fit, with in-sample errors beside them.

    Examples:

      gradlab evaluate trace topk.safetensors gradiveq.safetensors

      gradlab evaluate trace gradiveq.safetensors --cycle iterations.svg
    """
    from gradlab.analysis.outputs import REPORT_FILES, require_free
    from gradlab.analysis.replay import check_replay, replay_plans
    from gradlab.analysis.report.trace_report import Examination, write_trace_report
    from gradlab.artifact import Artifact
    from gradlab.trace import Trace

    sharing = workers_of(workers, dask)
    if out is not None:
        require_free(out, overwrite, contents=REPORT_FILES)
    if cycle is not None:
        require_figure(cycle, overwrite)
        if len(artifacts) > 1:
            raise GradlabError(f"--cycle draws the iterations of one artifact, not of {len(artifacts)}")
    names = [path.stem for path in artifacts]
    if len(set(names)) < len(names):
        names = [str(path) for path in artifacts]
    loaded = [Artifact.load(path) for path in artifacts]
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        if opened.world_size == 1:
            raise GradlabError(f"{trace}: recorded on one rank: there is no exchange to replay")
        last = len(opened.steps) if stop is None else stop
        for path, artifact in zip(artifacts, loaded, strict=True):  # before the first replay, not after it
            try:
                check_replay(opened, artifact.plan, start, last)
            except GradlabError as error:
                raise GradlabError(f"{path}: {error}") from None
        known = dict(zip(names, loaded, strict=True))
        plans = {name: artifact.plan for name, artifact in known.items()}
        results = replay_plans(opened, plans, start=start, stop=stop, workers=sharing, progress=progress)
        replays = {}
        for name, result in results.items():
            if isinstance(result, GradlabError):
                raise result
            replays[name] = result.held_out(known[name].provenance)
        if cycle is not None:
            from gradlab.analysis.figures.cycle import plot_cycle
            from gradlab.analysis.replay.cycle import training_cycle

            iterations = training_cycle(opened, loaded[0].plan, start=start, stop=stop, progress=progress)
            write_figure(lambda: plot_cycle(iterations), cycle)
        page = None
        if out is not None:
            page = write_trace_report(
                opened,
                out,
                Examination(replays=replays),
                overwrite=overwrite,
                full=True,
                repeat=command_line(),
                workers=sharing,
                progress=progress,
            )
    if as_json:
        print_json(replays)
    else:
        print_replays(replays)
        if page:
            OUT.print(str(page), markup=False)


def print_replays(replays: Mapping[str, Replay]) -> None:
    """Print what replays say, with their warnings, then one row per replayed plan.

    Args:
        replays: by the plan's name.
    """
    from gradlab.analysis.replay.ranking import ranking_stability
    from gradlab.analysis.report.tables import replay_table
    from gradlab.analysis.report.verdict import ranking_line, replay_verdict

    written = {name: result.to_json() for name, result in replays.items()}
    OUT.print(replay_verdict(written), markup=False)
    ranking = ranking_stability(replays)
    if ranking is not None:
        OUT.print(ranking_line(ranking.to_json()), markup=False)
    print_warnings(f"{name}: {line}" for name, result in replays.items() for line in result.warnings)
    table = replay_table(written)
    print_table(table.title, table.columns, table.rows, left=table.text_columns)
