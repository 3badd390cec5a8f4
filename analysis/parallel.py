"""Share work out, by layer or by figure. Calls take (path, layer, ...), never arrays: any process can do any of them.

A worker opens the trace itself and reads only what it needs: memory depends on a layer, not on the trace. Every call
computes with one thread, wherever it runs, so that results do not depend on the number of workers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from gradlab.errors import GradlabError
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.layout import Layer
    from gradlab.trace import Trace

Result = TypeVar("Result")
Warned = list[tuple[str, type[Warning]]]  # text and category of what a worker warned of

_MOST_WORKERS = 4  # by default: each holds PyTorch and a layer


def default_workers() -> int:
    """Count the cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, _MOST_WORKERS))


def share_out(
    function: Callable[..., Result],
    calls: Sequence[tuple[Any, ...]],
    *,
    workers: int = 1,
    what: str = "layers",
    sizes: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """Compute [function(*call) for call in calls] in several processes with one thread each, in the order of the calls.
    The largest `sizes` begin first, so that none is left to one worker at the end.
    """
    if workers < 1:
        raise GradlabError(f"workers = {workers}, expected at least 1")
    if not calls:
        return []
    work = [1] * len(calls) if sizes is None else [max(1, size) for size in sizes]
    order = sorted(range(len(calls)), key=lambda number: -work[number])
    numbered = [(number, function, *calls[number]) for number in order]
    report = progress or _silent
    results: dict[int, Result] = {}
    done, total = 0, sum(work)
    report(what, done, total)
    for number, result in _computed(numbered, workers):
        results[number] = result
        done += work[number]
        report(what, done, total)
    return [results[number] for number in range(len(calls))]


def share_out_layers(
    function: Callable[..., Result],
    trace: Trace,
    layers: Sequence[Layer],
    *given: Any,
    what: str,
    workers: int = 1,
    progress: Progress | None = None,
) -> list[Result]:
    """Compute function(trace's source, layer, *given) of each layer, in their order."""
    calls = [(trace.source, layer, *given) for layer in layers]
    trace.close()  # HDF5 keeps what is read of a file until nobody has it open; reading on opens it again
    sizes = [layer.numel for layer in layers]
    return share_out(function, calls, workers=workers, what=what, sizes=sizes, progress=progress)


def _silent(what: str, done: int, total: int) -> None:
    """Report no progress."""


def _computed(numbered: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, Any]]:
    """Yield the number and the result of each (number, function, *call), in the order in which they are done."""
    if workers == 1 or len(numbered) < 2:
        with one_thread():
            for call in numbered:
                yield _compute(*call)
    else:
        yield from _in_processes(numbered, workers)


def _in_processes(numbered: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, Any]]:
    from joblib import Parallel, delayed

    count = min(workers, len(numbered))
    parallel = Parallel(n_jobs=count, return_as="generator_unordered", inner_max_num_threads=1)
    with warnings.catch_warnings():
        # Idle processes end after some minutes and new ones begin; a user can do nothing about that.
        for message in ("A worker stopped while some jobs were given", ".*which were still being processed"):
            warnings.filterwarnings("ignore", message=message)
        with _interrupts_held():
            running = parallel(delayed(_in_worker)(*call) for call in numbered)
        try:
            yield from map(_with_warnings, running)
        finally:
            running.close()  # an interrupt cancels tasks, of which joblib warns


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back in this thread and its processes: the process that started a worker ends it."""
    # Both are started before: each lets interrupts through again when it starts its process.
    from joblib.externals.loky.backend import resource_tracker as loky_tracker

    resource_tracker.ensure_running()
    loky_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_worker(number: int, function: Callable[..., Result], *call: Any) -> tuple[tuple[int, Result], Warned]:
    with warnings.catch_warnings(record=True) as seen, one_thread():
        warnings.simplefilter("default")
        done = _compute(number, function, *call)
    _give_memory_back()
    return done, [(str(one.message), one.category) for one in seen]


def _with_warnings(finished: tuple[tuple[int, Result], Warned]) -> tuple[int, Result]:
    """Warn here of what a worker warned of: its own standard error is nobody's."""
    done, seen = finished
    for text, category in dict.fromkeys(seen):
        warnings.warn(text, category, stacklevel=2)
    return done


def _compute(number: int, function: Callable[..., Result], *call: Any) -> tuple[int, Result]:
    with np.errstate(all="ignore"):  # gradients may hold anything: results say where they are not finite
        return number, function(*call)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread within: sums depend on their number, and a rank's codecs have one core."""
    from threadpoolctl import threadpool_limits

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)


def _give_memory_back() -> None:
    """Return what a call freed to the system: otherwise a worker holds the sum of what its calls needed, in pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None  # glibc's alone
    if trim is not None:
        trim(0)
