"""Settings and learned tensors under a name: codecs and wrappers before they exchange anything."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

from gradlab.codec.batch import Tensors
from gradlab.codec.context import Context
from gradlab.codec.exchanged import exchange_group
from gradlab.codec.settings import check_ranges, fields_of
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.codec.contract import Codec

Result = TypeVar("Result")

#: What `Codec.apply` takes: one rank's gradient, tensors by layer name, or a list of either with one entry per rank.
Gradients = torch.Tensor | Tensors | Sequence[torch.Tensor] | Sequence[Tensors]


@dataclass(frozen=True)
class Applied:
    """The result of `Codec.apply`.

    decoded: the aggregated gradient that every rank would apply: a tensor, or tensors by layer name, like the input.
    payload_bytes: bytes that a rank contributed, mean over ranks.
    dense_bytes: bytes of a rank's uncompressed gradient, 4 per element.
    relative_error: ||decoded - m|| / ||m||, m the mean of the gradients.

    >>> done = codecs.make("one_bit").apply(torch.tensor([1.0, -3.0, 2.0, -2.0]))
    >>> done.decoded.tolist(), done.payload_bytes, round(done.relative_error, 3)
    ([1.5, -2.5, 1.5, -2.5], 9.0, 0.236)
    """

    decoded: torch.Tensor | Tensors
    payload_bytes: float
    dense_bytes: int
    relative_error: float

    @property
    def ratio(self) -> float:
        """How many times smaller the payload is than the gradient."""
        return self.dense_bytes / self.payload_bytes if self.payload_bytes else float("inf")

    @property
    def ratio_to_16_bits(self) -> float:
        """How many times smaller the payload is than the gradient in 16 bits."""
        return self.ratio / 2

    def __repr__(self) -> str:
        return (
            f"Applied({self.payload_bytes:,.0f} bytes instead of {self.dense_bytes:,}, "
            f"or {self.dense_bytes // 2:,} in 16 bits, relative error {self.relative_error:.3g})"
        )


class Method:
    """A method under its name: compared by its settings and learned tensors, and tried on gradients.

    Args:
        settings: an instance of the class's `Settings`. None: the defaults.
        learned: tensors that were learned from data, by name.

    Raises:
        GradlabError: for settings of another class, or out of range.
    """

    name: ClassVar[str]
    Settings: ClassVar[type]

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        self.settings = self.Settings() if settings is None else settings
        self.learned = dict(learned or {})
        self._cache: dict[Hashable, tuple[tuple[object, ...], Any]] = {}
        if not isinstance(self.settings, self.Settings):
            raise GradlabError(f"{self.name} takes {self.Settings.__qualname__}, not {type(self.settings).__name__}")
        check_ranges(self.settings, self.name)

    def __repr__(self) -> str:
        """Name the class, its first setting, and all settings that are not at their defaults."""
        parts = [f"learned={len(self.learned)} tensors"] if self.learned else []
        return f"{type(self).__name__}({', '.join([*shown_settings(self.settings, first=True), *parts])})"

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same name, settings and learned tensors."""
        return isinstance(other, Method) and _identity(self) == _identity(other)

    def __hash__(self) -> int:
        return hash(_identity(self))

    def cached(self, key: Hashable, make: Callable[[], Result], *sources: object) -> Result:
        """Return what `make` returned when this key came first, or when one of the sources was last another object.
        Besides these, the result follows from the settings alone."""
        known = self._cache.get(key)
        if known is None or len(known[0]) != len(sources) or any(map(operator.is_not, known[0], sources)):
            known = self._cache[key] = sources, make()
        return known[1]

    def apply(self, gradients: Gradients, *, seed: int = 0) -> Applied:
        """Run one exchange, the first of a run, on given gradients.

        >>> done = codecs.make("cast").apply([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
        >>> done.decoded, done.payload_bytes
        ({'w': tensor([2.])}, 2.0)

        Args:
            gradients: one rank's, as a tensor or as tensors by layer name; or a list of these, one per rank.
            seed: seed of the codec's random numbers.

        Returns:
            The decoded mean, its relative error and the payload in bytes.

        Raises:
            GradlabError: for anything but gradients, or if ranks differ in layers or shapes.
        """
        grads = _by_rank(gradients)
        contexts = [Context(rank, len(grads), 0, next(iter(grads[0]), ""), seed) for rank in range(len(grads))]
        codec = cast("Codec", self)
        results = run_lockstep([exchange_group(codec, own, {}, at) for own, at in zip(grads, contexts, strict=True)])
        mean, numel = results[0].value.mean, sum(grad.numel() for grad in grads[0].values())
        wanted = {name: torch.stack([own[name].double() for own in grads]).mean(0) for name in mean}
        error = sum(float((mean[name] - wanted[name]).norm()) ** 2 for name in mean) ** 0.5
        norm = sum(float(tensor.norm()) ** 2 for tensor in wanted.values()) ** 0.5
        return Applied(
            decoded=mean if _named(gradients) else next(iter(mean.values())),
            payload_bytes=fmean(result.payload_bytes for result in results),
            dense_bytes=4 * numel,
            relative_error=error / norm if norm else 0.0 if error == 0.0 else float("inf"),
        )


def _identity(codec: Any) -> tuple[Any, ...]:
    """Return what a codec and those that it wraps are: name, settings and learned tensors of each."""
    learned = tuple(sorted((key, hash_tensor(tensor)) for key, tensor in codec.learned.items()))
    return codec.name, codec.settings, learned, *(_identity(codec.codec) if hasattr(codec, "codec") else ())


def _named(gradients: Any) -> bool:
    """Return whether gradients came by layer name."""
    return isinstance(gradients[0] if isinstance(gradients, (list, tuple)) and gradients else gradients, Mapping)


def _by_rank(gradients: Any) -> list[Any]:
    ranks = gradients if isinstance(gradients, (list, tuple)) else [gradients]
    grads = [rank if isinstance(rank, Mapping) else {"gradient": rank} for rank in ranks]
    if not grads or not all(isinstance(grad, torch.Tensor) for own in grads for grad in own.values()):
        raise GradlabError(
            f"codec.apply: gradients = {str(gradients)[:80]}, expected a tensor, tensors by layer name, or a list of "
            "such, one per rank"
        )
    if any({k: t.shape for k, t in own.items()} != {k: t.shape for k, t in grads[0].items()} for own in grads):
        raise GradlabError("codec.apply: ranks have gradients of other names or shapes, expected the same of all")
    return grads


def shown_settings(settings: Any, *, first: bool) -> list[str]:
    """List the settings that are not at their defaults, as "name=value".

    settings: an instance of a codec's `Settings`.
    first: whether the first setting is listed even at its default.

    >>> from gradlab.codec import shown_settings
    >>> shown_settings(codecs.get("qsgd").Settings(bits=2), first=True)
    ['bits=2']
    """
    known = [(field, getattr(settings, field.name)) for field in fields_of(type(settings))]
    return [
        f"{field.name}={value!r}"
        for number, (field, value) in enumerate(known)
        if value != field.default or (first and number == 0)
    ]


def hash_tensor(tensor: torch.Tensor) -> str:
    """Compute the SHA-256, in hexadecimal, of a tensor's dtype, shape and bytes.

    >>> from gradlab.codec import hash_tensor
    >>> zeros = torch.zeros(2)
    >>> hash_tensor(zeros) == hash_tensor(zeros.clone()), hash_tensor(zeros) == hash_tensor(-zeros)
    (True, False)
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
