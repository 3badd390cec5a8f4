"""Predict the step time of an artifact's plan beside the fastest dense one, before there are any nodes.

The table shows plain DDP in 32 and in 16 bits. The 16-bit row counts half the bytes and no time for casting.

Codec times come from the run that --compute-seconds names, else from the artifact's replay, else they are taken
here. Bytes and rounds come from the codecs' own code at that number of nodes.

--measured takes a list of objects {"nodes": 4, "bytes": 44700000, "bandwidth": "200mbit", "seconds": 2.95}, one
per measured all-reduce. Processor time per byte and a cost per collective are fitted to them. An entry
with "collective": "all-gather" measures an all-gather. If those are slower per byte, forecasts use that ratio.

With several ranks per node, --bandwidth is that of a node's link, which its ranks share, and --inside that among
them. The plan then runs between nodes (docs/training.md), beside the fastest of three dense ways: plain DDP,
averages inside nodes first (hierarchical), and native HSDP. With --fsdp it runs on FSDP2's shards, and backward
waits. Where nodes have one rank, --fsdp shards over all of them, and the plan runs in the reduce-scatter (within=).
--parameters int8 takes FSDP2's gathers quantized, as compress_fsdp(parameters="int8") sends them.

With --local-steps ranks exchange what H steps add up to. Either they wait for the exchange of all layers, or it
streams: the model travels while steps go on, until the next exchange. The break-even H is the smallest number
of local steps at which a step is no slower than one that exchanges gradients. Each H costs loss of its own: "above"
has the nats that our training of text ended above synchronous training (docs/local-steps.md), and --out draws its
loss over the time that it would take on your link.

Examples:

  gradlab predict powersgd.safetensors --nodes 4,64,1024 --bandwidth 1gbit --compute-seconds 0.36s

  gradlab predict topk.safetensors --bandwidth 200mbit,1gbit,25gbit --compute-seconds run.json --out steps.svg

  gradlab predict int8.safetensors --nodes 2x8,8x8 --inside 400gbit --bandwidth 25gbit --compute-seconds run.json

  gradlab predict powersgd.safetensors --nodes 8x8 --fsdp --bandwidth 25gbit --compute-seconds run.json

  gradlab predict int4.safetensors --bandwidth 50mbit --compute-seconds 0.36s --local-steps 8,30

  gradlab predict powersgd.safetensors --compute-seconds 0.36s --measured times.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gradlab.analysis.figures.chart import write_chart
from gradlab.analysis.forecast import Forecast, Network, forecast
from gradlab.analysis.forecast.calibration import calibrate_link, read_observations
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.forecast.local_endings import ended_above
from gradlab.analysis.forecast.local_steps import LocalSteps, forecast_local_steps
from gradlab.analysis.forecast.network import profile_of
from gradlab.analysis.forecast.plans import pays_text, traffic_text
from gradlab.analysis.forecast.state import state_of_rank, state_text
from gradlab.analysis.outputs import require_figure
from gradlab.artifact import Artifact
from gradlab.cli import options
from gradlab.cli.console import Answer, Table, print_json, progress_bars
from gradlab.codecs.block_scaled import FORMATS
from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, format_counted, format_ratio, format_seconds


def predict(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A .safetensors file made by gradlab fit.")],
    nodes: Annotated[
        str, typer.Option(metavar="N[xR],...", help="Numbers of nodes, and of ranks on each: 4,64 or 2x8,8x8.")
    ] = "4,64,1024",
    inside: options.InsideLink = "400gbit",
    fsdp: Annotated[bool, typer.Option("--fsdp", help="The plan runs on FSDP2's shards (compress_fsdp).")] = False,
    parameters: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Format of FSDP2's gathers of parameters, such as int8; with --fsdp."),
    ] = None,
    bandwidth: Annotated[
        str, typer.Option(help="Link speeds, with commas: 200mbit,1gbit; or link.json of `gradlab doctor`.")
    ] = "1gbit",
    latency: options.Latency = "100us",
    compute_seconds: options.ComputeSeconds = None,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="MiB of DDP's buckets, or FSDP2's units. [default: DDP's; numbered blocks]")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(metavar="TIMES.json", help="Measured collectives to calibrate links by; see above.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FIGURE",
            help="Drawing (.svg, .pdf) of step time over link speed, or with --local-steps of loss over wall time.",
        ),
    ] = None,
    local_steps: Annotated[
        str | None, typer.Option(metavar="H,H", help="Numbers of local steps between two exchanges: 8,30,100.")
    ] = None,
    overwrite: options.Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the curves of the figure.")] = False,
) -> None:

    links = options.links_of(bandwidth, latency)
    counts, node = options.nodes_of(nodes, inside, fsdp=fsdp, over_nodes=True)
    calibration = calibrate_link(links[0], read_observations(measured)) if measured is not None else None
    if out is not None:
        require_figure(out, overwrite)
    numbers = _local_steps_of(local_steps, fsdp and node is None)
    times, loaded = _times(compute_seconds), Artifact.load(artifact)
    profile, processor = profile_of(loaded, *times), options.processor_of(bandwidth)
    how: dict[str, Any] = {"processor": processor, "parameters": _format_of(parameters, fsdp)}
    how["sharded"] = fsdp and node is None
    network = Network(links, counts, profile, bucket_cap_mb=bucket_cap_mb, node=node, **how)
    with progress_bars() as progress:
        more: dict[str, Any] = {"calibration": calibration, "uncompressed": numbers is not None}
        result = forecast(loaded.plan, network, progress=progress, **more)
        local = [] if numbers is None else forecast_local_steps(loaded.plan, network, result, calibration, progress)
    _draw(result, local, out)
    if as_json:
        kept = {count: state_of_rank(loaded.plan, count, network) for count in network.nodes}
        written = {} if numbers is None else {"local_steps": [one.to_json(numbers) for one in local]}
        print_json({**result.to_json(), "state_bytes": kept, **written})
        return
    _answer(result, [state_text(loaded.plan, network), str(out or "")]).print()
    if numbers is not None:
        _local_answer(local, numbers).print()


def _times(compute_seconds: str | None) -> tuple[Any, ...]:
    run, recorded = options.run_of(compute_seconds), options.recorded_times_of(compute_seconds)
    told = run is not None or recorded is not None or compute_seconds is None
    seconds = None if told else options.computing_seconds(str(compute_seconds))
    return run, seconds, recorded


def _local_steps_of(text: str | None, sharded: bool) -> list[int] | None:
    if text is not None and sharded:
        raise GradlabError("--local-steps and --fsdp: expected nodes of several ranks, such as --nodes 2x8")
    return None if text is None else options.counts_of(text, "--local-steps")


def _draw(result: Forecast, local: Sequence[LocalSteps], out: Path | None) -> None:
    if out is None:
        return
    from gradlab.analysis.questions.pays import loss_chart, step_time_chart

    write_chart(loss_chart(local) if local else step_time_chart(result), out)


def _format_of(parameters: str | None, fsdp: bool) -> str:
    if parameters is None:
        return ""
    if not fsdp or parameters not in FORMATS:
        where = "" if fsdp else " with --fsdp"
        raise GradlabError(f"--parameters {parameters[:40]!r}: expected one of {', '.join(FORMATS)}{where}")
    return parameters


def _local_answer(forecasts: Sequence[LocalSteps], numbers: Sequence[int]) -> Answer:

    above = ended_above()
    columns = ["nodes", "link", "H", "step", "streaming", "uncompressed", "above"]
    rows = [
        [
            str(one.nodes),
            spell_rate(one.bits_per_second),
            str(every),
            format_seconds(one.seconds(every)),
            format_seconds(one.seconds(every, streaming=True)),
            format_seconds(one.seconds(every, dense=True)),
            f"{above[every]:.2f}" if every in above else "-",
        ]
        for one in forecasts
        for every in numbers
    ]
    notes = [
        f"{format_counted(one.nodes, 'node')}, {spell_rate(one.bits_per_second)}: "
        f"an exchange takes {format_seconds(one.exchange)}, "
        f"local steps break even at H = {one.break_even} and are within 5 % of computing from H = {one.close} on"
        for one in forecasts
    ]
    return Answer(tables=[Table("a step with an exchange after every H local steps", columns, rows, 0)], notes=notes)


def _answer(result: Forecast, notes: Sequence[str]) -> Answer:
    columns = [
        "nodes", "link", "dense step", "16-bit step", "step", "speed-up", "vs 16 bits", "codec exposed",
        "network exposed", "wire",
    ]  # fmt: skip
    rows = [
        [
            str(count),
            spell_rate(pair.link.bits_per_second),
            format_seconds(pair.dense.seconds),
            format_seconds(pair.half.seconds),
            format_seconds(pair.compressed.seconds),
            format_ratio(pair.speedup),
            format_ratio(pair.speedup_to_16_bits),
            format_seconds(pair.compressed.encode),
            format_seconds(pair.compressed.communicate),
            format_bytes(pair.compressed.wire_bytes),
        ]
        for count, pair in result.comparisons
    ]
    if result.network.node is not None:
        columns.insert(3, "dense way")
        for row, (_, pair) in zip(rows, result.comparisons, strict=True):
            row.insert(3, pair.dense_way)
    found = [
        f"computing alone: {format_seconds(result.network.profile.compute_seconds)} per step",
        *(
            f"{format_counted(node.job.world_size, 'node')}: compression {pays_text(node.break_even)}, "
            f"and beside plain 16 bits {pays_text(node.half_break_even)}"
            for node in result.nodes
        ),
        *filter(None, (traffic_text(node, result.network) for node in result.nodes)),
    ]
    return Answer(
        [result.verdict], result.remarks, [Table(result.method, columns, rows, 0)], [*found, *filter(None, notes)]
    )
