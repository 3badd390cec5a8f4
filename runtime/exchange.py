"""What is in progress during one iteration: DDP's buckets, and the coroutines that work on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradlab.codec import Tensors
from gradlab.collectives import Coroutine, Request, Step, answer_for, as_requests
from gradlab.errors import GradlabError
from gradlab.runtime.communicator import Fused, Round
from gradlab.runtime.statistics import StepRecord


@dataclass(eq=False)
class Bucket:
    """One bucket as DDP handed it over.

    gradients: views of its buffer by layer name; ready: what a device's worker has to wait for before it reads them;
    started: the mean of its buffer, if the hook has begun it; failure: why it could not.
    """

    index: int
    is_last: bool
    buffer: torch.Tensor
    gradients: Tensors
    future: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    ready: Any = None
    arrived: float = field(default_factory=time.perf_counter)
    started: Fused | None = None
    failure: Exception | None = None

    def start(self, mean_in_place: Callable[[torch.Tensor], Fused]) -> None:
        """Begin averaging the buffer; the worker raises what fails."""
        try:
            self.started = mean_in_place(self.buffer)
        except Exception as error:
            self.failure = error

    def reject(self, reason: str) -> None:
        """Let the training loop see an error instead of the gradients; let go of what holds a collective."""
        self.started = self.failure = None
        if not self.future.done():
            # torch annotates the argument with the future's own type, though it takes an exception.
            self.future.set_exception(RuntimeError(f"gradlab: {reason}"))  # type: ignore[arg-type]


class Exchange:
    """One coroutine in progress: a group's codec, the dense layers of a mixed bucket, or the finite flag.

    bucket: the number of the bucket that it began with.
    """

    def __init__(
        self, name: str, coroutine: Coroutine[Any], finish: Callable[[Any], None], codec: str = "", bucket: int = 0
    ) -> None:
        self.name, self.bucket = name, bucket
        self._label = f"codec {codec} on {name}" if codec else name
        self._coroutine = coroutine
        self._finish = finish
        self._step: Step = ()
        self.requests: tuple[Request, ...] = ()
        self.done = False

    def advance(self, answers: Sequence[Any] | None = None) -> None:
        """Run to the next request, or to the end. answers: those to the open requests; None to start."""
        try:
            try:
                self._step = self._coroutine.send(None if answers is None else answer_for(self._step, answers))
                self.requests = as_requests(self._step)
            except StopIteration as stop:
                self.requests, self.done = (), True
                self._finish(stop.value)
        except Exception as error:
            raise GradlabError(f"{self._label}: {type(error).__name__}: {error}") from error


@dataclass
class Iteration:
    """What belongs to the step in progress and is gone after it.

    active: names of the groups whose codecs run; measured: whether errors are; zero: which layers' gradients are,
    and finite: whether all are, on this rank and, once the ranks have agreed, on all.
    """

    record: StepRecord
    active: frozenset[str] = frozenset()
    measured: bool = False
    buckets: list[Bucket] = field(default_factory=list)
    arrived: dict[str, Bucket] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    dense: list[Fused] = field(default_factory=list)
    running: list[Exchange] = field(default_factory=list)
    in_flight: Round | None = None
    staged: dict[str, Tensors] = field(default_factory=dict)
    zero: dict[str, bool] = field(default_factory=dict)
    finite: bool = True

    def abandon(self) -> None:
        """Let go of what holds collectives: exchanges refer back to here, and would wait for the collector."""
        self.in_flight = None
        self.running.clear()
        self.dense.clear()
