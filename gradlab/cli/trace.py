"""`gradlab trace`: look at, check and repair a recording."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import OUT, print_json, print_table
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.trace.checking import TraceCheck

app = typer.Typer(
    help="Look at, check and repair a recording.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def info(trace: Folder, as_json: AsJson = False) -> None:
    """What a trace holds.

    Example:

      gradlab trace info trace
    """
    from gradlab.formatting import format_bytes
    from gradlab.trace import Trace

    with Trace(trace) as opened:
        parameters = sum(layer.numel for layer in opened.layers)
        found: dict[str, Any] = {
            "path": str(trace),
            "world_size": opened.world_size,
            "steps": len(opened.steps),
            "first_iteration": int(opened.steps[0]),
            "last_iteration": int(opened.steps[-1]),
            "steps_by_rank": list(opened.rank_steps),
            "layers": [layer.to_json() for layer in opened.layers],
            "dtype": opened.dtype,
            "metadata": opened.metadata,
            "digest": opened.digest,
            "remarks": list(opened.remarks),
        }
    if as_json:
        print_json(found)
        return
    OUT.print(
        f"{trace}: {found['steps']} iterations ({found['first_iteration']} to {found['last_iteration']}) of "
        f"{found['world_size']} ranks, {len(found['layers'])} layers, {parameters} parameters, "
        f"{format_bytes(4 * parameters * found['steps'] * found['world_size'])} of gradients",
        markup=False,
    )
    for remark in found["remarks"]:
        OUT.print(remark, markup=False)
    rows = [(layer["name"], layer["role"], "x".join(map(str, layer["shape"])) or "-") for layer in found["layers"]]
    print_table("", ("layer", "role", "shape"), rows, left=2)


@app.command()
def check(trace: Folder, as_json: AsJson = False) -> None:
    """Read every committed value and compare its checksum; works on a trace that a killed run left behind.

    Exit code 0 for a sound trace, 2 for one that needs repair or is damaged.

    Example:

      gradlab trace check trace
    """
    import dataclasses

    from gradlab.trace.checking import check as check_trace

    found = check_trace(trace)
    if as_json:
        print_json(
            {
                "ok": found.ok,
                "closed": found.closed,
                "common_steps": found.common_steps,
                "ranks": [dataclasses.asdict(rank) for rank in found.ranks],
                "problems": list(found.problems),
                "remarks": list(found.remarks),
            }
        )
    else:
        _print_check(found)
    if found.problems:
        count = f"{len(found.problems)} problem" + "s" * (len(found.problems) > 1)
        raise GradlabError(f"{trace}: {count}: {found.problems[0]}")
    if not found.closed:
        raise GradlabError(f"{trace}: left open by a run that was killed; close it with: gradlab trace repair {trace}")


def _print_check(found: TraceCheck) -> None:
    rows = [
        (str(r.rank), str(r.steps), str(r.steps_lost), "yes" if r.closed else "no", str(len(r.problems)))
        for r in found.ranks
    ]
    OUT.print(f"{found.path}: {found.common_steps} steps on all ranks", markup=False)
    print_table("", ("rank", "steps", "lost", "closed", "problems"), rows, left=0)
    for line in (*found.remarks, *found.problems):
        OUT.print(f"  {line}", markup=False)


@app.command()
def repair(trace: Folder, as_json: AsJson = False) -> None:
    """Close a trace that a killed run left open, keeping every committed step.

    Exit code 0 if the trace can be read afterwards and nothing is missing that had been committed, otherwise 2.

    Example:

      gradlab trace repair trace
    """
    import dataclasses

    from gradlab.capture import repair as repair_trace
    from gradlab.trace import Trace

    ranks = repair_trace(trace)
    problems = [problem for rank in ranks for problem in rank.problems]
    if as_json:
        print_json([dataclasses.asdict(rank) for rank in ranks])
    else:
        rows = [
            (str(r.rank), str(r.steps), str(r.steps_lost), "yes" if r.changed else "no", str(len(r.problems)))
            for r in ranks
        ]
        OUT.print(str(trace), markup=False)
        print_table("", ("rank", "steps", "lost", "changed", "problems"), rows, left=0)
        for problem in problems:
            OUT.print(f"  {problem}", markup=False)
    if problems:
        raise GradlabError(problems[0])
    Trace(trace).close()  # what concerns no single rank, as a trace without any common step
