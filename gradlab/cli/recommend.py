"""Choose a plan for your nodes and your link, write its artifact, and print the lines that train with it.

Replays on the recording search each method that needs no fit for the setting that sends the fewest bytes within
--max-loss. Plans given by --plan are replayed beside them. The fastest is taken, as `gradlab analyze` forecasts it,
of the plans whose similar methods ended within --max-loss of dense training in nine of ten cases. If plain 16-bit
reduction is about as fast, that is the answer. If no plan saves more than a forecast can tell, it is "do not
compress", and no artifact is written. Faster plans, which may lose more, are written beside the artifact for
`gradlab pilot`, which tries them on your own training.

Several link speeds are one question, with a table for an answer: --bandwidth 100mbit,1gbit,10gbit. Replays are made
once for all. Each plan that some link takes is written, with these links in its name:
plan.100mbit+1gbit.safetensors. A later question keeps the files of earlier answers: if --out is taken, the link is
put into the name of the new plan, too.

With --local-steps nothing is replayed. The answer is the fewest local steps at which a worker waits for at most a
tenth of a step (auto), uncompressed or by ecsq, through which our trainings with local steps lost next to nothing.

Examples:

  gradlab recommend trace --out plan.safetensors --nodes 8 --bandwidth 1gbit

  gradlab recommend trace --out plan.safetensors --nodes 8 --bandwidth 100mbit,1gbit,10gbit

  gradlab recommend trace --out plan.safetensors --nodes 8x8 --bandwidth 10gbit --compute-seconds 0.36s

  gradlab recommend trace --out plan.safetensors --nodes 2 --bandwidth 50mbit --local-steps auto

  gradlab recommend trace --out plan.safetensors --nodes 8x8 --fsdp --bandwidth 25gbit
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.lines_to_paste import local_lines
from gradlab.analysis.forecast.link import Link, json_rate
from gradlab.analysis.forecast.local_endings import ended_above
from gradlab.analysis.forecast.local_speed import NUMBERS, advise_local_steps, ended_text
from gradlab.analysis.forecast.networks import networks_table
from gradlab.analysis.forecast.recommendation import Recommendation, lines_for_several, require_computing
from gradlab.analysis.forecast.recommendation import recommend as choose
from gradlab.analysis.forecast.speed import SpeedForecast, caution_lines
from gradlab.analysis.replay.named_method import loaded_plans
from gradlab.analysis.report.recommended import Files, Saved, Search
from gradlab.artifact import Artifact
from gradlab.cli import options
from gradlab.cli.console import Answer, print_json, progress_bars
from gradlab.errors import GradlabError
from gradlab.trace import Trace

MOST_LINKS = 12


def recommend(
    trace: options.TraceFolder,
    out: Annotated[
        Path,
        typer.Option(
            metavar="ARTIFACT",
            help="File for the plan, if there is one to train with. If it is taken, or for several links, the links "
            "are put into the name: plan.1gbit.safetensors.",
        ),
    ] = Path("plan.safetensors"),
    nodes: Annotated[
        str, typer.Option(metavar="N[xR]", help="Number of nodes, and of ranks on each: 8, or 8x8.")
    ] = "8",
    bandwidth: Annotated[
        str, typer.Option(help="Speed of a node's link, or several: 200mbit,10gbit; or link.json of `gradlab doctor`.")
    ] = "1gbit",
    inside: options.InsideLink = "400gbit",
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Parameters are sharded among a node's ranks by FSDP2.")] = False,
    latency: options.Latency = "100us",
    max_loss: options.MaxLoss = options.MAX_LOSS_TEXT,
    compute_seconds: options.ComputeSeconds = None,
    plan: options.Plans = None,
    quick: Annotated[bool, typer.Option(help="A replay of a few steps only, which the answer then says.")] = False,
    workers: options.SharedBy = None,
    local_steps: Annotated[
        str | None, typer.Option(metavar="H|auto", help="Number of local steps between two exchanges, or auto.")
    ] = None,
    average_ranks: options.AverageRanks = 1,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:
    if "," in nodes:
        raise GradlabError(f"--nodes {nodes[:80]!r}: expected one number of nodes; several links may be asked about")
    sharing, allowed = options.workers_of(workers), options.share_of_loss(max_loss)
    links = _links(bandwidth, latency)
    files = Files.chosen(out, [link.bits_per_second for link in links], overwrite)
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        profile = options.profile_of_step(compute_seconds, opened)
        require_computing(profile)
        fsdp = fsdp or opened.metadata.get("fully_shard") is True
        counts, node = options.nodes_of(nodes, inside, fsdp=fsdp)
        processor = options.processor_of(bandwidth)
        network = Network(links, counts, profile, node=node, processor=processor, gpu=opened.on_gpu)
        if local_steps is not None:
            _answer_local_steps(opened, network, local_steps, out, overwrite, as_json)
            return
        search = Search(opened, loaded_plans(plan or ()), network, fsdp, quick)
        tried, remarks = search.tried(allowed, sharing, progress)
    if tried.speed is None:
        raise GradlabError(" ".join(remarks) or f"{trace}: no plan could be forecast")
    found = choose(tried.speed, search.stands_in)
    remarks += search.traffic(found, tried)
    saved = search.save(found, tried, files, overwrite)
    written = {**saved.to_json(), "remarks": remarks, "frontier": [row.to_json() for row in tried.frontier]}
    if len(found) > 1:
        _print_several(tried.speed, found, saved, written, as_json, stands_in=search.stands_in)
    elif as_json:
        print_json({**found[0].to_json(), **saved.at(0), **written})
    else:
        Answer([found[0].text], remarks, notes=saved.lines()).print()


def _answer_local_steps(
    trace: Trace, network: Network, local_steps: str, out: Path, overwrite: bool, as_json: bool
) -> None:
    """Answer by how trainings with local steps ended: no plan is replayed."""
    if len(network.links) > 1 or network.node is not None:
        raise GradlabError("--local-steps: expected one link speed, and nodes of one rank")
    every = None if local_steps == "auto" else options.counts_of(local_steps, "--local-steps")[0]
    best, plan = advise_local_steps(trace.model_layers, network, every)
    ended = ended_text(ended_above(best.plan))
    text = f"{best.advice[:1].upper()}{best.advice[1:]}. So our trainings ended {ended}."
    lines = []
    if best.local_steps:
        told = {"method": "local steps", "local_steps": best.local_steps}
        path = Artifact(plan, told).save(out, overwrite)
        lines = [f"\n{local_lines(path, best.local_steps)}", f"\n{path}"]
    if as_json:
        print_json({"text": text, **best.to_json(sorted({*NUMBERS, best.local_steps} - {0}))})
    else:
        Answer([text], notes=lines).print()


def _links(bandwidth: str, latency: str) -> list[Link]:
    """Read the links that are asked about: one that was measured, or several speeds."""
    links = options.links_of(bandwidth, latency)
    if len(links) > MOST_LINKS:
        raise GradlabError(f"--bandwidth: {len(links)} link speeds, expected at most {MOST_LINKS}")
    return links


def _print_several(
    speed: SpeedForecast,
    found: Sequence[Recommendation],
    saved: Saved,
    written: Mapping[str, Any],
    as_json: bool,
    stands_in: str,
) -> None:
    """Print the answers for several links: a table, and lines on all of them."""
    cautions, lines = caution_lines(speed.judged.values()), lines_for_several(speed, found, stands_in)
    table = networks_table(speed)
    if as_json:
        networks = [
            {
                "nodes": at.nodes,
                "bits_per_second": json_rate(at.bits_per_second),
                "final_loss": row[-1],
                **one.to_json(),
                **saved.at(place),
            }
            for place, (at, one, row) in enumerate(zip(speed.configurations, found, table.rows, strict=True))
        ]
        print_json({"text": "\n".join([*cautions, *lines]), "networks": networks, **written})
        return
    Answer(cautions, tables=[table]).print()
    Answer(lines, written["remarks"], notes=saved.lines()).print()
