"""Check that a codec keeps the contract, for authors of codecs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradlab.codec.abilities import for_layers
from gradlab.codec.batch import Batch, Table, Tensors
from gradlab.codec.compressor import Compressor
from gradlab.codec.context import Context
from gradlab.codec.contract import Codec, Guarantees
from gradlab.codec.exchanged import Exchanged, exchange_group
from gradlab.codec.kept import state_problem
from gradlab.codec.wrapper import innermost, sizes_vary, wrappers_of
from gradlab.collectives import Coroutine, LockstepResult, run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer

#: Shapes that codecs meet: a convolution, matrices, a stack of them, vectors, a scalar, an empty layer, one element.
LAYERS = Table.of(
    [
        Layer("conv", (16, 8, 3, 3), "convolution"),
        Layer("wide", (12, 300)),
        Layer("tall", (300, 7)),
        Layer("experts", (3, 14, 22), "experts"),
        Layer("transposed", (15, 20), "transposed_linear"),
        Layer("vector", (65,)),
        Layer("scalar", ()),
        Layer("empty", (0, 4)),
        Layer("one", (1, 1)),
    ]
)
_MANY = 1_000  # values of which a codec sends some
_SEEDS = {"gradients": 1_000, "codec": 7}


def check_codec(
    codec: Codec | type[Codec], layers: Sequence[Layer] = LAYERS, *, world_sizes: Sequence[int] = (1, 3)
) -> None:
    """Check the laws of the contract in lockstep, in this process.

    For the last number of ranks on a group of each layer, and on one group of all layers: a message is a tuple of
    vectors, and decoding adds its multiples in place. No argument and no message is changed. The same exchange gives
    the same bits, also in memory that is used again. All ranks get the same finite mean, in the gradients' shapes and
    dtypes. Bytes are those forecast, unless messages vary in size. A state has the keys and shapes that `kept` says, in
    memory of its own. A value that is not finite on one rank, each in turn, is finite on none. Zeros give zeros at the
    first step, unless the codec learns, and finite means at all steps. On the group of all layers errors are within
    what `guarantees` says, means over 8 draws, and what is decoded points along the gradient, unless the codec learns.

    Whether a codec computes what its paper says is left to a test of its own.

    >>> from gradlab.codec import check_codec
    >>> check_codec(codecs.make("topk", density=0.1))

    Args:
        codec: codec, with its wrappers, or a class with default settings. Learned tensors have to fit the layers.
        layers: layers of the groups, at least one.
        world_sizes: numbers of ranks, at least one.

    Raises:
        GradlabError: for the first law that does not hold, with the layer, the number of ranks and the step.
    """
    if not layers or not world_sizes or min(world_sizes) < 1:
        raise GradlabError(
            f"check_codec: {len(layers)} layers and world_sizes = {list(world_sizes)}, expected at least one of each, "
            "and ranks from 1"
        )
    codec = codec() if isinstance(codec, type) else codec
    fitted = bool(innermost(codec).learned)
    together = Table.of(layers)
    cases = [] if fitted else [(Table.of([one]), world_sizes[-1]) for one in layers]
    for table, world_size in [*cases, *((together, world_size) for world_size in world_sizes)]:
        codec.check(table)
        _Check(codec, table, world_size).all()
    _Check(codec, together, world_sizes[0]).errors()


@dataclass(frozen=True)
class _Check:
    """The laws for one group and one number of ranks."""

    codec: Codec
    table: Table
    world_size: int

    @property
    def _method(self) -> Codec:
        return innermost(self.codec)

    def all(self) -> None:
        states: list[Tensors] = [{}] * self.world_size
        reused = states
        self._decoding()
        for step in range(3 if len(self.table) > 1 else 2):
            before, grads = states, self._gradients(step)
            results = self._pure(grads, before, step)
            if step == 0:
                why = "the same exchange gives other bits: take random numbers from `generator` or `context` alone"
                self._same_bits(results, self._exchange(grads, before, step), step, why)
            self._means(results, grads, step)
            self._bytes(results, before[0], step)
            states = [result.value.state for result in results]
            self._states(states, step)
            overwritten = self._gradients(step)
            again = self._exchange(overwritten, reused, step, reuse=True)
            self._memory(results, grads, step)
            self._memory(again, overwritten, step)
            reused = [result.value.state for result in again]
            self._same_bits(results, again, step, "memory that is used again changes the result")
            self._overflow(before, step)
        self._zeros()

    def _decoding(self) -> None:
        """Compress a vector, and add half of what it stands for to a vector of ones."""
        if not isinstance(self._method, Compressor):
            return
        codec, vector = for_layers(self._method, self.table), Batch(self._gradients(0)[0], self.table).vector
        with self._named(0):
            payload = codec.compress(vector.clone(), torch.Generator().manual_seed(_SEEDS["codec"]))
        sound = isinstance(payload, tuple) and all(isinstance(one, torch.Tensor) and one.ndim == 1 for one in payload)
        self._require(sound, f"compress returned {str(payload)[:80]}, expected a tuple of vectors", 0)
        whole, half = torch.zeros_like(vector), torch.ones_like(vector)
        with self._named(0):
            codec.add_decompressed(whole, payload, 1.0)
            codec.add_decompressed(half, payload, 0.5)
        adds = torch.allclose(half, 1 + whole / 2, rtol=1e-4, atol=1e-4)
        adds = adds and (bool(whole.any()) or vector.numel() < _MANY)
        self._require(adds, "add_decompressed does not add scale * C(x) to `total`, in place", 0)

    def errors(self) -> None:
        """Compare the errors of the first exchange, over several draws, with what is guaranteed."""
        if self._method.about.learns:
            return
        error = energy = along = 0.0
        for draw in range(8):
            grads = self._gradients(draw)
            for result, own in zip(self._exchange(grads, [{}] * self.world_size, 0, draw=draw), grads, strict=True):
                given = result.value.compressor_input
                for name, sent in result.value.own.items():
                    error += float((sent - given[name]).double().square().sum())
                    energy += float(given[name].double().square().sum())
                    along += float((sent * own[name]).double().sum())
        self._require(along >= 0, "what is decoded points away from the gradient", 0)
        known = self._method.guarantees(self.table)
        self._require(isinstance(known, Guarantees), f"guarantees returned {known!r}, expected Guarantees", 0)
        bounds = {"delta": None if known.delta is None else 1 - known.delta, "omega": known.omega}
        for name, bound in bounds.items():
            if bound is not None and not list(wrappers_of(self.codec)):
                what = f"the error is {error / energy:.3g} of ||x||^2, where {name} = {getattr(known, name):g} allows"
                self._require(error <= (1.1 * bound + 1e-6) * energy, f"{what} {bound:.3g}", 0)

    def _zeros(self) -> None:
        zeros = [{layer.name: torch.zeros(layer.shape) for layer in self.table} for _ in range(self.world_size)]
        states: list[Tensors] = [{}] * self.world_size
        for step in range(3):
            results = self._exchange(zeros, states, step)
            self._means(results, zeros, step)
            states = [result.value.state for result in results]
            quiet = self._method.about.learns or not any(map(torch.any, results[0].value.mean.values()))
            self._require(quiet or step > 0, "zeros do not give zeros", step)

    def _gradients(self, step: int) -> list[Tensors]:
        draws = [torch.Generator().manual_seed(_SEEDS["gradients"] * (step + 1) + r) for r in range(self.world_size)]
        return [{layer.name: torch.randn(layer.shape, generator=draw) for layer in self.table} for draw in draws]

    def _exchange(
        self,
        grads: Sequence[Tensors],
        states: Sequence[Tensors],
        step: int,
        *,
        reuse: bool = False,
        answers: Any = None,
        draw: int = 0,
    ) -> list[LockstepResult[Exchanged]]:
        context = Context(0, self.world_size, step, self.table[0].name, _SEEDS["codec"] + draw)
        runs = [
            exchange_group(self.codec, Batch(own, self.table), state, replace(context, rank=rank), reuse=reuse)
            for rank, (own, state) in enumerate(zip(grads, states, strict=True))
        ]
        with self._named(step):
            return run_lockstep(runs if answers is None else [_noting(run, answers) for run in runs])

    @contextmanager
    def _named(self, step: int) -> Iterator[None]:
        """Say where an error that is not ours came from."""
        try:
            yield
        except GradlabError:
            raise
        except Exception as error:
            raise GradlabError(self._text(f"{type(error).__name__}: {error}", step)) from error

    def _pure(self, grads: Sequence[Tensors], states: Sequence[Tensors], step: int) -> list[LockstepResult[Exchanged]]:
        given: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensors in (*grads, *states, self._method.learned):
            given += [(one, one.clone()) for one in tensors.values()]
        results = self._exchange(grads, states, step, answers=given)
        self._require(all(_same(*pair) for pair in given), "an argument or a message was changed", step)
        return results

    def _means(self, results: Sequence[LockstepResult[Exchanged]], grads: Sequence[Tensors], step: int) -> None:
        for result in results:
            for name, grad in grads[0].items():
                mean, own = result.value.mean[name], result.value.own[name]
                fits = (mean.shape, own.shape, mean.dtype) == (grad.shape, grad.shape, grad.dtype)
                self._require(fits, f"{name}: the mean is not of the gradient's shape and dtype", step)
                self._require(_same(mean, results[0].value.mean[name]), f"{name}: ranks get different means", step)
                self._require(bool(mean.isfinite().all()), f"{name}: the mean of finite gradients is not finite", step)

    def _bytes(self, results: Sequence[LockstepResult[Exchanged]], before: Tensors, step: int) -> None:
        counted = sum(result.payload_bytes for result in results) / self.world_size
        forecast = self.codec.forecast(self.table, self.world_size, before).payload
        exact = abs(counted - forecast) <= 1e-9 * max(1.0, counted)
        self._require(
            sizes_vary(self.codec, self.world_size) or exact,
            f"{counted:g} bytes were counted, {forecast:g} were forecast",
            step,
        )

    def _states(self, states: Sequence[Tensors], step: int) -> None:
        for rank, state in enumerate(states):
            kept = self.codec.kept(self.table, rank, self.world_size, self.table[0].name)
            problem = state_problem(kept, state)
            self._require(problem is None, f"the state's {problem}", step)
            self._require(state.keys() == states[0].keys(), "ranks' states have different keys", step)

    def _memory(self, results: Sequence[LockstepResult[Exchanged]], grads: Sequence[Tensors], step: int) -> None:
        lent = {one.untyped_storage().data_ptr() for own in grads for one in own.values() if one.numel()}
        kept = [one for result in results for one in result.value.state.values() if one.numel()]
        shared = any(one.untyped_storage().data_ptr() in lent for one in kept)
        self._require(not shared, "a state is in the memory of gradients", step)

    def _same_bits(self, one: Sequence[LockstepResult[Exchanged]], other: Any, step: int, what: str) -> None:
        for a, b in zip(one, other, strict=True):
            pairs = ((a.value.mean, b.value.mean), (a.value.state, b.value.state))
            same = all(x.keys() == y.keys() and all(_same(x[key], y[key]) for key in x) for x, y in pairs)
            self._require(same, what, step)

    def _overflow(self, states: Sequence[Tensors], step: int) -> None:
        """Exchange what is not finite in one place of one rank: at each step in another layer."""
        if not (layers := [layer for layer in self.table if layer.numel]):
            return
        layer, grads = layers[step % len(layers)], self._gradients(step)
        place = layer.numel // 3 if step % 2 else layer.numel - 1
        grads[step % self.world_size][layer.name].view(-1)[place] = torch.nan if step % 2 else -torch.inf
        for result in self._exchange(grads, states, step):
            finite = bool(result.value.mean[layer.name].isfinite().all())
            self._require(not finite, f"{layer.name}: what is not finite on one rank is finite on another", step)

    def _require(self, holds: bool, what: str, step: int) -> None:
        if not holds:
            raise GradlabError(self._text(what, step))

    def _text(self, what: str, step: int) -> str:
        names = ", ".join(self.table.names[:3]) + (", ..." if len(self.table) > 3 else "")
        return f"codec {self.codec!r} on {names}, {self.world_size} ranks, step {step}: {what}"


def _noting(run: Coroutine[Exchanged], answers: list[tuple[torch.Tensor, torch.Tensor]]) -> Coroutine[Exchanged]:
    """Run an exchange, and note every tensor that it is sent, with a copy."""
    answer: Any = None
    while True:
        try:
            request = run.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield request
        answers += [(tensor, tensor.clone()) for tensor in _tensors_in(answer)]


def _tensors_in(answer: Any) -> Iterator[torch.Tensor]:
    if isinstance(answer, torch.Tensor):
        yield answer
    else:
        for part in answer:
            yield from _tensors_in(part)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors have the same bits, any NaN counting as NaN."""
    if one.is_floating_point():
        return torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))
    return torch.equal(one, other)
