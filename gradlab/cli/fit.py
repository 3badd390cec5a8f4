"""`gradlab fit`: make an artifact, and say how it does on gradients the fit did not see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import OUT, print_json, print_table, print_warnings, progress_bars
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.sign_fit import BlockFit
    from gradlab.plan import Wrap

app = typer.Typer(
    help="Make an artifact from a trace; errors on later iterations are printed.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")]
Target = Annotated[Path, typer.Option("--out", metavar="ARTIFACT", help="The file to write (.safetensors).")]
Warmup = Annotated[
    int | None,
    typer.Option(help="Dense steps before the first compressed one in training; the codec's own habit by default."),
]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="Layers of this role only, such as convolution or linear; repeatable; the codec's own habit by default.",
    ),
]
Setting = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the codec; repeatable.")
]
FitWarmup = Annotated[
    int,
    typer.Option(
        help="Dense steps before the first compressed one; the fit takes the last --samples of them. 0: compress once "
        "the first --samples are over."
    ),
]
Seed = Annotated[int, typer.Option(help="Of the random streams that ranks share.")]
Overwrite = Annotated[bool, typer.Option(help="Replace a file that is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def gradiveq(
    trace: Folder,
    out: Target,
    samples: Annotated[int, typer.Option(help="Iterations to fit on (the paper's L_t).")] = 100,
    start: Annotated[
        int | None, typer.Option(help="Position of the first of them, if they shall not end where compression begins.")
    ] = None,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="The paper's method: d by lambda = 0.01, bases of each layer's first slice, kept; no random axes.",
        ),
    ] = False,
    loss_threshold: Annotated[
        float | None, typer.Option(help="d by the paper's lambda, the share of variance given up.")
    ] = None,
    slice_size: Annotated[int | None, typer.Option(help="K in elements; a multiple of F x D by default.")] = None,
    reuse: Annotated[
        int | None, typer.Option(help="Slices that share one basis (the paper's s); all of a layer's by default.")
    ] = None,
    max_dimension: Annotated[int | None, typer.Option(help="Upper limit on d.")] = None,
    ratio: Annotated[float | None, typer.Option(help="d = K / ratio; 20 if nothing else decides on d.")] = None,
    total_ratio: Annotated[
        float | None,
        typer.Option(help="d of all layers at once: the whole model so many times smaller."),
    ] = None,
    complement: Annotated[
        float | None,
        typer.Option(help="Share of d that is random, new in every iteration; brings error feedback; 0.5 by default."),
    ] = None,
    setting: Setting = None,
    layer_setting: Annotated[
        list[str] | None,
        typer.Option("--layer-set", metavar="LAYER:NAME=VALUE", help="A setting of one layer's codec; repeatable."),
    ] = None,
    role: Roles = None,
    warmup_steps: FitWarmup = 0,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """GradiVeQ's PCA bases for the convolutions; every other layer stays dense.

    Half of the axes are fitted, half are random and new in every iteration, with error feedback, so that nothing is
    lost for good; bases are fitted again on what was decoded, every four times --samples iterations. Of GradiVeQ's
    forms that trained best at the same bytes; --paper is the published method.

    Example:

      gradlab fit gradiveq trace --out gradiveq.safetensors --samples 100 --warmup-steps 100

      gradlab fit gradiveq trace --out gradiveq.safetensors --total-ratio 16 --set monitor=normalised
      --layer-set stem.weight:on_loss=dense

      gradlab fit gradiveq trace --out paper.safetensors --paper --loss-threshold 0.05
    """
    from dataclasses import asdict

    from gradlab.analysis.gradiveq import PAPER, RECOMMENDED, fit_gradiveq
    from gradlab.analysis.target import require_free
    from gradlab.codec_settings import build_settings
    from gradlab.codecs.gradiveq import GradiVeQ
    from gradlab.trace import Trace

    require_free(out, overwrite)
    chosen: dict[str, Any] = {
        "loss_threshold": loss_threshold,
        "slice_size": slice_size,
        "reuse": reuse,
        "max_dimension": max_dimension,
        "ratio": ratio,
        "complement": complement,
    }
    values = asdict(PAPER if paper else RECOMMENDED) | {"sample_steps": samples}
    values |= {"compressed_steps": 4 * samples} if values["compressed_steps"] else {}
    values |= {"ratio": None} if loss_threshold is not None else {}
    values |= {"refresh": "sample", "compressed_steps": 0} if complement == 0 else {}
    values |= {name: value for name, value in chosen.items() if value is not None}
    settings = build_settings(GradiVeQ, values | parse_settings(setting or []))
    with Trace(trace) as opened, progress_bars() as progress:
        found = fit_gradiveq(
            opened,
            samples=samples,
            start=start,
            settings=settings,
            layer_settings=parse_layer_settings(layer_setting or []),
            total_ratio=total_ratio,
            roles=_known_roles(role) or GradiVeQ.roles,
            warmup_steps=warmup_steps,
            seed=seed,
            progress=progress,
        )
    found.artifact().save(out, overwrite)
    if as_json:
        print_json(found.origin)
        return
    print_gradiveq(found.origin)
    OUT.print(str(out), markup=False)


def print_gradiveq(origin: dict[str, Any]) -> None:
    """Whether it holds; then per layer K, d and loss where it was fitted and later, and the loss by age."""
    from gradlab.analysis.formatting import format_percent, format_ratio
    from gradlab.analysis.report_tables import fit_table
    from gradlab.analysis.verdict import fit_verdict

    OUT.print(fit_verdict(origin), markup=False)
    print_warnings(origin["warnings"])
    table = fit_table(origin)
    print_table(table.title, table.columns, table.rows)
    held, control = origin["holdout"], origin["random_basis"]
    rows = [
        (f"{first} to {last}", format_percent(loss), format_percent(random))
        for (first, last), loss, random in zip(held["ages"], held["loss_by_age"], control["loss_by_age"], strict=True)
    ]
    print_table("loss by age of the bases, in steps", ("age", "these bases", "random, same size"), rows)
    ratio = origin["dense_payload_bytes"] / origin["payload_bytes"]
    OUT.print(
        f"payload {format_ratio(ratio)} smaller than dense over the whole model, from iteration "
        f"{origin['warmup_steps']} on",
        markup=False,
    )


@app.command()
def signs(
    trace: Folder,
    out: Target,
    method: Annotated[
        str, typer.Option(help="dist-EF-blockSGD(M), dist-EF-SGD(M), signSGD, signum, SGD or SGDM.")
    ] = "dist-EF-blockSGDM",
    momentum: Annotated[float, typer.Option(help="Of the methods that have it; the optimizer's is to be 0.")] = 0.9,
    weight_decay: Annotated[
        float, typer.Option(help="In the gradient, before momentum; the optimizer's is to be 0. 0 leaves it there.")
    ] = 0.0,
    server: Annotated[
        str, typer.Option(help="sharded over the ranks, or rank: all on rank 0, the paper's.")
    ] = "sharded",
    scales: Annotated[
        float,
        typer.Option(
            help="Scales per tensor, on average, shared out where they keep most of the gradients' energy; 1: one each."
        ),
    ] = 1.0,
    samples: Annotated[
        int | None, typer.Option(help="Iterations to measure that on; half of the trace by default, 100 at most.")
    ] = None,
    setting: Setting = None,
    warmup_steps: FitWarmup = 0,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """A method of the dist-EF-blockSGDM paper, of every tensor, replayed on the trace.

    One bit per value both ways and a scale per block: what to try first when nothing was fitted. More --scales cut
    tensors into blocks where that pays; what the blocks keep is checked on iterations that were not looked at.

    Example:

      gradlab fit signs trace --out signs.safetensors

      gradlab fit signs trace --method dist-EF-blockSGD --scales 16 --out blocks.safetensors

      gradlab fit signs trace --method signum --out signum.safetensors
    """
    from gradlab.analysis.replay import replay
    from gradlab.analysis.sign_fit import fit_block_sizes, with_block_sizes
    from gradlab.analysis.target import require_free
    from gradlab.analysis.uniform import uniform_artifact
    from gradlab.cli.evaluate import print_replays
    from gradlab.methods import SIGN_METHODS, known_name, method_plan
    from gradlab.trace import Trace

    require_free(out, overwrite)
    method, blocks = known_name(method, SIGN_METHODS), None
    with Trace(trace) as opened, progress_bars() as progress:
        plan = method_plan(
            opened.layers,
            method,
            momentum=momentum,
            weight_decay=weight_decay,
            server=server,
            warmup_steps=warmup_steps,
            seed=seed,
            **parse_settings(setting or []),
        )
        if scales != 1:
            _require_blocks(method, parse_settings(setting or []))
            half = min(100, max(1, len(opened.steps) // 2)) if samples is None else samples
            blocks = fit_block_sizes(opened, scales, half, progress=progress)
            plan = with_block_sizes(plan, blocks.block_sizes)
        found = replay(opened, plan, progress=progress)
    artifact = uniform_artifact(plan, found, method=method, blocks=blocks.to_json() if blocks else None)
    artifact.save(out, overwrite)
    if as_json:
        print_json(artifact.origin)
        return
    print_replays({out.stem: found})
    if blocks:
        print_blocks(blocks)
    OUT.print(str(out), markup=False)


def _require_blocks(method: str, settings: dict[str, Any]) -> None:
    from gradlab.methods import METHODS

    chosen = METHODS[method]
    if chosen.codec != "sign" or chosen.one_block or chosen.settings.get("scale") == "one":
        raise GradlabError(f"--scales shares out the scales of blocks, and {method} has none: use dist-EF-blockSGD(M)")
    if given := sorted(set(settings) & {"block_size", "across_layers", "scale"}):
        raise GradlabError(
            f"--scales chooses blocks by measured energy, and --set {given[0]} chooses them too: use one"
        )


def print_blocks(blocks: BlockFit) -> None:
    """What the blocks keep of the gradients' energy, where they were fitted and later."""
    from gradlab.analysis.formatting import format_percent

    rows = [
        (name, *(format_percent(shares[key]) for shares in (blocks.fitted, blocks.held_out)))
        for name, key in (
            (f"{blocks.scales} scales, shared out", "kept"),
            ("a scale per tensor", "by_tensor"),
            ("one scale", "by_model"),
        )
    ]
    first, held, last = blocks.iterations
    columns = ("signs with", f"fitted, {first} to {held - 1}", f"held out, {held} to {last}")
    print_table("energy of the gradients that signs keep", columns, rows)


@app.command()
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
        str, typer.Option(help="To be small: payload (bytes, the paper's), wire (bytes at --nodes) or seconds.")
    ] = "payload",
    weights: Annotated[
        str,
        typer.Option(help="Of a layer's cost: none, or linear: its bucket's number, as the last travel unhidden."),
    ] = "none",
    bucket_cap_mb: Annotated[float | None, typer.Option(help="DDP's bucket size in MiB, for buckets' figures.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Ranks that it is for; the trace's by default.")] = None,
    bandwidth: Annotated[str, typer.Option(help="Of the link, for seconds.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="Of the link, for seconds.")] = "100us",
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
    windows are chosen on, the others check the choice. The plan is the smallest there is: the search proves it.

    Example:

      gradlab fit lgreco trace --codec powersgd --set rank=4 --out lgreco.safetensors

      gradlab fit lgreco trace --codec topk --set density=0.01 --workers 4 --figure layers.svg --out topk.safetensors

      gradlab fit lgreco trace --codec powersgd --set rank=4 --family all --cost wire --nodes 8 --out hybrid.safetensors
    """
    from functools import partial

    from gradlab.analysis.bucket_time import linear_priority
    from gradlab.analysis.candidate_costs import Cost
    from gradlab.analysis.lgreco import candidates_of_grid, fit_lgreco
    from gradlab.analysis.link import Link, parse_bandwidth, parse_seconds
    from gradlab.analysis.plans_over_time import learning_rates_of, plan_over_time
    from gradlab.analysis.target import require_free
    from gradlab.cli.figures import require_figure, write_figure
    from gradlab.trace import Trace

    require_free(out, overwrite)
    for target in (figure, frontier, over_time):
        if target is not None:
            require_figure(target, overwrite)
    link = Link(parse_bandwidth(bandwidth), parse_seconds(latency)) if cost == "seconds" else None
    if weights not in ("none", "linear"):
        raise GradlabError(f"weights {weights!r}, expected none or linear")
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
            cost=Cost(cost, link),
            weights=linear_priority(opened.layers, bucket_cap_mb) if weights == "linear" else None,
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
            from gradlab.analysis import layer_plan_plots  # loads matplotlib

            write_figure(partial(draw, layer_plan_plots), target)
    if as_json:
        print_json(found.origin)
        return
    print_layer_plan(found.origin)
    for path in (out, figure, frontier, over_time):
        if path is not None:
            OUT.print(str(path), markup=False)


def print_layer_plan(origin: dict[str, Any]) -> None:
    """Whether it pays; then what every layer got, and how it compares with the uniform plan there."""
    from gradlab.analysis.report_tables import layer_plan_table
    from gradlab.analysis.verdict import layer_plan_verdict

    OUT.print(layer_plan_verdict(origin), markup=False)
    table = layer_plan_table(origin)
    print_table(table.title, table.columns, table.rows, left=table.text_columns)


@app.command()
def uniform(
    trace: Folder,
    out: Target,
    codec: Annotated[
        str, typer.Option(help="Any codec that needs no fit: topk, powersgd, qsgd, sign, ... (see gradlab methods).")
    ],
    setting: Setting = None,
    role: Roles = None,
    error_feedback: Annotated[bool | None, typer.Option(help="The codec's own habit by default.")] = None,
    wrap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="A wrapper around the codec, outermost first; repeatable; in place of --error-feedback.",
        ),
    ] = None,
    warmup_steps: Warmup = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """One codec with one setting for all layers, but vectors and small ones (signs: all), replayed on the trace.

    Example:

      gradlab fit uniform trace --codec topk --set density=0.01 --out topk.safetensors

      gradlab fit uniform trace --codec topk --set density=0.001 --wrap momentum_correction:momentum=0.9
      --wrap sparsity_warmup:steps=500 --out dgc.safetensors
    """
    from gradlab import codecs
    from gradlab.analysis.replay import replay
    from gradlab.analysis.target import require_free
    from gradlab.analysis.uniform import uniform_artifact
    from gradlab.cli.evaluate import print_replays
    from gradlab.codec_settings import build_settings
    from gradlab.plan import Plan
    from gradlab.trace import Trace

    require_free(out, overwrite)
    settings = parse_settings(setting or [])
    build_settings(codecs.get(codec), settings)  # names the codec's settings; Plan.uniform has arguments of its own
    with Trace(trace) as opened, progress_bars() as progress:
        plan = Plan.uniform(
            opened.layers,
            codec,
            error_feedback=error_feedback,
            wrappers=[parse_wrapper(text) for text in wrap] if wrap else None,
            warmup_steps=warmup_steps,
            roles=_known_roles(role),
            seed=seed,
            **settings,
        )
        found = replay(opened, plan, progress=progress)
    artifact = uniform_artifact(plan, found)
    artifact.save(out, overwrite)
    if as_json:
        print_json(artifact.origin)
    else:
        print_replays({out.stem: found})
        OUT.print(str(out), markup=False)


def _known_roles(roles: list[str] | None) -> tuple[str, ...] | None:
    from gradlab.layout import ROLES

    if unknown := [role for role in roles or [] if role not in ROLES]:
        raise GradlabError(f"--role {unknown[0]}: expected one of {', '.join(ROLES)}")
    return tuple(roles) if roles else None


def parse_wrapper(text: str) -> Wrap:
    """NAME[:KEY=VALUE,...] as a wrapper of a plan.

    Raises:
        GradlabError: for a name or a setting that there is not.
    """
    from gradlab import wrappers
    from gradlab.codec_settings import build_settings
    from gradlab.plan import Wrap

    name, _, rest = text.partition(":")
    settings = parse_settings(rest.split(",") if rest else [], f"--wrap {name}")
    build_settings(wrappers.get(name), settings)
    return Wrap(name, settings)


def parse_layer_settings(texts: list[str]) -> dict[str, dict[str, Any]]:
    """LAYER:NAME=VALUE texts as settings by layer.

    Raises:
        GradlabError: for a text without ":" or "=".
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        layer, colon, setting = text.partition(":")
        if not colon:
            raise GradlabError(f"--layer-set {text}: expected LAYER:NAME=VALUE, such as stem.weight:on_loss=dense")
        found.setdefault(layer, {}).update(parse_settings([setting], f"--layer-set {layer}:"))
    return found


def parse_settings(texts: list[str], option: str = "--set") -> dict[str, Any]:
    """NAME=VALUE texts as settings; values are JSON, or plain words.

    Raises:
        GradlabError: for a text without "=".
    """
    import json

    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise GradlabError(f"{option} {text}: expected NAME=VALUE, such as density=0.01")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
