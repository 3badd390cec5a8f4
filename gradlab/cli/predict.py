"""`gradlab predict`: step time over nodes and link speeds, and the break-even speed of compression."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.cli.console import OUT, print_json, print_table, print_warnings, progress_bars
from gradlab.cli.figures import require_figure, write_figure
from gradlab.cli.network_options import (
    ComputeSeconds,
    InsideLink,
    Latency,
    LocalRanks,
    computing_seconds,
    node_counts,
    node_of,
    whole_numbers,
)

if TYPE_CHECKING:
    from gradlab.analysis.forecast import Forecast
    from gradlab.analysis.forecast.local_steps import LocalSteps


def predict(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A .safetensors file made by gradlab fit.")],
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, with commas.")] = "4,64,1024",
    local_ranks: LocalRanks = 1,
    inside: InsideLink = "400gbit",
    fsdp: Annotated[bool, typer.Option("--fsdp", help="The plan runs on FSDP2's shards (compress_fsdp).")] = False,
    bandwidth: Annotated[
        str, typer.Option(help="Link speeds, with commas: 200mbit,1gbit,25gbit; decimal bits per second.")
    ] = "1gbit",
    latency: Latency = "100us",
    compute_seconds: ComputeSeconds = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN.json", help="A run's report (gradlab train --compress --out): its times."),
    ] = None,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="DDP's bucket size in MiB; its default if left out. With --fsdp, of its units.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="TIMES.json", help="Measured collectives, to calibrate links by; see above."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FIGURE", help="Draw step time over link speed (.svg, .pdf).")
    ] = None,
    local_steps: Annotated[
        str | None,
        typer.Option(
            metavar="H,H",
            help="Numbers of local steps between two exchanges, as 8,30,100: their times too (OuterStep).",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a figure that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the curves of the figure.")] = False,
) -> None:
    """Predict the step time of an artifact's plan beside the fastest dense one, before there are any nodes.

    The table shows plain DDP in 32 and in 16 bits. The 16-bit row counts half the bytes and no time for casting.

    Computing time comes from --compute-seconds or --run. Codec times come from the run, else from the artifact's
    replay, else they are taken here. Bytes and rounds come from the codecs' own code at that number of nodes.

    --measured takes a list of objects {"nodes": 4, "bytes": 44700000, "bandwidth": "200mbit", "seconds": 2.95}, one
    per measured all-reduce. Processor time per byte and a cost per collective are fitted to them. An entry
    with "collective": "all-gather" measures an all-gather. If those are slower per byte, forecasts use that ratio.

    With --local-ranks, --bandwidth is that of a node's link, which its ranks share, and --inside that among them. The
    plan then runs between nodes (docs/training.md), beside the fastest of three dense ways: plain DDP, averages inside
    nodes first (hierarchical), and native HSDP. With --fsdp it runs on FSDP2's shards, and backward waits.

    With --local-steps ranks exchange what H steps add up to. Either they wait for the exchange of all layers, or it
    streams: the model travels while steps go on, until the next exchange. The break-even H is the smallest number
    of local steps at which a step is no slower than one that exchanges gradients.

    Examples:

      gradlab predict powersgd.safetensors --nodes 4,64,1024 --bandwidth 1gbit --compute-seconds 0.36s

      gradlab predict topk.safetensors --nodes 8 --bandwidth 200mbit,1gbit,25gbit --run run.json --out steps.svg

      gradlab predict int8.safetensors --nodes 2,8 --local-ranks 8 --inside 400gbit --bandwidth 25gbit --run run.json

      gradlab predict powersgd.safetensors --nodes 8 --local-ranks 8 --fsdp --bandwidth 25gbit --run run.json

      gradlab predict int4.safetensors --bandwidth 50mbit --compute-seconds 0.36s --local-steps 8,30

      gradlab predict powersgd.safetensors --compute-seconds 0.36s --measured times.json
    """
    from gradlab.analysis.forecast import Network, forecast
    from gradlab.analysis.forecast.calibration import calibrate_link, read_observations
    from gradlab.analysis.forecast.link import Link, parse_bandwidth, parse_seconds
    from gradlab.analysis.forecast.local_steps import forecast_local_steps
    from gradlab.analysis.forecast.profile import profile_of
    from gradlab.artifact import Artifact

    waiting = parse_seconds(latency)
    links = [Link(parse_bandwidth(rate), waiting) for rate in bandwidth.split(",")]
    calibration = calibrate_link(links[0], read_observations(measured)) if measured is not None else None
    counts = node_counts(nodes)
    seconds = computing_seconds(compute_seconds) if compute_seconds is not None else None
    if out is not None:
        require_figure(out, overwrite)
    numbers = None if local_steps is None else whole_numbers(local_steps, "local steps", "8,30,100")
    loaded = Artifact.load(artifact)
    profile = profile_of(loaded, run, seconds)
    network = Network(links, counts, profile, bucket_cap_mb=bucket_cap_mb, node=node_of(local_ranks, inside, fsdp=fsdp))
    with progress_bars() as progress:
        result = forecast(
            loaded.plan, network, calibration=calibration, progress=progress, uncompressed=numbers is not None
        )
        local = None if numbers is None else forecast_local_steps(loaded.plan, network, result, calibration, progress)
    if out is not None:
        from gradlab.analysis.chart import draw
        from gradlab.analysis.questions.pays import step_time_chart

        write_figure(lambda: draw(step_time_chart(result)), out)
    if as_json and local is not None:
        print_json({**result.to_json(), "local_steps": [one.to_json(numbers or ()) for one in local]})
    elif as_json:
        print_json(result)
    else:
        _print(result, out)
        if local is not None:
            _print_local_steps(local, numbers or ())


def _print_local_steps(forecasts: Sequence[LocalSteps], numbers: Sequence[int]) -> None:
    from gradlab.analysis.forecast.link import spell_rate
    from gradlab.formatting import format_counted, format_seconds

    columns = ["nodes", "link", "H", "step", "streaming", "uncompressed"]
    rows = [
        [
            str(one.nodes),
            spell_rate(one.bits_per_second),
            str(every),
            format_seconds(one.seconds(every)),
            format_seconds(one.seconds(every, streaming=True)),
            format_seconds(one.seconds(every, dense=True)),
        ]
        for one in forecasts
        for every in numbers
    ]
    print_table("a step with an exchange after every H local steps", columns, rows, left=0)
    for one in forecasts:
        OUT.print(
            f"{format_counted(one.nodes, 'node')}, {spell_rate(one.bits_per_second)}: "
            f"an exchange takes {format_seconds(one.exchange)}, "
            f"local steps break even at H = {one.break_even} and are within 5 % of computing from H = {one.close} on",
            markup=False,
        )


def _print(result: Forecast, out: Path | None) -> None:
    from gradlab.analysis.forecast.link import spell_rate
    from gradlab.analysis.forecast.plans import pays_text
    from gradlab.formatting import format_bytes, format_counted, format_ratio, format_seconds

    OUT.print(result.verdict, markup=False)
    print_warnings(result.remarks)
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
    columns = [
        "nodes",
        "link",
        "dense step",
        "16-bit step",
        "step",
        "speed-up",
        "vs 16 bits",
        "codec exposed",
        "network exposed",
        "wire",
    ]
    if result.network.node is not None:
        columns.insert(3, "dense way")
        for row, (_, pair) in zip(rows, result.comparisons, strict=True):
            row.insert(3, pair.dense_way)
    print_table(result.method, columns, rows, left=0)
    OUT.print(f"computing alone: {format_seconds(result.network.profile.compute_seconds)} per step", markup=False)
    for node in result.nodes:
        OUT.print(
            f"{format_counted(node.job.world_size, 'node')}: compression {pays_text(node.break_even)}, "
            f"and beside plain 16 bits {pays_text(node.half_break_even)}",
            markup=False,
        )
    if out is not None:
        OUT.print(str(out), markup=False)
