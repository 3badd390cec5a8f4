"""`gradlab fit ecsq`: entropy-coded scalar quantization, beside every other codec at as many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gradlab.cli.console import print_table, progress_bars
from gradlab.cli.fit.options import (
    AsJson,
    Folder,
    Overwrite,
    Roles,
    Seed,
    Setting,
    Target,
    TrainedWith,
    Warmup,
    known_roles,
    optimizer_of_training,
    print_fit,
    require_trainable,
    setting_help,
)
from gradlab.cli.setting_texts import parse_settings
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of

if TYPE_CHECKING:
    from gradlab.analysis.fit.ecsq import Alone, AtEqualBytes

Bits = Annotated[float, typer.Option(help=setting_help("ecsq", "bits"))]
Error = Annotated[float | None, typer.Option(help=setting_help("ecsq", "error"))]
Tables = Annotated[Literal["message", "running", "fitted"], typer.Option(help=setting_help("ecsq", "tables"))]
BothWays = Annotated[
    bool,
    typer.Option(
        "--both-ways",
        help="In shards, each with a server that quantizes the mean and keeps its error: for many ranks.",
    ),
]


def ecsq(
    trace: Folder,
    out: Target,
    bits: Bits = 0.25,
    error: Error = None,
    tables: Tables = "message",
    both_ways: BothWays = False,
    setting: Setting = None,
    role: Roles = None,
    warmup_steps: Warmup = 0,
    optimizer: TrainedWith = None,
    seed: Seed = 0,
    workers: Processes = None,
    dask: Dask = None,
    average_ranks: AverageRanks = 1,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """One quantization step for the whole model and an entropy coder, replayed on the trace.

    With --tables fitted, code tables and centroids by layer are taken from the trace's earlier half into the artifact.

    Prints what a rank's contribution misses without feedback on the trace's later half, beside the least that any code
    of independent values could miss in as many bits, and beside every other codec at no more bytes.

    Example:

      gradlab fit ecsq trace --bits 0.25 --out ecsq.safetensors

      gradlab fit ecsq trace --error 0.3 --out ecsq.safetensors

      gradlab fit ecsq trace --bits 0.25 --tables fitted --out ecsq.safetensors

      gradlab fit ecsq trace --bits 0.5 --both-ways --warmup-steps 100 --out ecsq.safetensors
    """
    from gradlab.analysis.fit.ecsq import compare_at_equal_bytes, with_fitted_tables
    from gradlab.analysis.fit.uniform import uniform_artifact
    from gradlab.analysis.outputs import require_free
    from gradlab.analysis.replay import replay
    from gradlab.cli.evaluate import print_replays
    from gradlab.plan import FEEDBACK, Plan, Wrap
    from gradlab.trace import Trace

    require_free(out, overwrite)
    sharing = workers_of(workers, dask)
    asked = {
        "bits": bits,
        "tables": "message" if tables == "fitted" else tables,
        **({} if error is None else {"error": error}),
    }
    settings = {**asked, **parse_settings(setting or [])}
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        plan = Plan.uniform(
            opened.model_layers,
            "ecsq",
            wrappers=[*FEEDBACK, *([Wrap("two_way")] if both_ways else [])],
            warmup_steps=warmup_steps,
            roles=known_roles(role),
            seed=seed,
            **settings,
        )
        if tables == "fitted":
            plan = with_fitted_tables(opened, plan)
        trained_with = optimizer_of_training(opened, optimizer)
        note = require_trainable(trained_with, plan.applies_momentum, plan.applies_weight_decay, "")
        compared = compare_at_equal_bytes(opened, plan, workers=sharing, progress=progress)
        replayed = replay(opened, plan, workers=sharing, progress=progress)
    artifact = uniform_artifact(plan, replayed, optimizer=trained_with, alone=compared)
    artifact.save(out, overwrite)

    def show() -> None:
        print_replays({out.stem: replayed})
        print_comparison(compared)

    print_fit(artifact.provenance, as_json, show, out, note=note)


def print_comparison(compared: AtEqualBytes) -> None:
    """Print errors without feedback: the floor, the plan's, and those of other codecs at no more bytes."""
    from gradlab.formatting import format_percent

    def row(one: Alone) -> tuple[str, str, str, str]:
        settings = ", ".join(f"{key} = {value}" for key, value in one.settings.items())
        return one.codec, settings, f"{one.bits:.3f}", format_percent(one.error)

    floor = ("rate-distortion function", "", f"{compared.ecsq.bits:.3f}", format_percent(compared.floor))
    first, last = compared.iterations
    print_table(
        f"a rank's error without feedback, iterations {first} to {last}",
        ("codec", "setting", "bits per value", "error"),
        [floor, *map(row, (compared.ecsq, *compared.others))],
    )
