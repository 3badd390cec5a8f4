"""`gradlab fit signs`: a method of the dist-EF-blockSGDM paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import print_table, progress_bars
from gradlab.cli.fit.options import AsJson, Folder, Overwrite, Seed, Setting, Target, Warmup, parse_settings, print_fit
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.fit.signs import BlockFit

Method = Annotated[str, typer.Option(help="dist-EF-blockSGD(M), dist-EF-SGD(M), signSGD, signum, SGD or SGDM.")]
Momentum = Annotated[float, typer.Option(help="Of the methods that have it; the optimizer's is to be 0.")]
WeightDecay = Annotated[
    float, typer.Option(help="In the gradient, before momentum; the optimizer's is to be 0. 0 leaves it there.")
]
Server = Annotated[str, typer.Option(help="sharded over the ranks, or rank: all on rank 0, the paper's.")]
Scales = Annotated[
    float,
    typer.Option(
        help="Scales per tensor, on average, shared out where they keep most of the gradients' energy; 1: one each."
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(help="Iterations that energy is measured on; half of the trace by default, 100 at most."),
]


def signs(
    trace: Folder,
    out: Target,
    method: Method = "dist-EF-blockSGDM",
    momentum: Momentum = 0.9,
    weight_decay: WeightDecay = 0.0,
    server: Server = "sharded",
    scales: Scales = 1.0,
    samples: Samples = None,
    setting: Setting = None,
    warmup_steps: Warmup = 0,
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
    method, settings, blocks = known_name(method, SIGN_METHODS), parse_settings(setting or []), None
    with Trace(trace) as opened, progress_bars() as progress:
        plan = method_plan(
            opened.model_layers,
            method,
            momentum=momentum,
            weight_decay=weight_decay,
            server=server,
            warmup_steps=warmup_steps,
            seed=seed,
            **settings,
        )
        if scales != 1:
            _require_blocks(method, settings)
            half = min(100, max(1, len(opened.steps) // 2)) if samples is None else samples
            blocks = fit_block_sizes(opened, scales, half, progress=progress)
            plan = with_block_sizes(plan, blocks.block_sizes)
        replayed = replay(opened, plan, progress=progress)
    artifact = uniform_artifact(plan, replayed, method=method, blocks=blocks)
    artifact.save(out, overwrite)

    def show() -> None:
        print_replays({out.stem: replayed})
        if blocks:
            print_blocks(blocks)

    print_fit(artifact.provenance, as_json, show, out)


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
