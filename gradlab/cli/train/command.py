"""`gradlab train`: the reference trainer, plain, recorded or compressed."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.cli.console import print_json, print_table, progress_bars, say
from gradlab.cli.setting_texts import Settings, parse_settings
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.cli.train.outcome import TrainReport
    from gradlab.cli.train.settings import TrainSettings
    from gradlab.plan import Plan
    from gradlab.progress import Progress

EXAMPLE = """
Settings (-s NAME=VALUE): learning_rate (peak), momentum (of the optimizer) and train_limit (the first so many training
samples; the recipe has the defaults); every=1 (record every so many steps); bucket_cap_mb=25 (DDP's buckets, MiB);
threads=1 (per rank); deterministic=false (means in rank order, as the replay takes them); trace_steps=[10,11] (of
--chrome-trace); with --emulate local_steps=1 (every node takes H optimizer steps, and exchanges how far it came),
outer_learning_rate=0.7 and outer_momentum=0.9 (Nesterov's, of the outer SGD on the common parameters).

Examples:

  gradlab train digits --ranks 2 --capture trace

  gradlab train digits --ranks 2 --compress plan.safetensors --out run.json

  gradlab train cifar10 --data cifar10.npz --steps 200 --capture trace

  gradlab train digits --emulate 16 --batch-size 16 --capture trace

  gradlab train text_bytes --data book.txt --capture trace --budget 2GB

  gradlab train digits --emulate 8 -s local_steps=30 --capture pseudo

  gradlab train text_bytes --data book.txt --steps 500

  gradlab train text_chars --data tinyshakespeare.txt --emulate 4 --batch-size 3 --capture trace
"""
WORKLOADS = "digits (bundled); cifar10, fashion_mnist, camvid, text_bytes, text_chars, text_words (need --data)."


def train(
    workload: Annotated[str, typer.Argument(help=WORKLOADS)],
    ranks: Annotated[int | None, typer.Option(help="Processes on this machine, under torchrun; 2 by default.")] = None,
    emulate: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Instead of ranks: one process plays N nodes in turn, for --capture or local steps."
        ),
    ] = None,
    capture: Annotated[Path | None, typer.Option(metavar="DIR", help="Record every rank's gradients here.")] = None,
    compress: Annotated[Path | None, typer.Option(metavar="ARTIFACT", help="Train with this artifact.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data set file or folder, for workloads that need one.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the run's report here, as JSON.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; the workload's recipe by default.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per rank and step.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of model, data order and augmentation.")] = 0,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="The whole trace at most, as 20GB: fewer steps are recorded, and blocks of large layers.",
        ),
    ] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep some steps' spans of all ranks here, for Perfetto.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the run's numbers here while it trains: gradlab watch.")
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's report as JSON.")] = False,
) -> None:
    """Train a workload on this machine's ranks: plain, recorded (--capture) or compressed (--compress)."""
    from gradlab.cli.train.launch import save_report
    from gradlab.cli.train.settings import read_settings
    from gradlab.executor.rules import sentences

    if ranks is not None and emulate is not None:
        raise GradlabError("a run has either ranks (--ranks) or emulated nodes (--emulate), not both")
    run = read_settings(
        parse_settings(settings or []),
        workload=workload,
        data=str(data.absolute()) if data else None,
        ranks=next((number for number in (emulate, ranks) if number is not None), 2),
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        capture=str(capture.absolute()) if capture else None,
        budget=budget,
        artifact=str(compress.absolute()) if compress else None,
        name=compress.stem if compress else ("recorded" if capture else "plain"),
        emulate=emulate is not None,
        log=str(log.absolute()) if log else None,
    )
    if chrome_trace is None:
        run = replace(run, trace_steps=())
    elif not run.trace_steps:
        run = replace(run, trace_steps=(10, 11))
    run.check()
    for file in (out, chrome_trace, log):
        if file is not None:
            if file.exists():
                raise GradlabError(f"{file} exists already: choose another name")
            file.parent.mkdir(parents=True, exist_ok=True)  # better refused now than after the training
    _refuse_early(run, data, capture, compress)
    with progress_bars() as progress:
        report = _run(run, progress)
    if chrome_trace is not None:
        save_report({"traceEvents": report.chrome_trace}, chrome_trace)
        report = replace(report, chrome_trace=None)
    if out is not None:
        save_report(report, out)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report.residuals:
        say(report.residuals)
    for line in sentences(report.rules, report.header.world_size):
        say(f"warning: {line}")
    for row in report.measured.recorded:
        if row.steps_lost:
            say(f"warning: {row.path}: {row.steps_lost} steps were not recorded ({row.reason})")


def _refuse_early(settings: TrainSettings, data: Path | None, capture: Path | None, compress: Path | None) -> None:
    """Refuse before processes start what each of them would refuse after."""
    from gradlab.capture.writing.folder import require_free
    from gradlab.datasets import get

    method = get(settings.workload)
    if method.needs_path and data is None:
        method.load(None)  # says what it expects
    if capture is not None:
        require_free(capture, overwrite=False)
    if compress is not None:
        from gradlab.artifact import Artifact
        from gradlab.codec.wrapper import innermost
        from gradlab.layout import layers_of
        from gradlab.learning.selection import LearnedSelection

        plan = Artifact.load(compress).plan
        plan.check_model(layers_of(method.model(0)))
        for group in plan.compressed_groups:
            codec = innermost(plan.build(group))
            if isinstance(codec, LearnedSelection):
                codec.check_world_size(settings.ranks)
        _require_trainable(settings, plan, compress)


def _require_trainable(settings: TrainSettings, plan: Plan, artifact: Path) -> None:
    """Raise GradlabError if the workload's optimizer and the plan both apply momentum or weight decay."""
    import torch

    from gradlab.cli.train.trainer import without_what_the_plan_does
    from gradlab.datasets import build_optimizer, get
    from gradlab.ddp.optimizers import describe_optimizer
    from gradlab.plan.optimizer_rules import conflict_of

    recipe = without_what_the_plan_does(settings.applied_to(get(settings.workload).recipe), str(artifact))
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    applied = settings.outer_optimizer if settings.local_steps > 1 else partial(build_optimizer, recipe)
    optimizer = describe_optimizer(applied(parameters))
    if optimizer and (conflict := conflict_of(plan, optimizer)):
        raise GradlabError(f"{artifact}: {conflict}")


train.__doc__ = f"{train.__doc__}\n{EXAMPLE}"


def _run(settings: TrainSettings, progress: Progress) -> TrainReport:
    if settings.local_steps > 1:
        from gradlab.cli.train.local_steps import emulate_local_steps

        return emulate_local_steps(settings, progress)
    if settings.emulate:
        from gradlab.cli.train.emulate import emulate

        return emulate(settings, progress)
    from gradlab.cli.train.launch import launch

    return launch(settings, progress)


def _print(report: TrainReport) -> None:
    from gradlab.formatting import format_bytes, format_seconds
    from gradlab.metric import is_finite

    header, measured = report.header, report.measured
    score = measured.final_score
    outer = header.local_steps > 1
    step = "outer step" if outer else "step"
    rows = [
        ("steps", f"{header.steps}, an outer step after every {header.local_steps}" if outer else str(header.steps)),
        (f"final {measured.metric.name}", measured.metric.text(score if is_finite(score) else None)),
        ("final loss (last 10 steps)", f"{measured.final_loss:.4f}"),
        (
            f"{step} time (median)" + (", all nodes in turn" if header.emulated else ""),
            format_seconds(measured.step_seconds),
        ),
    ]
    if (done := measured.compression) is not None:
        rows += [
            (f"payload per {step}", format_bytes(done.payload_bytes_per_step.mean)),
            (f"wire per {step}", format_bytes(done.wire_bytes_per_step.mean)),
            ("compression ratio", str(done.saving)),
        ]
        if not header.emulated:  # whose nodes wait for no network
            rows += [(f"{part} per step", format_seconds(value)) for part, value in asdict(done.time).items()]
    rows += [
        (
            "recorded of all nodes" if header.emulated else f"recorded by rank {rank}",
            f"{row.steps_written} {step}s, {format_bytes(row.bytes_written)}",
        )
        for rank, row in enumerate(measured.recorded)
    ]
    kind = "emulated nodes" if header.emulated else "ranks"
    print_table(f"{header.workload}, {header.world_size} {kind}: {header.name}", ("", ""), rows)
