"""`gradlab fit lgreco`: a setting per layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import OUT, print_json, print_table, progress_bars
from gradlab.cli.fit.options import AsJson, FitWarmup, Folder, Overwrite, Seed, Target, parse_settings
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.layout import Layer


def lgreco(
    trace: Folder,
    out: Target,
    codec: Annotated[str, typer.Option(help="Of the uniform plan that is known to train well.")] = "powersgd",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Its setting: rank=4, density=0.01, bits=4; repeatable."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="The error allowed, in the uniform plan's.")] = 1.0,
    grid: Annotated[
        str,
        typer.Option(help="Settings by layer: paper, D/2 to 2 D (densities D/10 to 10 D), or own, the codec's list."),
    ] = "paper",
    family: Annotated[
        list[str] | None,
        typer.Option(help="Choose among families: PCA, PowerSGD, top-k, QSGD, signs, cast, or all; repeatable."),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Iterations that PCA bases are fitted on, ahead of those that errors are measured on.")
    ] = 50,
    metric: Annotated[str, typer.Option(help="squared: errors add up as squares; plain: as norms.")] = "squared",
    window: Annotated[
        int | None, typer.Option(help="Steps that gradients are accumulated over; a quarter of the trace by default.")
    ] = None,
    start: Annotated[int, typer.Option(help="Position of the first recorded step to look at.")] = 0,
    cost: Annotated[
        str,
        typer.Option(
            help="To be small: payload (bytes, the paper's), wire (bytes at --nodes), seconds (summed, as if nothing "
            "were hidden), or step: the step predicted, which needs --compute-seconds."
        ),
    ] = "payload",
    weights: Annotated[
        str,
        typer.Option(
            metavar="none|linear|TIMES.json",
            help="Of a layer's cost: none; linear: its bucket's number, as the last travel unhidden; or what a byte "
            "costs in its bucket, from measured samples: {sizes: bytes by sample and bucket, seconds: by sample}.",
        ),
    ] = "none",
    bucket_cap_mb: Annotated[float | None, typer.Option(help="DDP's bucket size in MiB, for buckets' figures.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Ranks that it is for; the trace's by default.")] = None,
    bandwidth: Annotated[str, typer.Option(help="Of the link, for seconds.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="Of the link, for seconds.")] = "100us",
    compute_seconds: Annotated[
        str | None, typer.Option(help="A step without gradient exchange, for --cost step: 0.36s, 120ms.")
    ] = None,
    cores: Annotated[float, typer.Option(help="Per rank, for computing and codecs, for --cost step.")] = 2.0,
    workers: Annotated[int, typer.Option(help="Processes that measure errors.")] = 1,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A dask.distributed scheduler to measure them on.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FIGURE", help="Draw what every layer got (.svg, .pdf).")
    ] = None,
    frontier: Annotated[
        Path | None, typer.Option(metavar="FIGURE", help="Draw size over error for all planners (.svg, .pdf).")
    ] = None,
    over_time: Annotated[
        Path | None, typer.Option(metavar="FIGURE", help="Draw what planners choose window by window (.svg, .pdf).")
    ] = None,
    refresh: Annotated[
        int, typer.Option(metavar="N", help="Choose anew after every N iterations of training; 0: never.")
    ] = 0,
    warmup_steps: FitWarmup = 0,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """L-GreCo: a setting per layer, the smallest plan with no more error than a uniform one.

    Errors are those of gradients accumulated over windows of the trace, of all ranks, without feedback; half of the
    windows are chosen on, the others check the choice. The plan is the smallest there is: the search proves it. (Of
    --cost step it proves how much faster another could be.)

    Example:

      gradlab fit lgreco trace --codec powersgd --set rank=4 --out lgreco.safetensors

      gradlab fit lgreco trace --codec topk --set density=0.01 --workers 4 --figure layers.svg --out topk.safetensors

      gradlab fit lgreco trace --codec powersgd --set rank=4 --family all --cost wire --nodes 8 --out hybrid.safetensors

      gradlab fit lgreco trace --codec powersgd --set rank=4 --cost step --compute-seconds 0.36s --bandwidth 200mbit
      --out fast.safetensors
    """
    from functools import partial

    from gradlab.analysis.forecast.link import Link, parse_bandwidth, parse_seconds
    from gradlab.analysis.layer_plan.costs import Cost
    from gradlab.analysis.layer_plan.grids import candidates_of_grid
    from gradlab.analysis.layer_plan.lgreco import fit_lgreco
    from gradlab.analysis.layer_plan.over_time import learning_rates_of, plan_over_time
    from gradlab.analysis.layer_plan.step_time_search import StepModel
    from gradlab.analysis.outputs import require_free
    from gradlab.cli.figures import require_figure, write_figure
    from gradlab.trace import Trace

    require_free(out, overwrite)
    for target in (figure, frontier, over_time):
        if target is not None:
            require_figure(target, overwrite)
    link = Link(parse_bandwidth(bandwidth), parse_seconds(latency)) if cost in ("seconds", "step") else None
    step = None
    if cost == "step":
        if compute_seconds is None:
            raise GradlabError("--cost step needs --compute-seconds, the time of a step without gradient exchange")
        step = StepModel(parse_seconds(compute_seconds), cores, bucket_cap_mb)
    reference = parse_settings(setting or [])
    with Trace(trace) as opened, progress_bars() as progress:
        candidates, first = candidates_of_grid(
            opened, codec, reference, grid=grid, families=family or (), start=start, samples=samples, progress=progress
        )
        found = fit_lgreco(
            opened,
            codec,
            reference,
            candidates=candidates,
            alpha=alpha,
            metric=metric,
            window=window,
            start=first,
            cost=Cost("seconds" if cost == "step" else cost, link),
            weights=_weights(weights, opened.layers, bucket_cap_mb),
            step=step,
            world_size=nodes,
            warmup_steps=warmup_steps,
            refresh_every=refresh,
            seed=seed,
            workers=workers,
            cluster=dask,
            progress=progress,
        )
        moments = learning_rates_of(opened, found.problem.table.windows)
        planned = plan_over_time(found.problem, moments, metric=metric, alpha=alpha) if over_time is not None else None
        by_time = planned.to_json(opened, bucket_cap_mb) if planned is not None else {}
    found.artifact().save(out, overwrite)
    for target, draw in (
        (figure, lambda plots: plots.plot_layers(found.origin)),
        (frontier, lambda plots: plots.plot_frontier(found.frontier())),
        (over_time, lambda plots: plots.plot_over_time(by_time)),
    ):
        if target is not None:
            from gradlab.analysis.figures import layer_plans as layer_plan_plots  # loads matplotlib

            write_figure(partial(draw, layer_plan_plots), target)
    if as_json:
        print_json(found.origin)
        return
    print_layer_plan(found.origin)
    for path in (out, figure, frontier, over_time):
        if path is not None:
            OUT.print(str(path), markup=False)


def _weights(named: str, layers: Sequence[Layer], bucket_cap_mb: float | None) -> dict[str, float] | None:
    from gradlab.analysis.layer_plan.bucket_time import linear_priority, read_bucket_times, time_weights

    if named == "none":
        return None
    if named == "linear":
        return linear_priority(layers, bucket_cap_mb)
    if not named.endswith(".json"):
        raise GradlabError(f"weights {named!r}, expected none, linear or a .json file of measured bucket times")
    return time_weights(layers, read_bucket_times(Path(named)), bucket_cap_mb)


def print_layer_plan(origin: dict[str, Any]) -> None:
    """Whether it pays; then what every layer got, and how it compares with the uniform plan there."""
    from gradlab.analysis.report.tables import layer_plan_table
    from gradlab.analysis.report.verdict import layer_plan_verdict

    OUT.print(layer_plan_verdict(origin), markup=False)
    table = layer_plan_table(origin)
    print_table(table.title, table.columns, table.rows, left=table.text_columns)
