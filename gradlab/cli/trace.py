"""`gradlab trace`: look at, check and repair a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradlab.cli.console import OUT, print_json, print_table
from gradlab.errors import GradlabError

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
    from gradlab.analysis.formatting import format_bytes
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

    from gradlab.trace_check import check as check_trace

    found = check_trace(trace)
    if as_json:
        ranks = [dataclasses.asdict(rank) for rank in found.ranks]
        print_json({"ok": found.ok, "closed": found.closed, "common_steps": found.common_steps, "ranks": ranks})
    else:
        rows = [
            (str(r.rank), str(r.steps), str(r.steps_lost), "yes" if r.closed else "no", str(len(r.problems)))
            for r in found.ranks
        ]
        print_table(
            f"{trace}: {found.common_steps} steps on all ranks",
            ("rank", "steps", "lost", "closed", "problems"),
            rows,
            left=0,
        )
        for problem in found.problems:
            OUT.print(f"  {problem}", markup=False)
    if found.problems:
        raise GradlabError(f"{trace}: {len(found.problems)} problems: {found.problems[0]}")
    if not found.closed:
        raise GradlabError(f"{trace}: left open by a run that was killed; close it with: gradlab trace repair {trace}")


@app.command()
def repair(trace: Folder, as_json: AsJson = False) -> None:
    """Close a trace that a killed run left open, keeping every committed step.

    Example:

      gradlab trace repair trace
    """
    import dataclasses

    from gradlab.capture import repair as repair_trace

    ranks = repair_trace(trace)
    if as_json:
        print_json([dataclasses.asdict(rank) for rank in ranks])
        return
    fields = [field.name for field in dataclasses.fields(ranks[0])] if ranks else []
    rows = [[_cell(getattr(rank, name)) for name in fields] for rank in ranks]
    print_table(str(trace), [name.replace("_", " ") for name in fields], rows, left=0)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "; ".join(map(str, value)) if isinstance(value, tuple) else str(value)
