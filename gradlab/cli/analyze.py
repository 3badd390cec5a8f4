"""Measure a trace in every way and write a report whose first line says whether compression pays.

Its pages show step times and replays of plans, what ranks share beside null hypotheses, and the noise scale. They
also show codecs beside the rate-distortion limit, a GradiVeQ fit tried on later iterations, signs, and every layer.

Steps compute as long as recorded, or as --compute-seconds says.

With a recording of pseudo-gradients (docs/local-steps.md) and the time of a local step, it says how many local
steps to take on each link, and which plan to send them by.

Examples:

  gradlab analyze trace --out report

  gradlab analyze trace --out report --quick

  gradlab analyze trace --out report --nodes 8,64 --bandwidth 200mbit,1gbit,25gbit --plan powersgd.safetensors

  gradlab analyze trace --out report --average-ranks 8 --nodes 8x8 --inside 400gbit
"""

from __future__ import annotations

from typing import Annotated

import typer

from gradlab.analysis.forecast import Network
from gradlab.analysis.outputs import REPORT_FILES, require_free
from gradlab.analysis.replay.named_method import loaded_plans
from gradlab.analysis.report.examine import PARTS, examine, families_of
from gradlab.analysis.report.look import QUICK, THOROUGH
from gradlab.analysis.report.trace_report import write_trace_report
from gradlab.cli import options
from gradlab.cli.console import command_line, print_report, progress_bars
from gradlab.trace import Trace


def analyze(
    trace: options.TraceFolder,
    out: options.Report,
    plan: options.Plans = None,
    nodes: Annotated[
        str, typer.Option(metavar="N[xR],...", help="Numbers of nodes, and of ranks on each: 8,64 or 2x8,8x8.")
    ] = "8",
    inside: options.InsideLink = "400gbit",
    bandwidth: Annotated[str, typer.Option(help="Link speeds to forecast for, with commas.")] = "1gbit,25gbit",
    latency: options.Latency = "100us",
    compute_seconds: options.ComputeSeconds = None,
    max_loss: options.MaxLoss = options.MAX_LOSS_TEXT,
    only: Annotated[
        str | None,
        typer.Option(metavar="PARTS", help="Some pages alone, with commas: payoff,between,noise,limits,within,signs."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="A first look in seconds at fewer iterations and settings.")] = False,
    workers: options.SharedBy = None,
    average_ranks: options.AverageRanks = 1,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:

    require_free(out, overwrite, contents=REPORT_FILES)
    sharing, allowed = options.workers_of(workers), options.share_of_loss(max_loss)
    links, processor = options.links_of(bandwidth, latency), options.processor_of(bandwidth)
    artifacts, look = loaded_plans(plan or ()), QUICK if quick else THOROUGH
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        sharded = opened.metadata.get("fully_shard") is True
        counts, node = options.nodes_of(nodes, inside, fsdp=sharded, over_nodes=True)
        profile = options.profile_of_step(compute_seconds, opened)
        network = Network(links, counts, profile, node=node, processor=processor, gpu=opened.on_gpu)
        examination = examine(
            opened,
            families=families_of(opened, look),
            plans={name: artifact.plan for name, artifact in artifacts.items()} or None,
            provenances={name: artifact.provenance for name, artifact in artifacts.items()},
            network=network,
            max_loss=allowed,
            for_page=True,
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
            repeat=command_line(),
            workers=sharing,
            progress=progress,
        )
    print_report(page, as_json)
