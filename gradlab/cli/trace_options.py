"""Options of every command that measures, fits or replays a trace."""

from __future__ import annotations

from typing import Annotated

import typer

AverageRanks = Annotated[
    int,
    typer.Option(
        metavar="L",
        help="Number of recorded ranks that make a node. Each L successive ranks are averaged, and the trace is taken "
        "as a recording of the nodes.",
    ),
]
