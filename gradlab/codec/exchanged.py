"""The result of an exchange, and the entry point that all executors share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from gradlab.codec.batch import Batch, Tensors, concatenate, separate
from gradlab.codec.context import Context, Memory
from gradlab.collectives import Coroutine, Mean
from gradlab.errors import BadMessage

if TYPE_CHECKING:
    from gradlab.codec.contract import Codec

_SMALL = 2**13  # elements of a layer whose copy costs less than a request of its own


class Deferred(Mapping[str, torch.Tensor]):
    """Tensors by layer name that are computed when the first of them is read, since most exchanges need no `own`.

    >>> from gradlab.codec import Deferred
    >>> own = Deferred(["w"], lambda: {"w": torch.ones(2)})
    >>> own["w"]
    tensor([1., 1.])

    Args:
        names: layers' names.
        compute: returns the tensors, the decoded contribution of this rank.
        compression_error: returns the compressor input less these tensors, in fewer passes than a subtraction. None:
            whoever needs the difference subtracts.
    """

    def __init__(
        self,
        names: Iterable[str],
        compute: Callable[[], Mapping[str, torch.Tensor]],
        compression_error: Callable[[], Tensors] | None = None,
    ) -> None:
        self._names = tuple(names)
        self._compute = compute
        self.compression_error = compression_error
        self._tensors: Mapping[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._tensors is None:
            self._tensors = self._compute()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Exchanged:
    """The result of an exchange on one rank. Tensors are by layer name and have the layers' shapes.

    A codec sets `mean`, `own` and, if it has one, `state`. Wrappers and executors set the other two.

    mean: the aggregated gradient, which every rank applies.
    own: the decoded contribution C(x) of this rank, which is what the other ranks decode from its message.
    state: the new state, under keys "<layer name>/<what>".
    compressor_input: x, the gradient, or under error feedback the gradient plus the residual.
    compression_error: x - C(x), if a wrapper has computed it. Else it is empty.
    server_input: under two-way compression, the mean of the ranks' contributions that this rank's server compresses,
        without its residual: the part in its shard for each layer, (elements,). Else it is empty.

    >>> from gradlab.codec import mean_only
    >>> from gradlab.collectives import run_lockstep
    >>> exchanged = run_lockstep([mean_only({"w": torch.tensor([value])}) for value in (1.0, 3.0)])[0].value
    >>> exchanged.mean, exchanged.own, exchanged.state
    ({'w': tensor([2.])}, {'w': tensor([1.])}, {})
    """

    mean: Tensors
    own: Mapping[str, torch.Tensor]
    state: Tensors = field(default_factory=dict)
    compressor_input: Tensors = field(default_factory=dict)
    compression_error: Tensors = field(default_factory=dict)
    server_input: Mapping[str, torch.Tensor] = field(default_factory=dict)


def exchange_group(
    codec: Codec,
    grads: Tensors,
    state: Tensors,
    context: Context,
    *,
    scaled_by: float = 1.0,
    reuse: bool = False,
) -> Coroutine[Exchanged]:
    """Run a codec on one group as an executor does: in float32, and without the loss scale.

    The mean comes back in the gradients' own dtype and scale. `own`, `compressor_input` and the state stay in
    float32 without the loss scale, so that a state remains valid when the loss scale changes.

    codec: the codec with its wrappers.
    grads: this rank's gradients by layer name, of any floating-point dtype; a `Batch` if layers have roles.
    state: the state that the last exchange returned, empty at first.
    context: surroundings of the exchange.
    scaled_by: the loss scale that the gradients are multiplied by.
    reuse: whether nobody reads the gradients after the exchange, so that the mean may be written in their memory.

    >>> from gradlab.codec import Context, exchange_group
    >>> from gradlab.collectives import run_lockstep
    >>> codec, gradients = codecs.make("cast"), [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}]
    >>> ranks = [exchange_group(codec, gradients[rank], {}, Context(rank, 2, 0, "w")) for rank in range(2)]
    >>> [result.value.mean["w"].tolist() for result in run_lockstep(ranks)]
    [[2.0], [2.0]]
    """
    scaled_by = 1.0 if codec.traits.keeps_dtype else scaled_by
    prepared = torch.Tensor.contiguous if codec.traits.keeps_dtype else functools.partial(_working, scaled_by=scaled_by)
    working = Batch.of(grads).like({name: prepared(grad) for name, grad in grads.items()})
    if reuse and codec.traits.frees_gradients:
        context = replace(context, memory=Memory(context.memory.workspace, working, overwrites=True))
    try:
        done = yield from run_codec(codec, working, state, context)
    except BadMessage as wrong:
        raise BadMessage(f"codec {described(codec)} on {context.group}: {wrong}") from wrong
    mean = {name: _rescaled(value, scaled_by, grads[name].dtype) for name, value in done.mean.items()}
    return replace(done, mean=mean, compressor_input=done.compressor_input or working)


def run_codec(codec: Codec, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
    """Run `exchange`. In a dense iteration, a codec without wrappers averages its input and keeps its state."""
    dense = context.dense and not hasattr(codec, "codec")
    return mean_only(grads, state) if dense else codec.exchange(grads, state, context)


def described(codec: Codec) -> str:
    """Name a codec and the wrappers around it, such as "topk+error_feedback"."""
    around = []
    while hasattr(codec, "codec"):
        around.append(codec.name)
        codec = codec.codec
    return "+".join([codec.name, *around])


def mean_only(grads: Tensors, state: Tensors | None = None) -> Coroutine[Exchanged]:
    """Exchange gradients uncompressed, see `means_of`, and keep a state.

    >>> from gradlab.codec import mean_only
    >>> from gradlab.collectives import run_lockstep
    >>> results = run_lockstep([mean_only({"w": torch.tensor([value])}) for value in (1.0, 3.0)])
    >>> results[0].value.mean, results[0].payload_bytes
    ({'w': tensor([2.])}, 4)
    """
    mean = yield from means_of(grads)
    return Exchanged(mean, dict(grads), {} if state is None else state)


def means_of(tensors: Tensors) -> Coroutine[Tensors]:
    """Average tensors over ranks, by name: by one Mean per large tensor, and one for the small ones of each dtype."""
    parts: dict[Any, Tensors] = {}
    for name, tensor in tensors.items():
        parts.setdefault(tensor.dtype if tensor.numel() < _SMALL else name, {})[name] = tensor
    answers = (yield tuple(Mean(concatenate(part)) for part in parts.values())) if parts else ()
    mean: Tensors = {}
    for part, answer in zip(parts.values(), answers, strict=True):
        mean |= separate(answer, part)
    return {name: mean[name] for name in tensors}


def _working(grad: torch.Tensor, scaled_by: float) -> torch.Tensor:
    wide = grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
    return (wide if scaled_by == 1.0 else wide / scaled_by).contiguous()


def _rescaled(mean: torch.Tensor, scaled_by: float, dtype: torch.dtype) -> torch.Tensor:
    scaled = mean if scaled_by == 1.0 else mean * scaled_by
    return scaled if scaled.dtype == dtype else scaled.to(dtype)
