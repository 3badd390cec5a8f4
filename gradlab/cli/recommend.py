"""Choose a plan for your nodes and your link, write its artifact, and print the lines that train with it.

Replays on the recording search each method that needs no fit for the setting that sends the fewest bytes within
--max-loss. Plans given by --plan are replayed beside them. The fastest is taken, as `gradlab analyze` forecasts it,
of the plans whose similar methods ended within --max-loss of dense training in nine of ten cases. If plain 16-bit
reduction is about as fast, that is the answer. If no plan saves more than a forecast can tell, it is "do not
compress", and no artifact is written. Faster plans, which may lose more, are written beside the artifact for
`gradlab pilot`, which tries them on your own training.

Examples:

  gradlab recommend trace --out plan.safetensors --nodes 8 --bandwidth 1gbit

  gradlab recommend trace --out plan.safetensors --nodes 8x8 --bandwidth 10gbit --compute-seconds 0.36s

  gradlab recommend trace --out plan.safetensors --nodes 8x8 --fsdp --bandwidth 25gbit
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.recommendation import BOLD, LIKELY, require_computing
from gradlab.analysis.forecast.recommendation import recommend as choose
from gradlab.analysis.outputs import require_free
from gradlab.analysis.replay.named_method import loaded_plans
from gradlab.analysis.report.recommended import Search, beside
from gradlab.cli import options
from gradlab.cli.console import Answer, print_json, progress_bars
from gradlab.errors import GradlabError
from gradlab.trace import Trace


def recommend(
    trace: options.TraceFolder,
    out: Annotated[Path, typer.Option(metavar="ARTIFACT", help="File for the plan, if there is one to train with.")],
    nodes: Annotated[
        str, typer.Option(metavar="N[xR]", help="Number of nodes, and of ranks on each: 8, or 8x8.")
    ] = "8",
    bandwidth: Annotated[str, typer.Option(help="Speed of a node's link: 200mbit, 10gbit.")] = "1gbit",
    inside: options.InsideLink = "400gbit",
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Parameters are sharded among a node's ranks by FSDP2.")] = False,
    latency: options.Latency = "100us",
    max_loss: options.MaxLoss = options.MAX_LOSS_TEXT,
    compute_seconds: options.ComputeSeconds = None,
    plan: options.Plans = None,
    quick: Annotated[bool, typer.Option(help="A replay of a few steps only, which the answer then says.")] = False,
    workers: options.SharedBy = None,
    average_ranks: options.AverageRanks = 1,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:

    for path in (out, beside(out, LIKELY), beside(out, BOLD)):
        require_free(path, overwrite)
    for option, words in (("nodes", nodes), ("bandwidth", bandwidth)):
        if "," in words:
            raise GradlabError(f"--{option} {words!r}: expected one, to recommend a plan for it")
    sharing, allowed = options.workers_of(workers), options.share_of_loss(max_loss)
    links = options.links_of(bandwidth, latency)
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        profile = options.profile_of_step(compute_seconds, opened)
        require_computing(profile)
        fsdp = fsdp or opened.metadata.get("fully_shard") is True
        counts, node = options.nodes_of(nodes, inside, fsdp=fsdp)
        network = Network(links, counts, profile, node=node)
        search = Search(opened, loaded_plans(plan or ()), network, fsdp, quick)
        tried, remarks = search.tried(allowed, sharing, progress)
    if tried.speed is None:
        raise GradlabError(" ".join(remarks) or f"{trace}: no plan could be forecast")
    found = choose(tried.speed)
    saved = search.save(found, tried, out, overwrite)
    if as_json:
        written = {"remarks": remarks, "frontier": [row.to_json() for row in tried.frontier]}
        print_json({**found.to_json(), **saved.to_json(), **written})
    else:
        Answer([found.text], remarks, notes=saved.lines()).print()
