"""Options of every command that measures, fits or replays a trace."""

from __future__ import annotations

from typing import Annotated

import typer

AverageRanks = Annotated[
    int,
    typer.Option(
        metavar="L",
        help="Recorded ranks that are a node: ranks 0 to L - 1 are averaged, the next L, and so on, and the trace is "
        "taken as that of the nodes.",
    ),
]
