"""Show what an artifact does to which layer, where it came from, and the bytes it will send.

Files of gradlab train --chrome-trace show where an iteration's time went: how long the network was busy, and how
much of that was hidden, because the rank computed gradients, compressed or decompressed meanwhile. Time begins with
the arrival of DDP's first bucket. Several files are drawn below each other on one axis.

Examples:

  gradlab inspect plan.safetensors

  gradlab inspect spans.json other.json --out timeline.svg
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.analysis.figures.chart import write_chart
from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.state import state_text
from gradlab.analysis.outputs import require_figure
from gradlab.analysis.replay import methods_of
from gradlab.artifact import Artifact
from gradlab.chrome_trace import read_step
from gradlab.cli.console import Answer, Table, print_json
from gradlab.cli.options import AsJson, Overwrite
from gradlab.collectives import ring_sends
from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, format_seconds
from gradlab.plan import Plan, most_ranks, saving_of_sent, sent_bytes, state_bytes
from gradlab.plan.plan import forecast_group
from gradlab.plan.traffic import remarks_on_ranks, varying_codecs
from gradlab.saving import Saving


def inspect(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="An artifact (.safetensors), or files of gradlab train --chrome-trace."),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="World size for the forecast of an artifact's bytes.")] = 2,
    out: Annotated[Path | None, typer.Option(metavar="FIGURE", help="Drawing of the spans (.svg, .pdf).")] = None,
    step: Annotated[int | None, typer.Option(help="Iteration of the spans; default: each file's first.")] = None,
    rank: Annotated[int, typer.Option(help="Rank of the spans.")] = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    if all(file.suffix == ".json" for file in files):
        if out is not None:
            require_figure(out, overwrite)
        _show_spans(files, rank, step, out, as_json)
        return
    if len(files) > 1 or out is not None or step is not None:
        raise GradlabError(f"{files[0]}: an artifact is inspected alone; --out and --step are for spans (.json)")
    _show_artifact(files[0], ranks, as_json)


def _show_artifact(artifact: Path, ranks: int, as_json: bool) -> None:

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
            "state_bytes": state_bytes(plan, ranks),
            **saving.to_json(),
            "world_size": ranks,
            "estimated": varying_codecs(plan),
        }
        print_json({"digest": plan.digest, "plan": plan.to_json(), "origin": loaded.provenance, "expected": sizes})
        return
    notes = [
        f"sent per step and rank at {ranks} ranks: {format_bytes(sent)} instead of "
        f"{format_bytes(ring_sends(ranks) * dense)}, {saving.text('fewer')}, after {plan.schedule.warmup_steps} dense "
        f"steps; made by {loaded.provenance.get('method', 'hand')}"
    ]
    notes += [*filter(None, [state_text(plan, Network(nodes=(ranks,)))]), *remarks_on_ranks(plan)]
    if varying := varying_codecs(plan):
        notes.append(
            f"messages of {', '.join(varying)} vary in size with the gradients: their bytes are an estimate, "
            "which `gradlab evaluate` replaces by a count"
        )
    columns = ("group", "method", "dense", "payload", "wire", "ratio", "vs 16 bits")
    table = Table(f"{artifact} ({plan.digest[:12]})", columns, _rows(plan, ranks), 2)
    Answer(tables=[table], notes=notes).print()


def _rows(plan: Plan, ranks: int) -> list[tuple[str, ...]]:
    """A row per group, and per layer that stays dense."""

    def row(name: str, method: str, before: float, payload: float, sent: float) -> tuple[str, ...]:
        saved = Saving.of_sent(sent, before, ranks)
        return (name, method, *map(format_bytes, (before, payload, sent)), *saved.cells)

    rows = []
    for group in plan.groups:
        before = 4 * sum(layer.numel for layer in plan.members(group))
        payload, sends = forecast_group(plan, group, ranks).payload, forecast_group(plan, group, ranks).sent
        rows.append(row(group.name, methods_of([group])[0], before, payload, sends))
    grouped = {name for group in plan.groups for name in group.layers}
    for layer in plan.dense_layers:
        if layer.name not in grouped:
            nbytes = 4 * layer.numel
            rows.append(row(layer.name, "dense", nbytes, nbytes, ring_sends(ranks) * nbytes))
    return rows


def _show_spans(files: list[Path], rank: int, step: int | None, out: Path | None, as_json: bool) -> None:

    stems = {file.stem: file for file in files}
    named = stems if len(stems) == len(files) else {str(file): file for file in files}
    steps = {name: read_step(file, rank, step) for name, file in named.items()}
    if out is not None:
        from gradlab.analysis.questions.timeline import timelines_chart

        write_chart(timelines_chart(steps), out)
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
    Answer(tables=[Table("", columns, rows)], notes=[] if out is None else [str(out)]).print()
