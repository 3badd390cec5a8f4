"""`gradlab fit signs`: a method of the dist-EF-blockSGDM paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import print_table, progress_bars
from gradlab.cli.fit.options import (
    AsJson,
    Folder,
    Overwrite,
    Seed,
    Setting,
    Target,
    TrainedWith,
    Warmup,
    optimizer_of_training,
    print_fit,
    require_trainable,
)
from gradlab.cli.setting_texts import parse_settings
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.fit.signs import BlockFit
    from gradlab.ddp.optimizers import OptimizerSettings
    from gradlab.plan import Plan

Method = Annotated[
    str | None,
    typer.Option(
        help="dist-EF-blockSGD(M), dist-EF-SGD(M), signSGD, signum, SGD or SGDM. By default dist-EF-blockSGDM; "
        "dist-EF-blockSGD where the optimizer has momentum that no plan's can replace (AdamW)."
    ),
]
Momentum = Annotated[float, typer.Option(help="Momentum of the methods that have it; the optimizer's has to be 0.")]
WeightDecay = Annotated[
    float, typer.Option(help="Weight decay in the plan; the optimizer's has to be 0. 0: the optimizer keeps it.")
]
WeightDecayForm = Annotated[
    str | None,
    typer.Option(
        help="Where --weight-decay acts. gradient (the default): on the gradient, before momentum. apart: with a "
        "momentum of its own, uncompressed, as in the published code of dist-EF-blockSGDM."
    ),
]
Server = Annotated[
    str,
    typer.Option(
        help="Who is the server. sharded: every rank, of its part. rank: rank 0, of everything, as in the paper."
    ),
]
Scales = Annotated[
    float,
    typer.Option(
        help="Mean number of scales per tensor. They are placed where they keep most of the gradients' energy. 1: one "
        "for each tensor."
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(help="Iterations that energy is measured on; half of the trace by default, 100 at most."),
]


def signs(
    trace: Folder,
    out: Target,
    method: Method = None,
    momentum: Momentum = 0.9,
    weight_decay: WeightDecay = 0.0,
    weight_decay_form: WeightDecayForm = None,
    server: Server = "sharded",
    scales: Scales = 1.0,
    samples: Samples = None,
    optimizer: TrainedWith = None,
    setting: Setting = None,
    warmup_steps: Warmup = 0,
    seed: Seed = 0,
    workers: Processes = None,
    dask: Dask = None,
    average_ranks: AverageRanks = 1,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """A method of the dist-EF-blockSGDM paper, of every tensor, replayed on the trace.

    One bit per value both ways and a scale per block: the fewest bytes without a fit, at a loss of accuracy. More
    --scales cut tensors into blocks where that pays; what the blocks keep is checked on iterations that were not looked
    at. The plan is one that trains under the optimizer that the recording names.

    Example:

      gradlab fit signs trace --out signs.safetensors

      gradlab fit signs trace --method dist-EF-blockSGD --scales 16 --out blocks.safetensors

      gradlab fit signs trace --weight-decay 5e-4 --weight-decay-form apart --out signs.safetensors

      gradlab fit signs trace --method signum --out signum.safetensors
    """
    from gradlab.analysis.fit.signs import fit_block_sizes, with_block_sizes
    from gradlab.analysis.fit.uniform import uniform_artifact
    from gradlab.analysis.outputs import require_free
    from gradlab.analysis.replay import replay
    from gradlab.cli.evaluate import print_replays
    from gradlab.plan import method_plan
    from gradlab.trace import Trace

    require_free(out, overwrite)
    sharing = workers_of(workers, dask)
    if weight_decay_form is not None and not weight_decay:
        raise GradlabError(f"--weight-decay-form {weight_decay_form} says how --weight-decay works, which is 0")
    settings, blocks = parse_settings(setting or []), None
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        trained_with = optimizer_of_training(opened, optimizer)
        method, notes = _method_for(method, trained_with)
        plan = method_plan(
            opened.model_layers,
            method,
            momentum=momentum,
            weight_decay=weight_decay,
            weight_decay_form=weight_decay_form or "gradient",
            server=server,
            warmup_steps=warmup_steps,
            step_size_ratio=_residuals_follow(method, trained_with),
            seed=seed,
            **settings,
        )
        remedy = "use --weight-decay 0" if plan.applies_momentum is None else "use --method dist-EF-blockSGD"
        notes += [require_trainable(trained_with, plan.applies_momentum, plan.applies_weight_decay, remedy)]
        notes += [_decay_after_momentum(plan, trained_with)]
        if scales != 1:
            _require_blocks(method, settings)
            half = min(100, max(1, len(opened.steps) // 2)) if samples is None else samples
            blocks = fit_block_sizes(opened, scales, half, workers=sharing, progress=progress)
            plan = with_block_sizes(plan, blocks.block_sizes)
        replayed = replay(opened, plan, workers=sharing, progress=progress)
    artifact = uniform_artifact(plan, replayed, method=method, blocks=blocks, optimizer=trained_with)
    artifact.save(out, overwrite)

    def show() -> None:
        print_replays({out.stem: replayed})
        if blocks:
            print_blocks(blocks)

    print_fit(artifact.provenance, as_json, show, out, note="\n".join(filter(None, notes)))


def _method_for(name: str | None, optimizer: OptimizerSettings | None) -> tuple[str, list[str | None]]:
    """The method asked for, or the one that trains under the optimizer; and what to say of the choice."""
    from gradlab.plan.recipes import SIGN_METHODS, known_name

    if name is not None:
        return known_name(name, SIGN_METHODS), []
    if optimizer is None or not (optimizer.adaptive and optimizer.momentum):
        return "dist-EF-blockSGDM", []
    note = (
        f"made by method dist-EF-blockSGD, without momentum in the plan: {optimizer.name} has momentum of its own "
        f"({optimizer.momentum})"
    )
    return "dist-EF-blockSGD", [note]


def _residuals_follow(method: str, optimizer: OptimizerSettings | None) -> bool | None:
    """Whether residuals follow the rate: as in the papers, but not where the optimizer keeps momentum of its own."""
    from gradlab.plan.recipes import METHODS

    if optimizer is None or not optimizer.momentum:
        return True
    return None if optimizer.adaptive or METHODS[method].momentum is None else True


def _decay_after_momentum(plan: Plan, optimizer: OptimizerSettings | None) -> str | None:
    """What to say of weight decay that the optimizer applies after the plan's momentum."""
    if optimizer is None or plan.applies_momentum is None or plan.applies_weight_decay or optimizer.adaptive:
        return None
    if optimizer.weight_decay is None:
        return None
    _, _, rate = optimizer.weight_decay.rpartition(" ")
    return (
        f"the optimizer's {optimizer.weight_decay} does not pass through the plan's momentum, and is (1 - momentum) as "
        f"strong; --weight-decay {rate} puts it into the plan (then set the optimizer's to 0)"
    )


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
    """Print the share of energy that signs keep, with these blocks and without, where they were fitted and later."""
    from gradlab.formatting import format_percent

    fitted, held_out = blocks.fitted, blocks.held_out
    rows = [
        (f"{blocks.scales} scales, shared out", format_percent(fitted.kept), format_percent(held_out.kept)),
        ("a scale per tensor", format_percent(fitted.by_tensor), format_percent(held_out.by_tensor)),
        ("one scale", format_percent(fitted.by_model), format_percent(held_out.by_model)),
    ]
    first, held, last = blocks.iterations
    columns = ("signs with", f"fitted, {first} to {held - 1}", f"held out, {held} to {last}")
    print_table("energy of the gradients that signs keep", columns, rows)
