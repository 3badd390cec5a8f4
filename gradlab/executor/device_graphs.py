"""Exchanges recorded as graphs of a GPU's kernels, which are then launched by one call each.

On a GPU most of a codec's time goes into launching its many small kernels from Python. A codec's work between two
requests is the same in every step, unless it reads something that changes from step to step (the iteration, learning
rates, random numbers of the host) or waits for the device's values. So a group's exchange runs as it is at first, then
once under watch, and if nothing of that kind was seen, it is recorded: each stretch of its code between two requests
becomes a graph. From then on gradients, states and answers are copied to where the graphs read them, generators of the
device are seeded as they would have been, and graphs are replayed. The same kernels run on the same numbers, so results
stay the same, bit for bit.

An exchange that cannot be recorded runs as it always did, and `GroupGraphs.why` says what was seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from gradlab.codec import Batch, Codec, Context, Exchanged, Tensors, exchange_group
from gradlab.collectives import Coroutine, Ring, as_requests
from gradlab.executor.fixed_context import Draws, NotRecordable, fixed, reason

# Operations whose result's value or size the host needs before it goes on.
HOST_WAITS = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2", "bincount", "is_nonzero")
)
# Exchanges of one kind that run as they are before one is watched, and the next recorded: libraries set themselves up.
_BEFORE = 2
_KINDS = 2  # whose graphs are kept, for codecs that alternate, and loss scales


class Graph(Protocol):
    """Kernels that are recorded once and then launched together."""

    def recording(self, generators: Sequence[torch.Generator]) -> AbstractContextManager[None]:
        """Record the device's work, without running it, while the context lasts; `generators` draw as they are seeded
        at replay."""

    def replay(self) -> None:
        """Run what was recorded."""


class CudaGraph:
    """A graph of a GPU; other threads may use the device while it is recorded. Graphs that use memory of one pool after
    each other have to share the stream."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool, self._stream = pool, stream

    @contextmanager
    def recording(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        for generator in generators:
            self._graph.register_generator_state(generator)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # which says again that the recording failed
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs:
    """Makes the graphs of one run, which share memory: a graph's intermediate tensors are overwritten by others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self) -> CudaGraph:
        if self._stream is None:  # nothing can be recorded on the default stream, which the caller may be on
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        return CudaGraph(self._pool, self._stream)


class _NoGraph:
    """In place of a graph: what is recorded runs at once."""

    def recording(self, generators: Sequence[torch.Generator]) -> AbstractContextManager[None]:
        return nullcontext()

    def replay(self) -> None:
        pass


class GroupGraphs:
    """The graphs of one group's exchange, and when they are made and used.

    why: why the group's exchanges run without graphs for good; empty while they need not.
    """

    def __init__(self, make: Callable[[], Graph]) -> None:
        self.why = ""
        self._make = make
        self._codec: Codec | None = None
        self._kinds: dict[Any, _Kind] = {}  # those seen last

    @property
    def recorded(self) -> bool:
        """Whether there are graphs that a next exchange of the same kind uses."""
        return any(kind.recorded is not None for kind in self._kinds.values())

    def exchange(
        self, codec: Codec, grads: Batch, state: Tensors, context: Context, *, scaled_by: float = 1.0
    ) -> Coroutine[Exchanged]:
        """Run a compressed exchange whose gradients nobody reads afterwards, by graphs if there are any. The result's
        tensors but the state are overwritten by the group's next exchange."""

        def plainly(context: Context, grads: Batch, state: Tensors) -> Coroutine[Exchanged]:
            return exchange_group(codec, grads, state, context, scaled_by=scaled_by, reuse=True)

        kind = self._kind(codec, _key(grads, state, context, scaled_by))
        if self.why or kind.seen <= _BEFORE:
            return (yield from plainly(context, grads, state))
        if kind.recorded is not None:
            return (yield from kind.recorded.run(context, grads, state))
        watched = kind.watched is None
        recorded = _Recorded(_NoGraph if watched else self._make, Draws(kind.watched))
        try:
            done = yield from recorded.record(plainly, context, grads, state)
        except _Failed as failed:
            self.why = failed.reason
            self._kinds.clear()
            return (yield from _resumed(plainly(context, grads, state), failed.answers))
        if watched:
            kind.watched = recorded.draws
        else:
            kind.recorded = recorded
        return done

    def _kind(self, codec: Codec, key: Any) -> _Kind:
        """Count an exchange, and drop what is known of kinds that did not come for long."""
        if codec is not self._codec:
            self._codec, self._kinds = codec, {}
        kind = self._kinds.pop(key, _Kind())
        kind.seen += 1
        self._kinds[key] = kind
        if len(self._kinds) > _KINDS:
            del self._kinds[next(iter(self._kinds))]
        return kind


@dataclass
class _Kind:
    """Exchanges of the same kernels: how many were seen, what one under watch drew, and their graphs, if there are
    any."""

    seen: int = 0
    watched: Draws | None = None
    recorded: _Recorded | None = None


def _key(grads: Tensors, state: Tensors, context: Context, scaled_by: float) -> tuple[Any, ...]:
    """Return the key of an exchange's kernels, but for what `fixed` hides: they are the same while it is."""
    tensors = [*grads.items(), *state.items()]
    shapes = tuple((name, one.shape, one.stride(), one.dtype, one.device) for name, one in tensors)
    return shapes, len(grads), scaled_by, context.training.loss_scale


class _Failed(Exception):
    """An exchange could not be recorded. answers: those to the requests that it has asked already."""

    def __init__(self, reason: str, answers: list[Any]) -> None:
        self.reason, self.answers = reason, answers
        super().__init__(reason)


@dataclass
class _Recorded:
    """One exchange's stretches.

    make: makes a graph.
    draws: its random numbers.
    inputs: tensors that each stretch's graph reads: gradients and states, then answers.
    requests: requests of each stretch but the last.
    kept: tensors that have to stay where they are, see `_Watch.needed`.
    """

    make: Callable[[], Graph]
    draws: Draws
    graphs: list[Graph] = field(default_factory=list)
    inputs: list[list[torch.Tensor]] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    done: Exchanged | None = None

    def run(self, context: Context, grads: Tensors, state: Tensors) -> Coroutine[Exchanged]:
        """Exchange by replaying the graphs."""
        self.draws.begin(context)
        values = [*grads.values(), *state.values()]
        for number, graph in enumerate(self.graphs):
            torch._foreach_copy_(self.inputs[number], values)
            self.draws.seed(number)
            graph.replay()
            if number < len(self.requests):
                values = _tensors_in((yield self.requests[number]))
        return self._result()

    def record(
        self,
        exchange: Callable[[Context, Batch, Tensors], Coroutine[Exchanged]],
        context: Context,
        given: Batch,
        before: Tensors,
    ) -> Coroutine[Exchanged]:
        """Exchange, and record it on the way. Raises _Failed if it cannot be recorded.

        given: gradients. before: states.
        """
        answers: list[Any] = []
        try:
            grads, state = (
                {name: one.detach().clone() for name, one in tensors.items()} for tensors in (given, before)
            )
            self._read([*grads.values(), *state.values()])
            self.draws.begin(context)
            coroutine, answer = exchange(fixed(context, self.draws), given.like(grads), state), None
            while (request := self._stretch(coroutine, answer)) is not None:
                answers.append((yield request))
                self.requests.append(request)
                answer = _copied(answers[-1])
                self._read(_tensors_in(answer))
            return self._result()
        except Exception as error:  # of any kind: the exchange runs without graphs then, and raises what it raises
            raise _Failed(reason(error), answers) from error

    def _stretch(self, coroutine: Coroutine[Exchanged], answer: Any) -> Any:
        """Record up to the next request, and run what was recorded. Returns the request; None: the exchange is done."""
        graph, watch, request = self.make(), _Watch(), None
        with graph.recording(self.draws.stretch()), watch:
            try:
                request = coroutine.send(answer)
            except StopIteration as stop:
                self.done = stop.value
        self.draws.complete()
        if request is not None and any(isinstance(one, Ring) for one in as_requests(request)):
            raise NotRecordable("it works while a ring's messages travel")
        self.graphs.append(graph)
        self.kept += watch.needed()
        graph.replay()
        return request

    def _read(self, tensors: list[torch.Tensor]) -> None:
        if len({one.device.type for one in tensors}) > 1:
            raise NotRecordable("a part of its state is in the host's memory")
        self.inputs.append(tensors)

    def _result(self) -> Exchanged:
        """Return the result. States get memory of their own, as steps that are not committed keep old ones."""
        assert self.done is not None
        fresh = {name: torch.empty_like(one) for name, one in self.done.state.items()}
        if fresh:
            torch._foreach_copy_(list(fresh.values()), list(self.done.state.values()))
        return replace(self.done, state=fresh)


class _Watch(TorchDispatchMode):
    """Refuses operations that a graph cannot hold, and notes what they read and make."""

    def __init__(self) -> None:
        super().__init__()
        self._read: dict[int, torch.Tensor] = {}  # by address, what was not made here
        self._made: set[int] = set()
        self._results: list[weakref.ref[torch.Tensor]] = []

    def needed(self) -> list[torch.Tensor]:
        """List what has to stay in place while the graph may run: its inputs, and results that are still alive when a
        stretch ends. Other graphs may work in the memory of all others."""
        alive = (result() for result in self._results)
        return [*self._read.values(), *(one for one in alive if one is not None)]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        taken = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        by_mask = name.startswith("index") and any(one.dtype in (torch.bool, torch.uint8) for one in _indices(args))
        unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in HOST_WAITS or by_mask or unsized:
            raise NotRecordable(f"it waits for the device's values ({name})")
        result = operation(*args, **kwargs)
        made = [one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor)]
        # A number of the host is a kernel's argument, but where it is copied.
        if len({one.device.type for one in (*taken, *made) if one.ndim or name == "copy_"}) > 1:
            raise NotRecordable(f"it copies between the host and the device ({name})")
        for one in taken:
            if (address := one.untyped_storage().data_ptr()) not in self._made:
                self._read.setdefault(address, one)
        self._made |= {one.untyped_storage().data_ptr() for one in made} - self._read.keys()
        self._results += map(weakref.ref, made)
        return result


def _indices(args: Sequence[Any]) -> list[torch.Tensor]:
    given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return [one for one in given if isinstance(one, torch.Tensor)]


def _tensors_in(answer: Any) -> list[torch.Tensor]:
    """List the tensors of an answer, or of several, in order."""
    if isinstance(answer, torch.Tensor):
        return [answer]
    return [tensor for one in answer for tensor in _tensors_in(one)]


def _copied(answer: Any) -> Any:
    """Copy an answer, or several, into memory of its own."""
    if isinstance(answer, torch.Tensor):
        return answer.clone()
    return tuple(map(_copied, answer)) if isinstance(answer, tuple) else [_copied(one) for one in answer]


def _resumed(coroutine: Coroutine[Exchanged], answers: Sequence[Any]) -> Coroutine[Exchanged]:
    """Run an exchange whose first requests are answered already."""
    answer, left = None, list(answers)
    while True:
        try:
            request = coroutine.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = left.pop(0) if left else (yield request)
