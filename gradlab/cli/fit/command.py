"""`gradlab fit`: make an artifact, and say how it does on gradients the fit did not see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import OUT, print_json, print_table, print_warnings, progress_bars
from gradlab.cli.fit.lgc import lgc
from gradlab.cli.fit.lgreco import lgreco
from gradlab.cli.fit.options import (
    AsJson,
    FitWarmup,
    Folder,
    Overwrite,
    Roles,
    Seed,
    Setting,
    Target,
    Warmup,
    known_roles,
    parse_layer_settings,
    parse_settings,
    parse_wrapper,
)
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.fit.signs import BlockFit

app = typer.Typer(
    help="Make an artifact from a trace; errors on later iterations are printed.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


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

    from gradlab.analysis.fit.gradiveq import PAPER, RECOMMENDED, fit_gradiveq
    from gradlab.analysis.outputs import require_free
    from gradlab.codec.settings import build_settings
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
            roles=known_roles(role) or GradiVeQ.defaults.roles,
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
    from gradlab.analysis.report.tables import fit_table
    from gradlab.analysis.report.verdict import fit_verdict
    from gradlab.formatting import format_percent, format_ratio

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
    from gradlab.analysis.fit.signs import fit_block_sizes, with_block_sizes
    from gradlab.analysis.fit.uniform import uniform_artifact
    from gradlab.analysis.outputs import require_free
    from gradlab.analysis.replay import replay
    from gradlab.cli.evaluate import print_replays
    from gradlab.plan import method_plan
    from gradlab.plan.recipes import SIGN_METHODS, known_name
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
    from gradlab.plan.recipes import METHODS

    chosen = METHODS[method]
    if chosen.codec != "sign" or chosen.one_block or chosen.settings.get("scale") == "one":
        raise GradlabError(f"--scales shares out the scales of blocks, and {method} has none: use dist-EF-blockSGD(M)")
    if given := sorted(set(settings) & {"block_size", "across_layers", "scale"}):
        raise GradlabError(
            f"--scales chooses blocks by measured energy, and --set {given[0]} chooses them too: use one"
        )


def print_blocks(blocks: BlockFit) -> None:
    """What the blocks keep of the gradients' energy, where they were fitted and later."""
    from gradlab.formatting import format_percent

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


app.command("lgreco")(lgreco)
app.command("lgc")(lgc)


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
    from gradlab.analysis.fit.uniform import uniform_artifact
    from gradlab.analysis.outputs import require_free
    from gradlab.analysis.replay import replay
    from gradlab.cli.evaluate import print_replays
    from gradlab.codec.settings import build_settings
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
            roles=known_roles(role),
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
