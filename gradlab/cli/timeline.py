"""`gradlab timeline`: the times of an iteration's parts, as numbers and as a picture of runs below each other."""

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
    step: Annotated[int | None, typer.Option(help="The iteration; default: each file's first.")] = None,
    rank: Annotated[int, typer.Option(help="Whose spans.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace a figure that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where an iteration's time went: how long the network was busy, and how much of that was hidden.

    The network's time is hidden while the rank computes gradients, compresses or decompresses. Time begins with the
    arrival of DDP's first bucket. Several files are drawn below each other on one axis.

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
