"""Run a plan's codecs under DDP: one ordered worker thread that overlaps with backward.

DDP hands over buckets in one order on every rank. The worker turns each into segments of groups; every segment is a
tick: (1) the new groups are encoded up to their first request, while the last tick's collectives travel; (2) those
are awaited, and the groups that asked for them advance to their next request or finish; (3) all open requests are
issued together, one collective per kind. After the last bucket, ticks go on without new groups until none is open.
So the order of collectives follows from buckets and phases alone, never from timing, and one order serves every
backend. A bucket without compressed layers is averaged in its own buffer, exactly as plain DDP does it.

States are committed once, after the last bucket, if the gradients of all ranks were finite; the flag that tells
travels with the last segment. If they were not, the last bucket becomes NaN on every rank, so that a loss scaler
skips the step everywhere.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradlab.codec import Codec, Context, Exchanged, Tensors, contribution_error, exchange_group, is_finite
from gradlab.codecs.identity import Identity
from gradlab.collectives import Coroutine, Mean, Request, Step, answer_for, as_requests
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime.communicator import Communicator, Fused, Round
from gradlab.runtime.statistics import Statistics, StepRecord


@dataclass(eq=False)
class Bucket:
    """One bucket as DDP handed it over. gradients: views of its buffer by layer name."""

    index: int
    is_last: bool
    buffer: torch.Tensor
    gradients: Tensors
    future: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    arrived: float = field(default_factory=time.perf_counter)


class Exchange:
    """One coroutine in progress: a group's codec, the dense layers of a mixed bucket, or the finite flag."""

    def __init__(self, name: str, coroutine: Coroutine[Any], finish: Callable[[Any], None]) -> None:
        self.name = name
        self._coroutine = coroutine
        self._finish = finish
        self._step: Step = ()
        self.requests: tuple[Request, ...] = ()
        self.done = False

    def advance(self, answers: Sequence[Any] | None = None) -> None:
        """Run to the next request, or to the end. answers: those to the open requests; None to start."""
        try:
            self._step = self._coroutine.send(None if answers is None else answer_for(self._step, answers))
            self.requests = as_requests(self._step)
        except StopIteration as stop:
            self.requests, self.done = (), True
            self._finish(stop.value)
        except Exception as error:
            raise GradlabError(f"{self.name}: {type(error).__name__}: {error}") from error


@dataclass
class Iteration:
    """What belongs to the step in progress and is gone after it."""

    record: StepRecord
    buckets: list[Bucket] = field(default_factory=list)
    arrived: dict[str, Bucket] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    dense: list[Fused] = field(default_factory=list)
    running: list[Exchange] = field(default_factory=list)
    in_flight: Round | None = None
    staged: dict[str, Tensors] = field(default_factory=dict)
    finite: bool = True


class Engine:
    """The worker and the states it keeps; `submit` is called by the hook, everything else runs in the worker.

    states: by group name, the codec's state after the last committed iteration. iteration: synchronised steps so far.
    """

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        learning_rates: Callable[[], dict[str, float]],
        statistics: Statistics,
        segment_bytes: int,
        measure_errors: bool,
    ) -> None:
        self.plan = plan
        self.states: dict[str, Tensors] = {}
        self.iteration = 0
        self.broken: str | None = None
        self.closed = False
        self._communicator = communicator
        self._learning_rates = learning_rates
        self._rates: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._statistics = statistics
        self._segment_bytes = segment_bytes
        self._measure_errors = measure_errors
        self._codecs: dict[str, Codec] = {group.name: plan.build(group) for group in plan.compressed_groups}
        self._groups = {group.name: group for group in plan.compressed_groups}
        self._group_of = {name: group.name for group in plan.compressed_groups for name in group.layers}
        self._current: Iteration | None = None
        self._queue: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # --- called from the training thread ---

    def submit(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket; the future resolves to its buffer, averaged."""
        if self.broken is not None:
            raise RuntimeError(f"gradlab: the engine stopped earlier: {self.broken}")
        if self.closed:
            raise RuntimeError("gradlab: this CompressionState is closed; DDP keeps its hook, so make a new DDP model")
        if self._thread is None:
            # A daemon, so that an interpreter that exits without close() is not held up.
            self._thread = threading.Thread(target=self._work, name="gradlab-engine", daemon=True)
            self._thread.start()
        self._queue.put(bucket)
        # Chained, because DDP would take an exception set from Python for the bucket's tensor.
        return bucket.future.then(lambda future: future.value())

    def close(self) -> None:
        """Stop the worker, if it runs, and wait for its end; later buckets are refused."""
        self.closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    # --- the worker ---

    @torch.no_grad()
    def _work(self) -> None:
        while (bucket := self._queue.get()) is not None:
            if self.broken is not None:
                _reject(bucket, self.broken)
                continue
            try:
                self._accept(bucket)
            except Exception as error:  # whatever failed belongs to the training loop, by way of the futures
                self._fail(bucket, error)

    def _fail(self, bucket: Bucket, error: Exception) -> None:
        self.broken = f"step {self.iteration}: {error}"
        waiting = {id(b): b for b in [*(self._current.buckets if self._current else []), bucket]}
        for waiter in waiting.values():
            if not waiter.future.done():
                _reject(waiter, self.broken)
        self._current = None

    def _accept(self, bucket: Bucket) -> None:
        began, waited = time.perf_counter(), self._communicator.wait_seconds
        if bucket.index == 0:
            self._begin()
        current = self._current
        if current is None:
            raise GradlabError(f"bucket {bucket.index} arrived outside an iteration")
        current.buckets.append(bucket)
        self._start_bucket(current, bucket)
        if bucket.is_last:
            self._drain(current)
        waited = self._communicator.wait_seconds - waited
        current.record.communicate_seconds += waited
        current.record.compress_seconds += time.perf_counter() - began - waited
        if bucket.is_last:
            self._finish(current)

    def _begin(self) -> None:
        if self._current is not None:
            raise GradlabError("a new backward began before the last one's buckets had all arrived")
        self._rates = (self._learning_rates(), self._rates[0])
        compressing = bool(self._groups) and self.plan.schedule.compresses(self.iteration)
        self._current = Iteration(StepRecord(self.iteration, compressing))
        self._communicator.payload_bytes = self._communicator.wire_bytes = 0

    def _start_bucket(self, current: Iteration, bucket: Bucket) -> None:
        if not current.record.compressing:
            current.dense.append(self._communicator.mean_in_place(bucket.buffer))
            return
        current.finite = current.finite and is_finite(bucket.buffer)
        if not any(name in self._group_of for name in bucket.gradients):
            current.dense.append(self._communicator.mean_in_place(bucket.buffer))
        else:
            for segment in _segments(list(self._exchanges(current, bucket)), self._segment_bytes):
                self._tick(current, segment)
        if bucket.is_last:
            flag = _agree(current, self._communicator.world_size, bucket.buffer.device)
            self._tick(current, [Exchange("finite flag", flag, lambda _: None)])

    def _exchanges(self, current: Iteration, bucket: Bucket) -> Iterator[tuple[Exchange, int]]:
        """Exchanges that this bucket makes possible, each with its gradients' bytes; dense layers first."""
        dense = {name: grad for name, grad in bucket.gradients.items() if name not in self._group_of}
        current.arrived |= dict.fromkeys(bucket.gradients, bucket)
        if dense:
            yield self._exchange(current, f"dense layers of bucket {bucket.index}", Identity(), dense)
        for name, group in self._groups.items():
            complete = name not in current.started and all(layer in current.arrived for layer in group.layers)
            if complete:
                current.started.add(name)
                grads = {layer: current.arrived[layer].gradients[layer] for layer in group.layers}
                yield self._exchange(current, name, self._codecs[name], grads)

    def _exchange(self, current: Iteration, name: str, codec: Codec, grads: Tensors) -> tuple[Exchange, int]:
        context = Context(
            rank=self._communicator.rank,
            world_size=self._communicator.world_size,
            iteration=self.iteration,
            group=name,
            seed=self.plan.seed,
            learning_rate=self._rates[0],
            previous_learning_rate=self._rates[1] or self._rates[0],
        )
        coroutine = exchange_group(codec, grads, self.states.get(name, {}), context)
        label = f"codec {codec.name} on {name}" if name in self._groups else name

        def finish(done: Exchanged) -> None:
            self._apply(current, name, grads, done)

        return Exchange(label, coroutine, finish), sum(grad.nbytes for grad in grads.values())

    def _apply(self, current: Iteration, name: str, grads: Tensors, done: Exchanged) -> None:
        """Write a finished group's mean into its buckets and stage its state."""
        if name in self._groups:
            current.staged[name] = done.state
            if self._measure_errors:  # before the gradients, which `done` may still refer to, are overwritten
                current.record.errors |= contribution_error(done)
        for layer, grad in grads.items():
            grad.copy_(done.mean[layer])

    def _tick(self, current: Iteration, fresh: Sequence[Exchange]) -> None:
        for exchange in fresh:
            exchange.advance()
        self._receive(current)
        current.running = [exchange for exchange in (*current.running, *fresh) if not exchange.done]
        requests = [request for exchange in current.running for request in exchange.requests]
        current.in_flight = self._communicator.issue(requests)

    def _receive(self, current: Iteration) -> None:
        """Await the round in flight and advance the exchanges that asked for it."""
        if current.in_flight is None:
            return
        answers = iter(current.in_flight.answers())
        current.in_flight = None
        for exchange in current.running:
            exchange.advance([next(answers) for _ in exchange.requests])

    def _drain(self, current: Iteration) -> None:
        if current.record.compressing and (missing := sorted(set(self._groups) - current.started)):
            raise GradlabError(f"group {missing[0]}: DDP handed over only some of its layers in this step")
        while current.running:
            self._tick(current, [])
        for fused in current.dense:
            fused.answers()

    def _finish(self, current: Iteration) -> None:
        """Commit the iteration, or poison it if a gradient was not finite, and resolve all futures."""
        record = current.record
        if record.compressing:
            record.finite = current.finite and all(is_finite(bucket.buffer) for bucket in current.buckets)
            if record.finite:
                self.states.update(current.staged)
            else:
                current.buckets[-1].buffer.fill_(torch.nan)
        record.payload_bytes, record.wire_bytes = self._communicator.payload_bytes, self._communicator.wire_bytes
        record.wait_seconds = time.perf_counter() - current.buckets[-1].arrived
        self._statistics.add(record)
        self.iteration += 1
        self._current = None
        for bucket in current.buckets:
            bucket.future.set_result(bucket.buffer)


def _reject(bucket: Bucket, reason: str) -> None:
    # torch annotates the argument with the future's own type, though it takes an exception.
    bucket.future.set_exception(RuntimeError(f"gradlab: {reason}"))  # type: ignore[arg-type]


def _agree(current: Iteration, world_size: int, device: torch.device) -> Coroutine[None]:
    """Learn whether the gradients were finite on every rank."""
    mean = yield Mean(torch.tensor([float(current.finite)], device=device))
    current.finite = float(mean) > 1.0 - 0.5 / world_size  # N times 1/N is not quite 1 in float32


def _segments(exchanges: Sequence[tuple[Exchange, int]], segment_bytes: int) -> Iterator[list[Exchange]]:
    """Consecutive exchanges whose gradients stay within `segment_bytes`, at least one each."""
    segment: list[Exchange] = []
    size = 0
    for exchange, nbytes in exchanges:
        if segment and size + nbytes > segment_bytes:
            yield segment
            segment, size = [], 0
        segment.append(exchange)
        size += nbytes
    if segment:
        yield segment
