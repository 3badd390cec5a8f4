"""How DDP lays gradients out in its buckets, which it does not tell.

DDP lays a gradient out by the strides that its parameter had when the buckets were made: with the model, and once more
after the first backward pass, unless unused parameters are looked for. It shows every gradient as if it were
contiguous, and reads the average by the strides of today. After `Module.to(memory_format=...)` plain DDP
therefore permutes gradients. So a gradient in a bucket is compared with the one that autograd has just left in
`parameter.grad`, in the first backward passes and whenever strides have changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, permutations

import torch
import torch.distributed as dist
from torch import nn

from gradlab.errors import GradlabError
from gradlab.layout import names_of_parameters

_COMPARED = 3  # backward passes, the one after which DDP makes its buckets anew among them
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
Strides = tuple[int, ...]


class OldGradient(GradlabError):
    """A bucket holds another gradient than its parameter's: DDP did not copy that, as their layouts differ."""


@dataclass
class _Layout:
    """The layout of one gradient in its bucket.

    strides: the parameter's, last time.
    lies: the gradient's.
    read: those by which DDP will read the average.
    turned: whether the parameter's strides are no contiguous ones, or were others before.
    sure: comparisons that confirmed `lies`.
    """

    strides: Strides
    lies: Strides
    read: Strides
    turned: bool
    sure: int = 0


class BucketLayouts:
    """Reads the gradients of DDP's buckets, each in its parameter's shape. It does not keep the model alive.

    rearrange: whether a gradient is laid out anew, in the bucket, where DDP would read its average by other strides
        than it lies by. Plain DDP does not.
    """

    def __init__(self, model: nn.Module, rearrange: bool) -> None:
        self._model, self._rearrange = weakref.ref(model), rearrange
        self._known: dict[torch.Tensor, _Layout] = {}

    def gradients(self, bucket: dist.GradBucket) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """List the parameters of a bucket, each with its gradient: a view of the bucket's buffer in the parameter's
        shape. `OldGradient` is raised for one that is not in the bucket in any layout."""
        if bucket.buffer().is_sparse:
            raise GradlabError(
                f"{self._name(bucket.parameters()[0])}: a sparse gradient (an embedding with sparse=True), and only "
                "dense gradients can be compressed; make the embedding with sparse=False"
            )
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        return [(parameter, self._view(parameter, gradient)) for parameter, gradient in pairs]

    def _view(self, parameter: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        if parameter.dim() < 2:
            return shown
        known, strides = self._known.get(parameter), parameter.stride()
        if known is None or known.strides != strides:
            turned = known is not None or not parameter.is_contiguous()
            known = self._known[parameter] = _Layout(strides, _expected(parameter), _expected(parameter), turned)
        if known.sure < _COMPARED and not _compare(known, parameter, shown):
            raise OldGradient(
                f"{self._name(parameter)}: its gradient is in DDP's bucket in no layout of the parameter's: its memory "
                "layout was changed after the DDP model was made; call .to(memory_format=...) before "
                "DistributedDataParallel(...)"
            )
        if known.lies != known.read and self._rearrange:
            read = shown.as_strided(shown.shape, known.read)
            return read.copy_(shown.as_strided(shown.shape, known.lies).clone())
        return shown if known.lies == shown.stride() else shown.as_strided(shown.shape, known.lies)

    def _name(self, parameter: torch.Tensor) -> str:
        model = self._model()
        names = {} if model is None else names_of_parameters(model)
        return names.get(id(parameter), f"a layer {list(parameter.shape)}")


def _expected(parameter: torch.Tensor) -> Strides:
    """The parameter's strides where they leave no gap and no overlap, which DDP asks for; else contiguous ones."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return parameter.stride() if dense else _contiguous(parameter)


def _contiguous(parameter: torch.Tensor) -> Strides:
    return torch.empty(parameter.shape, device="meta").stride()


def _compare(known: _Layout, parameter: torch.Tensor, shown: torch.Tensor) -> bool:
    """Find out how a gradient lies in its bucket, from the same one in `parameter.grad`; whether it is there at all."""
    gradient = parameter.grad
    if gradient is None:  # the loss does not depend on it
        return True
    if gradient.data_ptr() == shown.data_ptr():  # a view of the bucket itself
        known.lies = known.read = gradient.stride()
        known.sure += 1
        return True
    with torch.no_grad():
        wanted, found = gradient.nan_to_num(), shown.nan_to_num()

        def alike(candidates: Iterable[Strides]) -> Iterator[Strides]:
            return (one for one in candidates if torch.equal(found.as_strided(found.shape, one), wanted))

        likely = list(alike(_likely(parameter))) or list(islice(alike(_dense(parameter)), 1))
        told = bool(likely) or bool(found.any())  # a rank without input under `join` has zeros in its buckets
    if likely:
        known.lies = known.lies if known.lies in likely else likely[0]
        known.sure += len(likely) == 1
        return True
    if not known.turned:  # a hook may have changed parameter.grad after DDP copied it
        known.sure += told
    return not (told and known.turned)


def _likely(parameter: torch.Tensor) -> list[Strides]:
    """Layouts that a gradient is likely to have: one of each kind that differs in dimensions longer than 1."""
    meta = torch.empty(parameter.shape, device="meta")
    formats = [_FORMATS[parameter.dim()]] if parameter.dim() in _FORMATS else []
    others = [meta.contiguous(memory_format=one).stride() for one in formats]
    known: dict[Strides, Strides] = {}
    for one in (_expected(parameter), meta.stride(), *others):
        known.setdefault(tuple(step for step, length in zip(one, parameter.shape, strict=True) if length > 1), one)
    return list(known.values())


def _dense(parameter: torch.Tensor) -> Iterator[Strides]:
    """Layouts without a gap or an overlap, whatever the order of dimensions: the parameter may have been transposed."""
    if parameter.dim() <= max(_FORMATS):
        for order in permutations(range(parameter.dim())):
            lengths = [parameter.shape[axis] for axis in order]
            steps = dict(zip(order, torch.empty(lengths, device="meta").stride(), strict=True))
            yield tuple(steps[axis] for axis in range(parameter.dim()))
