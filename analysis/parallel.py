"""Share work out, by layer or by figure. Calls take (path, layer, ...), never arrays: any process can do any of them.

A worker opens the trace itself and reads only what it needs: memory depends on a layer, not on the trace.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from gradlab.errors import GradlabError
from gradlab.progress import Progress

Result = TypeVar("Result")

_CONNECT_SECONDS = 10
_MOST_WORKERS = 4  # by default: each holds PyTorch and a layer


def default_workers() -> int:
    """Count the cores that this process may use.

    Returns:
        Number of cores, at most 4.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, _MOST_WORKERS))


def share_out(
    function: Callable[..., Result],
    calls: Sequence[tuple[Any, ...]],
    *,
    workers: int = 1,
    cluster: str | None = None,
    what: str = "layers",
    progress: Progress | None = None,
) -> list[Result]:
    """Compute [function(*call) for call in calls], in several processes with one thread each.

    Args:
        function: called in a worker process.
        calls: the arguments of each call.
        workers: number of processes; 1 computes in this process.
        cluster: address of a dask.distributed scheduler to use instead, whose workers see files under the same paths.
        what: the name of the work, for `progress`.
        progress: called after each result, but not with a cluster.
    Returns:
        The results, in the order of the calls.
    Raises:
        GradlabError: for fewer than 1 worker, a missing extra, or no scheduler at that address.
    """
    if workers < 1:
        raise GradlabError(f"workers = {workers}, expected at least 1")
    if cluster is not None:
        return _on_cluster(function, calls, cluster)
    if workers == 1 or len(calls) < 2:
        return list(_counted((function(*call) for call in calls), len(calls), what, progress))
    from joblib import Parallel, delayed

    parallel = Parallel(n_jobs=min(workers, len(calls)), return_as="generator", inner_max_num_threads=1)
    with warnings.catch_warnings():
        # Idle processes end after some minutes and new ones begin; a user can do nothing about that.
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given")
        return list(_counted(parallel(delayed(_in_worker)(function, *c) for c in calls), len(calls), what, progress))


def _on_cluster(function: Callable[..., Result], calls: Sequence[tuple[Any, ...]], address: str) -> list[Result]:
    try:
        from dask.distributed import Client
    except ImportError:
        raise GradlabError("a dask cluster needs dask.distributed: pip install 'gradlab[cluster]'") from None
    from joblib import Parallel, delayed, parallel_config

    try:
        client = Client(address, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise GradlabError(f"no dask scheduler at {address}: {error}") from None
    with client, parallel_config(backend="dask"):
        return list(Parallel()(delayed(_in_worker)(function, *call) for call in calls))


def _counted(results: Iterable[Result], total: int, what: str, progress: Progress | None) -> Iterable[Result]:
    for done, result in enumerate(results):
        if progress:
            progress(what, done + 1, total)
        yield result


def _in_worker(function: Callable[..., Result], *call: Any) -> Result:
    torch.set_num_threads(1)
    return function(*call)
