"""`gradlab fit lgreco`: a setting per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.cli.console import OUT, print_table, progress_bars
from gradlab.cli.fit.options import AsJson, Folder, Overwrite, Seed, Target, Warmup, print_fit
from gradlab.cli.network_options import InsideLink, LocalRanks, node_of
from gradlab.cli.setting_texts import parse_settings
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.forecast.network import Network
    from gradlab.analysis.layer_plan.costs import Cost
    from gradlab.analysis.layer_plan.lgreco import LgrecoFit, LgrecoOptions
    from gradlab.analysis.layer_plan.over_time import CompressionOverTime
    from gradlab.analysis.layer_plan.problem import Problem
    from gradlab.analysis.layer_plan.provenance import LgrecoProvenance
    from gradlab.layout import Layer
    from gradlab.trace import Trace

Codec = Annotated[str, typer.Option(help="Codec of the uniform plan, which you know to train well.")]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A setting of that codec: rank=4, density=0.01, bits=4; repeatable."
    ),
]
Alpha = Annotated[float, typer.Option(help="The error that the plan may have, as a multiple of the uniform plan's.")]
Hold = Annotated[
    bool,
    typer.Option(
        "--hold",
        help="If the plan's error on later iterations is larger than --alpha allows, take the largest alpha whose plan "
        "keeps to it.",
    ),
]
Grid = Annotated[
    str,
    typer.Option(
        help="Settings to choose from: paper (D/2 to 2 D; densities D/10 to 10 D), or own (the codec's list)."
    ),
]
Families = Annotated[
    list[str] | None,
    typer.Option(help="Choose among families: PCA, PowerSGD, top-k, QSGD, ECSQ, signs, cast, or all; repeatable."),
]
Samples = Annotated[
    int, typer.Option(help="Iterations that PCA bases are fitted on, ahead of those that errors are measured on.")
]
Metric = Annotated[
    str,
    typer.Option(
        help="How errors of layers are added up: l2 (L2 norms, as in the paper) or squared-l2 (their squares)."
    ),
]
Window = Annotated[
    int | None, typer.Option(help="Steps that gradients are accumulated over; a quarter of the trace by default.")
]
Start = Annotated[int, typer.Option(help="Position of the first recorded step to look at.")]
CostName = Annotated[
    str,
    typer.Option(
        help="What the plan minimises: payload (bytes, as in the paper), wire (bytes sent among --nodes ranks), "
        "seconds (summed over layers, as if nothing were hidden), or step (predicted; needs --compute-seconds)."
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        metavar="none|linear|TIMES.json",
        help="Factor of each layer's cost. none: 1. linear: the number of its bucket, because backward hides the last "
        "buckets least. A file: what a byte costs in each bucket, fitted to measured samples "
        "{sizes: bytes by sample and bucket, seconds: by sample}.",
    ),
]
BucketCap = Annotated[float | None, typer.Option(help="DDP's bucket size in MiB, for buckets' figures.")]
Nodes = Annotated[int | None, typer.Option(help="Number of ranks that will train; the trace's by default.")]
Bandwidth = Annotated[str, typer.Option(help="Speed of a node's link, for --cost seconds and step: 200mbit, 10gbit.")]
LinkLatency = Annotated[str, typer.Option(help="One-way latency of that link: 50us, 1ms.")]
ComputeSeconds = Annotated[
    str | None, typer.Option(help="A step without gradient exchange, for --cost step: 0.36s, 120ms.")
]
Cores = Annotated[float, typer.Option(help="Per rank, for computing and codecs, for --cost step.")]
Layers = Annotated[Path | None, typer.Option(metavar="FIGURE", help="Draw what every layer got (.svg, .pdf).")]
Frontier = Annotated[
    Path | None, typer.Option(metavar="FIGURE", help="Draw size over error for all planners (.svg, .pdf).")
]
OverTime = Annotated[
    Path | None, typer.Option(metavar="FIGURE", help="Draw what planners choose window by window (.svg, .pdf).")
]
Refresh = Annotated[int, typer.Option(metavar="N", help="Choose anew after every N iterations of training; 0: never.")]

Accordion = Annotated[
    str | None,
    typer.Option(
        metavar="MOST:LEAST",
        help="With --refresh, let Accordion say how much error is allowed: in critical regimes that of the second "
        "setting, elsewhere that of the first, more compressed one. 2:8 for ranks.",
    ),
]


def lgreco(
    trace: Folder,
    out: Target,
    codec: Codec = "powersgd",
    setting: Setting = None,
    alpha: Alpha = 1.0,
    hold: Hold = False,
    grid: Grid = "paper",
    family: Families = None,
    samples: Samples = 50,
    metric: Metric = "l2",
    window: Window = None,
    start: Start = 0,
    cost: CostName = "payload",
    weights: Weights = "none",
    bucket_cap_mb: BucketCap = None,
    nodes: Nodes = None,
    bandwidth: Bandwidth = "1gbit",
    latency: LinkLatency = "100us",
    local_ranks: LocalRanks = 1,
    inside: InsideLink = "400gbit",
    compute_seconds: ComputeSeconds = None,
    cores: Cores = 2.0,
    workers: Processes = None,
    dask: Dask = None,
    figure: Layers = None,
    frontier: Frontier = None,
    over_time: OverTime = None,
    refresh: Refresh = 0,
    accordion: Accordion = None,
    warmup_steps: Warmup = 0,
    seed: Seed = 0,
    average_ranks: AverageRanks = 1,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """L-GreCo: a setting per layer, the smallest plan with no more error than a uniform one.

    All ranks' gradients are accumulated over windows of the trace, and compressed without feedback. The plan is chosen
    on the first half of the windows and checked on the other half. If its error there is above the uniform plan's, the
    largest alpha at which it is not is named, and --hold takes it. The search proves that no plan is smaller. With
    --cost step it proves how much faster another plan could be at most.

    Example:

      gradlab fit lgreco trace --codec powersgd --set rank=4 --out lgreco.safetensors

      gradlab fit lgreco trace --codec topk --set density=0.01 --workers 4 --figure layers.svg --out topk.safetensors

      gradlab fit lgreco trace --codec qsgd --set bits=4 --hold --out qsgd.safetensors

      gradlab fit lgreco trace --codec powersgd --set rank=4 --family all --cost wire --nodes 8 --out hybrid.safetensors

      gradlab fit lgreco trace --codec powersgd --set rank=4 --refresh 400 --accordion 2:8 --out accordion.safetensors

      gradlab fit lgreco trace --codec powersgd --set rank=4 --cost step --compute-seconds 0.36s --bandwidth 200mbit
      --out fast.safetensors
    """
    from gradlab.analysis.layer_plan.grids import candidates_of_grid
    from gradlab.analysis.layer_plan.lgreco import LgrecoOptions, fit_lgreco
    from gradlab.trace import Trace

    _require_free(out, (figure, frontier, over_time), overwrite)
    sharing = workers_of(workers, dask)
    reference = parse_settings(setting or [])
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        ranks = opened.world_size if nodes is None else nodes
        small, step = _objective(cost, bandwidth, latency, ranks, compute_seconds, cores, bucket_cap_mb)
        node = node_of(local_ranks, inside)
        small, step = replace(small, local_ranks=local_ranks), step and replace(step, node=node)
        candidates, first = candidates_of_grid(
            opened,
            codec,
            reference,
            grid=grid,
            families=family or (),
            start=start,
            samples=samples,
            workers=sharing,
            progress=progress,
        )
        options = LgrecoOptions(candidates, alpha=alpha, hold=hold, metric=metric, window=window, start=first)
        options = replace(options, cost=small, step=step, weights=_weights(weights, opened.model_layers, bucket_cap_mb))
        options = replace(options, world_size=ranks, warmup_steps=warmup_steps, refresh_every=refresh, seed=seed)
        options = replace(options, accordion=_between(accordion), workers=sharing)
        fit = fit_lgreco(opened, codec, reference, options, progress=progress)
        windows = None if over_time is None else _plans_by_window(opened, fit.problem, options, bucket_cap_mb)
    fit.artifact().save(out, overwrite)
    _draw(fit, windows, figure, frontier, over_time)
    print_fit(
        fit.provenance.to_json(), as_json, partial(print_layer_plan, fit.provenance), out, figure, frontier, over_time
    )


def _between(text: str | None) -> tuple[float, float] | None:
    """Read MOST:LEAST."""
    if text is None:
        return None
    most, _, least = text.partition(":")
    try:
        return float(most), float(least)
    except ValueError:
        raise GradlabError(f"accordion {text[:80]!r}, expected two values, as 2:8") from None


def _require_free(out: Path, figures: Sequence[Path | None], overwrite: bool) -> None:
    from gradlab.analysis.outputs import require_free
    from gradlab.cli.figures import require_figure

    require_free(out, overwrite)
    for figure in figures:
        if figure is not None:
            require_figure(figure, overwrite)


def _objective(
    cost: str,
    bandwidth: str,
    latency: str,
    ranks: int,
    compute_seconds: str | None,
    cores: float,
    bucket_cap_mb: float | None,
) -> tuple[Cost, Network | None]:
    """What is to be small; for --cost step also what steps are predicted for."""
    from gradlab.analysis.forecast.link import Link, parse_bandwidth, parse_seconds
    from gradlab.analysis.forecast.network import Network
    from gradlab.analysis.forecast.profile import Profile
    from gradlab.analysis.layer_plan.costs import Cost

    if cost not in ("seconds", "step"):
        return Cost(cost), None
    link = Link(parse_bandwidth(bandwidth), parse_seconds(latency))
    if cost == "seconds":
        return Cost("seconds", link), None
    if compute_seconds is None:
        raise GradlabError("--cost step needs --compute-seconds, the time of a step without gradient exchange")
    profile = Profile(parse_seconds(compute_seconds), "as given")
    return Cost("seconds", link), Network([link], [ranks], profile, cores, bucket_cap_mb)


def _weights(name: str, layers: Sequence[Layer], bucket_cap_mb: float | None) -> dict[str, float] | None:
    from gradlab.analysis.layer_plan.bucket_time import linear_priority, read_bucket_times, time_weights

    if name == "none":
        return None
    if name == "linear":
        return linear_priority(layers, bucket_cap_mb)
    if not name.endswith(".json"):
        raise GradlabError(f"weights {name!r}, expected none, linear or a .json file of measured bucket times")
    return time_weights(layers, read_bucket_times(Path(name)), bucket_cap_mb)


def _plans_by_window(
    trace: Trace, problem: Problem, options: LgrecoOptions, bucket_cap_mb: float | None
) -> CompressionOverTime:
    from gradlab.analysis.layer_plan.over_time import learning_rates_of, plan_over_time

    rates = learning_rates_of(trace, problem.table.windows)
    plans = plan_over_time(problem, rates, metric=options.metric, alpha=options.alpha)
    return plans.compression(trace.model_layers, bucket_cap_mb)


def _draw(
    fit: LgrecoFit,
    windows: CompressionOverTime | None,
    figure: Path | None,
    frontier: Path | None,
    over_time: Path | None,
) -> None:
    if not any((figure, frontier, over_time)):
        return
    from gradlab.analysis.figures import layer_plans  # loads matplotlib
    from gradlab.cli.figures import write_figure

    if figure is not None:
        write_figure(partial(layer_plans.plot_layers, fit.provenance), figure)
    if frontier is not None:
        write_figure(lambda: layer_plans.plot_frontier(fit.frontier()), frontier)
    if over_time is not None and windows is not None:
        write_figure(partial(layer_plans.plot_over_time, windows), over_time)


def print_layer_plan(provenance: LgrecoProvenance) -> None:
    """Print whether the plan pays, and what every layer got beside the uniform plan's setting."""
    from gradlab.analysis.report.tables import layer_plan_table
    from gradlab.analysis.report.verdict import layer_plan_verdict

    OUT.print(layer_plan_verdict(provenance), markup=False)
    if provenance.sample is not None:
        OUT.print(
            f"The trace holds {provenance.sample}: errors are those of the samples, bytes of whole layers.",
            markup=False,
        )
    table = layer_plan_table(provenance)
    print_table(table.title, table.columns, table.rows, left=table.text_columns)
