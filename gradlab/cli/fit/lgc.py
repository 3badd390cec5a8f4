"""`gradlab fit lgc`: an autoencoder for selected values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.cli.console import OUT, print_table, print_warnings, progress_bars
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
    setting_help,
)
from gradlab.cli.setting_texts import parse_settings
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.fit.lgc.fit import LgcFit, LgcMeasurement
    from gradlab.plan import Plan

Density = Annotated[float, typer.Option(help=setting_help("lgc_ring", "density"))]
Pattern = Annotated[
    str, typer.Option(help="ring: codes are averaged; server: one rank's code, a decoder for each rank.")
]
Order = Annotated[str, typer.Option(help=setting_help("lgc_ring", "order"))]
Normalise = Annotated[str, typer.Option(help=setting_help("lgc_ring", "normalise"))]
First = Annotated[
    str | None, typer.Option(metavar="LAYER", help="The layer that stays dense; the first recorded matrix by default.")
]
Last = Annotated[
    str | None,
    typer.Option(metavar="LAYER", help="The layer that is sent without the autoencoder; the last one by default."),
]
Vectors = Annotated[
    str,
    typer.Option(help="Biases and normalization vectors: dense; autoencoder: in its group; sparse: as the last layer."),
]
Momentum = Annotated[
    float | None,
    typer.Option(help="Use momentum correction with this momentum; the optimizer's has to be 0. By default none."),
]
Feedback = Annotated[
    bool, typer.Option("--feedback", help="Feed back what decoding loses too, which the paper forgets.")
]
Figure = Annotated[
    Path | None, typer.Option(metavar="FIGURE", help="Draw the error over epochs and over age (.svg, .pdf).")
]


def lgc(
    trace: Folder,
    out: Target,
    density: Density = 0.001,
    pattern: Pattern = "ring",
    order: Order = "position",
    normalise: Normalise = "none",
    first: First = None,
    last: Last = None,
    vectors: Vectors = "dense",
    momentum: Momentum = None,
    feedback: Feedback = False,
    epochs: Annotated[int, typer.Option(help="Passes over the recorded iterations, at most.")] = 100,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    setting: Setting = None,
    figure: Figure = None,
    optimizer: TrainedWith = None,
    warmup_steps: Warmup = 200,
    seed: Seed = 0,
    workers: Processes = None,
    dask: Dask = None,
    average_ranks: AverageRanks = 1,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """LGC's autoencoder, learned on a trace; what needs no learning is printed beside it, at its bytes.

    The first 60 % of the recorded iterations are learned from, the next 15 % say when to stop, the rest judge. Training
    with the artifact skips the phase in which LGC learns (--set fine_tune_steps=100: shortens it).

    Example:

      gradlab fit lgc trace --out lgc.safetensors

      gradlab fit lgc trace --density 0.01 --order value --feedback --out sorted.safetensors --figure lgc.svg

      gradlab fit lgc trace --pattern server --set positions=shared --density 0.01 --out server.safetensors
    """
    from gradlab.analysis.fit.lgc.fit import Fitting, LgcOptions, fit_lgc
    from gradlab.analysis.outputs import require_free
    from gradlab.cli.figures import require_figure, write_figure
    from gradlab.trace import Trace

    require_free(out, overwrite)
    if figure is not None:
        require_figure(figure, overwrite)
        if figure == out:
            raise GradlabError(f"{out}: given for the artifact and for the figure, expected two names")
    sharing = workers_of(workers, dask)
    settings = {"density": density, "normalise": normalise, **parse_settings(setting or [])}
    if pattern == "ring" or order != "position":
        settings = {"order": order, **settings}
    options = LgcOptions(
        settings=settings,
        fitting=Fitting(epochs, learning_rate=learning_rate),
        first=first,
        last=last,
        vectors=vectors,
        momentum=momentum,
        keep="difference" if feedback else "unselected",
        warmup_steps=warmup_steps,
        seed=seed,
    )
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        wrapper = None if momentum is None else "momentum_correction"
        note = require_trainable(optimizer_of_training(opened, optimizer), wrapper, remedy="leave --momentum out")
        fit = fit_lgc(opened, pattern, options, workers=sharing, progress=progress)
        note = "\n".join(filter(None, [note, _beyond_the_trace(fit.plan, int(opened.steps[-1])), _instead(fit, trace)]))
    fit.artifact().save(out, overwrite)
    if figure is not None:
        from gradlab.analysis.figures.lgc import plot_fit

        write_figure(partial(plot_fit, fit.measured), figure)
    print_fit(fit.provenance, as_json, partial(print_lgc, fit.measured), out, figure, note=note)


def _instead(fit: LgcFit, trace: Path) -> str | None:
    """The command that makes a plan of the same positions without an autoencoder, where that is better."""
    if fit.measured.better is None:
        return None
    compress = f"--codec clt_k --set density={fit.measured.settings['density']:g} --set values=int8"
    warmup = f"--warmup-steps {fit.plan.schedule.warmup_steps}"
    return f"in its place: gradlab fit uniform {trace} {compress} {warmup} --out clt_k.safetensors"


def _beyond_the_trace(plan: Plan, last: int) -> str | None:
    """What to say of a plan that compresses nothing up to the iteration where the trace ends."""
    if plan.schedule.compresses(last):
        return None
    return (
        f"dense until iteration {plan.schedule.warmup_steps}, and the trace ends at {last}: `gradlab evaluate` cannot "
        "replay it there; make it with fewer --warmup-steps for that"
    )


def print_lgc(measured: LgcMeasurement) -> None:
    """Print whether the autoencoder beats codes without learning; each code at its bytes; and the error by age."""
    from gradlab.analysis.report.tables import selection_table
    from gradlab.analysis.report.verdict import lgc_verdict, lgc_warnings
    from gradlab.formatting import format_percent

    OUT.print(lgc_verdict(measured), markup=False)
    print_warnings(lgc_warnings(measured))
    table = selection_table(measured)
    print_table(table.title, table.columns, table.rows, left=table.text_columns)
    held = measured.holdout
    rows = [
        (f"{first} to {last}", format_percent(error))
        for (first, last), error in zip(held.ages, held.error_by_age, strict=True)
    ]
    print_table("error by age of the autoencoder, in steps", ("age", "error"), rows)
