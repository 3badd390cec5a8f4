"""`gradlab fit uniform`: one codec with one setting for all layers."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from gradlab.cli.console import progress_bars
from gradlab.cli.fit.options import (
    AsJson,
    Folder,
    Overwrite,
    Roles,
    Seed,
    Setting,
    Target,
    TrainedWith,
    known_roles,
    optimizer_of_training,
    parse_wrapper,
    print_fit,
    require_trainable,
)
from gradlab.cli.setting_texts import parse_settings
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of

Codec = Annotated[
    str, typer.Option(help="Any codec that needs no fit: topk, powersgd, qsgd, sign, ... (see gradlab methods).")
]
Wrappers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:KEY=VALUE,...]",
        help="A wrapper around the codec, outermost first; repeatable; in place of --error-feedback.",
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(help="Dense steps of training before the first compressed one; by default the codec's."),
]


def uniform(
    trace: Folder,
    out: Target,
    codec: Codec,
    setting: Setting = None,
    role: Roles = None,
    error_feedback: Annotated[bool | None, typer.Option(help="By default as the codec recommends.")] = None,
    wrap: Wrappers = None,
    warmup_steps: Warmup = None,
    optimizer: TrainedWith = None,
    seed: Seed = 0,
    workers: Processes = None,
    dask: Dask = None,
    average_ranks: AverageRanks = 1,
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
    sharing = workers_of(workers, dask)
    settings = parse_settings(setting or [])
    build_settings(codecs.get(codec), settings)  # names the codec's settings; Plan.uniform has arguments of its own
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        plan = Plan.uniform(
            opened.model_layers,
            codec,
            error_feedback=error_feedback,
            wrappers=[parse_wrapper(text) for text in wrap] if wrap else None,
            warmup_steps=warmup_steps,
            roles=known_roles(role),
            seed=seed,
            **settings,
        )
        trained_with = optimizer_of_training(opened, optimizer)
        remedy = "leave such wrappers out of --wrap"
        note = require_trainable(trained_with, plan.applies_momentum, plan.applies_weight_decay, remedy)
        replayed = replay(opened, plan, workers=sharing, progress=progress)
    artifact = uniform_artifact(plan, replayed, optimizer=trained_with)
    artifact.save(out, overwrite)
    print_fit(artifact.provenance, as_json, partial(print_replays, {out.stem: replayed}), out, note=note)
