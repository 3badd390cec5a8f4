"""`gradlab train`: the reference trainer, plain, recorded or compressed."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.cli.console import print_json, print_table, progress_bars, say
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.cli.train.outcome import TrainReport
    from gradlab.cli.train.settings import TrainSettings
    from gradlab.plan import Plan
    from gradlab.progress import Progress

EXAMPLE = """
Examples:

  gradlab train digits --ranks 2 --capture trace

  gradlab train digits --ranks 2 --compress plan.safetensors --out run.json

  gradlab train cifar10 --data cifar10.npz --steps 200 --capture trace

  gradlab train digits --emulate 16 --batch-size 16 --capture trace

  gradlab train text_bytes --data book.txt --capture trace --budget 2GB

  gradlab train digits --emulate 8 --local-steps 30 --capture pseudo

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
            metavar="N", help="Instead of ranks: one process plays N nodes in turn, for --capture or --local-steps."
        ),
    ] = None,
    local_steps: Annotated[
        int,
        typer.Option(
            metavar="H", help="With --emulate: every node takes H optimizer steps, and exchanges how far it came."
        ),
    ] = 1,
    outer_learning_rate: Annotated[
        float,
        typer.Option(help="With --local-steps: learning rate of the outer optimizer, SGD on the common parameters."),
    ] = 0.7,
    outer_momentum: Annotated[float, typer.Option(help="Nesterov momentum of the outer optimizer; 0 for none.")] = 0.9,
    capture: Annotated[Path | None, typer.Option(metavar="DIR", help="Record every rank's gradients here.")] = None,
    compress: Annotated[Path | None, typer.Option(metavar="ARTIFACT", help="Train with this artifact.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data set file or folder, for workloads that need one.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the run's report here, as JSON.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; the workload's recipe by default.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per rank and step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    momentum: Annotated[
        float | None, typer.Option(help="The optimizer's; the recipe's by default, 0 where the plan applies its own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of model, data order and augmentation.")] = 0,
    every: Annotated[int, typer.Option(help="Record every so many steps.")] = 1,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="The whole trace at most, as 20GB: fewer steps are recorded, and blocks of large layers.",
        ),
    ] = None,
    bucket_cap_mb: Annotated[float, typer.Option(help="DDP's bucket size in MiB.")] = 25.0,
    threads: Annotated[int, typer.Option(help="Threads per rank.")] = 1,
    deterministic: Annotated[bool, typer.Option(help="Take means in rank order, as the replay does.")] = False,
    chrome_trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep some steps' spans of all ranks here, for Perfetto.")
    ] = None,
    trace_steps: Annotated[
        list[int] | None, typer.Option(help="Which steps, for --chrome-trace; repeatable; 10 and 11 by default.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the run's numbers here while it trains: gradlab watch.")
    ] = None,
    train_limit: Annotated[int | None, typer.Option(help="Use only the first so many training samples.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's report as JSON.")] = False,
) -> None:
    """Train a workload on this machine's ranks: plain, recorded (--capture) or compressed (--compress)."""
    from gradlab.cli.train.launch import save_report
    from gradlab.cli.train.settings import TrainSettings
    from gradlab.executor.rules import sentences

    if ranks is not None and emulate is not None:
        raise GradlabError("a run has either ranks (--ranks) or emulated nodes (--emulate), not both")
    settings = TrainSettings(
        workload=workload,
        data=str(data.absolute()) if data else None,
        ranks=next((number for number in (emulate, ranks) if number is not None), 2),
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        momentum=momentum,
        seed=seed,
        threads=threads,
        bucket_cap_mb=bucket_cap_mb,
        capture=str(capture.absolute()) if capture else None,
        every=every,
        budget=budget,
        artifact=str(compress.absolute()) if compress else None,
        deterministic=deterministic,
        name=compress.stem if compress else ("recorded" if capture else "plain"),
        train_limit=train_limit,
        emulate=emulate is not None,
        local_steps=local_steps,
        outer_learning_rate=outer_learning_rate,
        outer_momentum=outer_momentum,
        trace_steps=tuple(trace_steps or (10, 11)) if chrome_trace else (),
        log=str(log.absolute()) if log else None,
    )
    settings.check()
    for file in (out, chrome_trace, log):
        if file is not None:
            if file.exists():
                raise GradlabError(f"{file} exists already: choose another name")
            file.parent.mkdir(parents=True, exist_ok=True)  # better refused now than after the training
    _refuse_early(settings, data, capture, compress)
    with progress_bars() as progress:
        report = _run(settings, progress)
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
