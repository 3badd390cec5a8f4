"""`gradlab timeline`: where an iteration's time went, as numbers and as a picture of runs below each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.cli.console import OUT, print_json, print_table
from gradlab.cli.figures import require_figure, write_figure


def timeline(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE.json...", help="Files of gradlab train ... --chrome-trace.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="FIGURE", help="Draw them (.svg, .pdf).")] = None,
    step: Annotated[int | None, typer.Option(help="Which iteration; each file's first if left out.")] = None,
    rank: Annotated[int, typer.Option(help="Whose spans.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace a figure that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where an iteration's time went: how long the network was busy, and how much of that was hidden.

    Hidden is what travelled while the rank computed gradients, compressed or decompressed. Time begins with the arrival
    of DDP's first bucket. Several files are drawn below each other on one axis.

    Examples:

      gradlab train digits --compress plan.safetensors --chrome-trace spans.json

      gradlab timeline spans.json other.json --out timeline.svg
    """
    from gradlab.chrome_trace import read_step
    from gradlab.formatting import format_seconds

    if out is not None:
        require_figure(out, overwrite)
    steps = {name: read_step(file, rank, step) for name, file in _named(traces).items()}
    if out is not None:
        from gradlab.analysis.figures.chrome_trace import plot_timelines

        write_figure(lambda: plot_timelines(steps), out)
    found = {name: spans.to_json() for name, spans in steps.items()}
    if as_json:
        print_json(found)
        return
    parts = ("", "backward_", "codec_", "network_", "hidden_", "exposed_")
    rows = [
        (name, str(row["step"]), str(row["rank"]), *(format_seconds(row[f"{part}seconds"]) for part in parts))
        for name, row in found.items()
    ]
    columns = ("trace", "step", "rank", "time", "backward", "codec", "network", "of it hidden", "exposed")
    print_table("", columns, rows)
    if out is not None:
        OUT.print(str(out), markup=False)


def _named(files: list[Path]) -> dict[str, Path]:
    """Files by their stems; by their paths where stems are not different."""
    stems = {file.stem: file for file in files}
    return stems if len(stems) == len(files) else {str(file): file for file in files}
