"""Options of every command whose work several processes can share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.parallel import Workers

Processes = Annotated[
    int | None, typer.Option("--workers", help="Processes that share the work; default: as many as cores, at most 4.")
]
Dask = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="A dask.distributed scheduler, such as tcp://10.0.0.1:8786, whose workers share the work instead; they "
        "have to see the trace under the same path.",
    ),
]


def workers_of(processes: int | None, dask: str | None) -> Workers:
    """Read who shares the work: processes of this machine, by default as many as cores, or a cluster.

    Raises:
        GradlabError: for fewer than 1 process, or both options.
    """
    from gradlab.analysis.parallel import Cluster, default_workers

    if processes is not None and processes < 1:
        raise GradlabError(f"workers = {processes}, expected at least 1")
    if dask is None:
        return processes or default_workers()
    if processes is not None:
        raise GradlabError("--workers and --dask: a cluster has workers of its own; give one")
    return Cluster(dask)
