"""`gradlab trace`: look at, check and repair a recording."""

from __future__ import annotations

import typer

from gradlab.cli.console import Answer, Table, print_json
from gradlab.cli.options import AsJson, TraceFolder
from gradlab.ddp.optimizers import OptimizerSettings
from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, format_counted
from gradlab.layout import Layer
from gradlab.trace import Trace
from gradlab.trace.checking import TraceCheck
from gradlab.trace.checking import check as check_trace

app = typer.Typer(
    help="Look at, check and repair a recording.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)


@app.command(short_help="Show what a recording holds")
def info(trace: TraceFolder, as_json: AsJson = False) -> None:
    """Show what a trace holds.

    Example:

      gradlab trace info trace
    """
    with Trace(trace) as opened:
        layers, steps, ranks = opened.layers, opened.steps, opened.world_size
        wholes = {layer.name: layer for layer in opened.model_layers}
    if as_json:
        print_json(
            {
                "path": str(trace),
                "world_size": ranks,
                "steps": len(steps),
                "first_iteration": int(steps[0]),
                "last_iteration": int(steps[-1]),
                "steps_by_rank": opened.rank_steps,
                "layers": layers,
                "model_layers": opened.model_layers,
                "samples": {name: sample.to_json() for name, sample in opened.samples.items()},
                "dtype": opened.dtype,
                "metadata": opened.metadata,
                "digest": opened.digest,
                "remarks": opened.remarks,
                "times": opened.times,
            }
        )
        return
    parameters, recorded = (sum(layer.numel for layer in some) for some in (wholes.values(), layers))
    share = f" ({recorded} of them recorded)" if recorded < parameters else ""
    lines = [
        f"{trace}: {len(steps)} iterations ({steps[0]} to {steps[-1]}) of {ranks} ranks, {len(layers)} layers, "
        f"{parameters} parameters{share}, {format_bytes(4 * recorded * len(steps) * ranks)} of gradients"
    ]
    if optimizer := OptimizerSettings.from_metadata(opened.metadata):
        lines.append(f"trained with {optimizer}")
    if opened.times is not None:
        lines.append(str(opened.times))
    rows: list[tuple[str, ...]] = [(layer.name, layer.role, _sizes(layer)) for layer in layers]
    table = Table("", ("layer", "role", "shape"), rows, 2)
    if opened.samples:
        rows = [(*row, _sizes(wholes[row[0]])) for row in rows]
        table = Table("", ("layer", "role", "sample", "shape"), rows, 2)
    Answer([*lines, *opened.remarks], tables=[table]).print()


def _sizes(layer: Layer) -> str:
    return "x".join(map(str, layer.shape)) or "-"


@app.command(short_help="Compare every value with its checksum")
def check(trace: TraceFolder, as_json: AsJson = False) -> None:
    """Read every committed value and compare its checksum; works on a trace that a killed run left behind.

    Exit code 0 for a sound trace, 2 for one that needs repair or is damaged.

    Example:

      gradlab trace check trace
    """
    result = check_trace(trace)
    if as_json:
        print_json(
            {
                "ok": result.ok,
                "closed": result.closed,
                "common_steps": result.common_steps,
                "ranks": result.ranks,
                "problems": result.problems,
                "remarks": result.remarks,
            }
        )
    else:
        _print_check(result)
    if result.problems:
        count = format_counted(len(result.problems), "problem")
        raise GradlabError(f"{trace}: {count}: {result.problems[0]}")
    if not result.closed:
        raise GradlabError(f"{trace}: left open by a run that was killed; close it with: gradlab trace repair {trace}")


def _print_check(result: TraceCheck) -> None:
    rows = [
        (str(r.rank), str(r.steps), str(r.steps_lost), "yes" if r.closed else "no", str(len(r.problems)))
        for r in result.ranks
    ]
    table = Table("", ("rank", "steps", "lost", "closed", "problems"), rows, 0)
    notes = [f"  {line}" for line in (*result.remarks, *result.problems)]
    Answer([f"{result.path}: {result.common_steps} steps on all ranks"], tables=[table], notes=notes).print()


@app.command(short_help="Close what a killed run left open")
def repair(trace: TraceFolder, as_json: AsJson = False) -> None:
    """Close a trace that a killed run left open, keeping every committed step.

    Exit code 0 if the trace can be read afterwards and nothing is missing that had been committed, otherwise 2.

    Example:

      gradlab trace repair trace
    """
    from gradlab.capture import repair as repair_trace

    ranks = repair_trace(trace)
    problems = [problem for rank in ranks for problem in rank.problems]
    if as_json:
        print_json(ranks)
    else:
        rows = [
            (str(r.rank), str(r.steps), str(r.steps_lost), "yes" if r.changed else "no", str(len(r.problems)))
            for r in ranks
        ]
        table = Table("", ("rank", "steps", "lost", "changed", "problems"), rows, 0)
        Answer([str(trace)], tables=[table], notes=[f"  {problem}" for problem in problems]).print()
    if problems:
        raise GradlabError(problems[0])
    Trace(trace).close()  # what concerns no single rank, as a trace without any common step
