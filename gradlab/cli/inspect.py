"""`gradlab inspect`: what an artifact holds, or where the time of an iteration went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.cli.console import OUT, print_json, print_table
from gradlab.cli.figures import require_figure, write_figure
from gradlab.errors import GradlabError


def inspect(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="An artifact (.safetensors), or files of gradlab train --chrome-trace."),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="World size for the forecast of an artifact's bytes.")] = 2,
    out: Annotated[Path | None, typer.Option(metavar="FIGURE", help="Draw the spans (.svg, .pdf).")] = None,
    step: Annotated[int | None, typer.Option(help="Iteration of the spans; default: each file's first.")] = None,
    rank: Annotated[int, typer.Option(help="Rank of the spans.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace a figure that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what an artifact does to which layer, where it came from, and the bytes it will send.

    Files of gradlab train --chrome-trace show where an iteration's time went: how long the network was busy, and how
    much of that was hidden, because the rank computed gradients, compressed or decompressed meanwhile. Time begins with
    the arrival of DDP's first bucket. Several files are drawn below each other on one axis.

    Examples:

      gradlab inspect plan.safetensors

      gradlab inspect spans.json other.json --out timeline.svg
    """
    if all(file.suffix == ".json" for file in files):
        _show_spans(files, rank, step, out, overwrite, as_json)
        return
    if len(files) > 1 or out is not None or step is not None:
        raise GradlabError(f"{files[0]}: an artifact is inspected alone; --out and --step are for spans (.json)")
    _show_artifact(files[0], ranks, as_json)


def _show_artifact(artifact: Path, ranks: int, as_json: bool) -> None:
    from gradlab.analysis.replay import methods_of
    from gradlab.artifact import Artifact
    from gradlab.collectives import ring_sends
    from gradlab.formatting import format_bytes
    from gradlab.plan import most_ranks, pays_up_to, saving_of_sent, sent_bytes
    from gradlab.saving import Saving

    loaded = Artifact.load(artifact)
    plan = loaded.plan
    payload, dense = plan.payload_bytes(ranks), plan.payload_bytes(ranks, compressing=False)
    sent, saving = sent_bytes(plan, ranks), saving_of_sent(plan, ranks)
    if as_json:
        sizes = {
            "payload_bytes": payload,
            "dense_payload_bytes": dense,
            "sent_bytes": sent,
            "dense_sent_bytes": ring_sends(ranks) * dense,
            "most_ranks": most_ranks(plan),
            **saving.to_json(),
            "world_size": ranks,
            "estimated": plan.varying,
        }
        print_json({"digest": plan.digest, "plan": plan.to_json(), "origin": loaded.provenance, "expected": sizes})
        return

    def row(name: str, method: str, before: float, payload: float, sent: float) -> tuple[str, ...]:
        saved = Saving.of_sent(sent, before, ranks)
        return (name, method, *map(format_bytes, (before, payload, sent)), *saved.cells)

    rows = []
    for group in plan.groups:
        before = 4 * sum(layer.numel for layer in plan.members(group))
        payload, sends = plan.forecast(group, ranks).payload, plan.forecast(group, ranks).sent
        rows.append(row(group.name, methods_of([group])[0], before, payload, sends))
    rows += [
        row(layer.name, "dense", 4 * layer.numel, 4 * layer.numel, ring_sends(ranks) * 4 * layer.numel)
        for layer in plan.dense_layers
        if not any(layer.name in group.layers for group in plan.groups)
    ]
    columns = ("group", "method", "dense", "payload", "wire", "ratio", "vs 16 bits")
    print_table(f"{artifact} ({plan.digest[:12]})", columns, rows, left=2)
    OUT.print(
        f"sent per step and rank at {ranks} ranks: {format_bytes(sent)} instead of "
        f"{format_bytes(ring_sends(ranks) * dense)}, {saving.text('fewer')}, after {plan.schedule.warmup_steps} dense "
        f"steps; made by {loaded.provenance.get('method', 'hand')}",
        markup=False,
    )
    if limit := pays_up_to(plan):
        OUT.print(f"this plan {limit}", markup=False)
    if plan.varying:
        OUT.print(
            f"messages of {', '.join(plan.varying)} vary in size with the gradients: their bytes are an estimate, "
            "which `gradlab evaluate` replaces by a count",
            markup=False,
        )


def _show_spans(
    files: list[Path], rank: int, step: int | None, out: Path | None, overwrite: bool, as_json: bool
) -> None:
    from gradlab.chrome_trace import read_step
    from gradlab.formatting import format_seconds

    if out is not None:
        require_figure(out, overwrite)
    steps = {name: read_step(file, rank, step) for name, file in _named(files).items()}
    if out is not None:
        from gradlab.analysis.chart import draw
        from gradlab.analysis.questions.timeline import timelines_chart

        write_figure(lambda: draw(timelines_chart(steps)), out)
    times = {name: spans.times for name, spans in steps.items()}
    if as_json:
        print_json(times)
        return
    rows = []
    for name, row in times.items():
        own = (row.seconds, row.backward_seconds, row.codec_seconds)
        network = (row.network_seconds, row.hidden_seconds, row.exposed_seconds)
        rows.append((name, str(row.step), str(row.rank), *map(format_seconds, (*own, *network))))
    columns = ("trace", "step", "rank", "time", "backward", "codec", "network", "of it hidden", "exposed")
    print_table("", columns, rows)
    if out is not None:
        OUT.print(str(out), markup=False)


def _named(files: list[Path]) -> dict[str, Path]:
    """Files by their stems, or by their paths if two stems are equal."""
    stems = {file.stem: file for file in files}
    return stems if len(stems) == len(files) else {str(file): file for file in files}
