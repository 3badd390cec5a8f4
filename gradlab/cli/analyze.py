"""`gradlab analyze`: write the report of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.cli.console import command_line, progress_bars, tell_of_report
from gradlab.cli.network_options import (
    MAX_LOSS_TEXT,
    ComputeSeconds,
    InsideLink,
    Latency,
    LocalRanks,
    MaxLoss,
    TimedRun,
    node_counts,
    node_of,
    profile_of_step,
    share_of_loss,
)
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of


def analyze(
    trace: Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")],
    out: Annotated[Path, typer.Option(metavar="REPORT", help="Folder for report.html, report.json and figures.")],
    plan: Annotated[
        list[Path] | None,
        typer.Option(metavar="ARTIFACT", help="Replay and forecast this plan; may be given several times."),
    ] = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes to forecast for, with commas.")] = "8",
    local_ranks: LocalRanks = 1,
    inside: InsideLink = "400gbit",
    bandwidth: Annotated[str, typer.Option(help="Link speeds to forecast for, with commas.")] = "1gbit,25gbit",
    latency: Latency = "100us",
    compute_seconds: ComputeSeconds = None,
    run: TimedRun = None,
    max_loss: MaxLoss = MAX_LOSS_TEXT,
    after_addition: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Layers that read a residual sum, e.g. 'layer*.conv1.weight'."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="PARTS", help="Some pages alone, with commas: payoff,between,noise,limits,within,signs."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(help="A first look in seconds: fewer iterations, values and settings, which the report names."),
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Unfold all tables and figures of the page at first.")] = False,
    workers: Processes = None,
    dask: Dask = None,
    average_ranks: AverageRanks = 1,
    overwrite: Annotated[bool, typer.Option(help="Replace a report that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON too.")] = False,
) -> None:
    """Measure a trace in every way and write a report whose first line says whether compression pays.

    Its pages show step times and replays of plans, what ranks share beside null hypotheses, and the noise scale. They
    also show codecs beside the rate-distortion limit, a GradiVeQ fit tried on later iterations, signs, and every layer.

    Of a recording of pseudo-gradients (gradlab train -s local_steps=H), with the time of a local step, it says how many
    local steps to take on each link, and which plan to send them by.

    Examples:

      gradlab analyze trace --out report --compute-seconds 0.36s

      gradlab analyze trace --out report --quick

      gradlab analyze trace --out report --nodes 8,64 --bandwidth 200mbit,1gbit,25gbit --plan powersgd.safetensors

      gradlab analyze trace --out report --average-ranks 8 --nodes 8 --local-ranks 8 --inside 400gbit
    """
    from gradlab.analysis.forecast import Network
    from gradlab.analysis.forecast.link import Link, parse_bandwidth, parse_seconds
    from gradlab.analysis.outputs import REPORT_FILES, require_free
    from gradlab.analysis.report.examine import PARTS, examine, families_of
    from gradlab.analysis.report.look import QUICK, THOROUGH
    from gradlab.analysis.report.trace_report import write_trace_report
    from gradlab.artifact import Artifact
    from gradlab.trace import Trace

    require_free(out, overwrite, contents=REPORT_FILES)
    sharing, allowed = workers_of(workers, dask), share_of_loss(max_loss)
    delay = parse_seconds(latency)
    links = [Link(parse_bandwidth(rate), delay) for rate in bandwidth.split(",")]
    profile = profile_of_step(run, compute_seconds)
    network = Network(links, node_counts(nodes), profile, node=node_of(local_ranks, inside))
    artifacts = {str(path): Artifact.load(path) for path in plan or []}
    names = {path: Path(path).stem for path in artifacts}
    if len(set(names.values())) < len(names):
        names = {path: path for path in artifacts}
    look = QUICK if quick else THOROUGH
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        examination = examine(
            opened,
            families=families_of(opened, look),
            plans={names[path]: artifact.plan for path, artifact in artifacts.items()} or None,
            provenances={names[path]: artifact.provenance for path, artifact in artifacts.items()},
            network=network,
            max_loss=allowed,
            for_page=True,
            after_addition=after_addition or (),
            parts=PARTS if only is None else [part.strip() for part in only.split(",")],
            look=look,
            workers=sharing,
            progress=progress,
        )
        page = write_trace_report(
            opened,
            out,
            examination,
            overwrite=overwrite,
            full=full,
            repeat=command_line(),
            workers=sharing,
            progress=progress,
        )
    tell_of_report(page, as_json)
