"""Entropy-coded scalar quantization: one step for all values, a dead zone, and codes as long as values are rare.

Uniform quantization with entropy coding is within a quarter of a bit of the rate-distortion function at high rates
(Gish, Pierce, "Asymptotically efficient quantizing", IEEE Transactions on Information Theory, 1968), and with a dead
zone near it at low ones (Sullivan, "Efficient scalar quantization of exponential and Laplacian random variables", IEEE
Transactions on Information Theory, 1996). One step for values of different variances is what reverse water-filling
asks for (Cover, Thomas, "Elements of information theory", section 10.3.3): each is distorted alike, and bits go where
the energy is.
"""

from __future__ import annotations

import copy
import functools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from gradlab import kernels
from gradlab.codec import (
    About,
    Batch,
    Compressor,
    Context,
    Deferred,
    Exchanged,
    PlanDefaults,
    Table,
    Tensors,
    Traits,
)
from gradlab.codec.kept import GONE, Entry, Kept, for_any
from gradlab.codec.routes import average_of_ranks, most_bytes
from gradlab.codec.settings import require, setting
from gradlab.codec.sparsifier import at_least
from gradlab.coding.level_steps import sample_of, searched_step
from gradlab.coding.level_values import DEAD_ZONE, centroids_of, values_of, wide
from gradlab.coding.levels import LARGEST, decode_levels, encode_levels
from gradlab.collectives import Coroutine, Gather
from gradlab.errors import GradlabError
from gradlab.layout import Layer

_HEADER = struct.Struct("<f3bf")  # the step, where values lie above three classes of levels, the squared error's share
_SLOPE = 2.5  # bits that a doubling of the step saves, per bit, at low rates; at high ones it saves one bit
_OFF, _FARTHEST = 0.04, 4.0  # octaves by which a step that is found anew is off, at low rates, and moves at first
_TRIES = 3  # messages under steps that follow from the last one, before a step is searched
_MANY, _FEW = 2**18, 2**16  # values on which a step is found, for the first time and anew
_FIXED, _BY_LAYER = _HEADER.size + 2, 5  # bytes of a message of which all levels are zero
_FEWEST = 16  # bytes of a message that are left for levels, at least
_CHANCE = 8  # bytes that a message of few values differs by from one step to the next
_LARGEST_STEP, _LEAST_ERROR = 3e38, 1e-12
_OF_GAUSSIAN = 2.4  # bits of Gaussian values at a step of their mean magnitude
_DEAREST = 34  # bits of a level, at most, but for the gap before it


Parts = Sequence[tuple["ECSQ", tuple[int, int]]]


class ECSQ(Compressor):
    """C(x)_i = sign(x_i) (k_i + c(k_i)) step, with k_i = floor(|x_i| / step - z) + 1, or 0 below z = 0.65.

    k is entropy-coded layer by layer under codes that everybody knows (`gradlab.coding.levels`). c says how far from k
    steps the values of level 1, 2 and of all higher ones lie on average. Each message carries its c and its step, and
    names its codes, so that nothing else has to be known to decode it.

    The step follows from one of three settings. With `bits` every rank controls it from iteration to iteration, beside
    the mean magnitude of its values, so that its messages take so many bits per value, with `error` so that C(x) misses
    so much of x. The first step, and any after three messages that are off by a tenth, is searched on the gradient
    itself, by the size of its code. A message of few values has 16 bytes for levels, at least. With `step` it is fixed.

    Message sizes vary. Their forecast is what was asked for. Values that are not zero are few at low rates, so that
    error feedback is on by default. A plan has one group of all layers by default, so that there is one step.

    >>> done = codecs.make("ecsq", step=1.0).apply(torch.tensor([0.1, -3.0, 0.2, 5.0]))
    >>> done.decoded.tolist()
    [0.0, -3.0, 0.0, 5.0]
    """

    name = "ecsq"
    entries: ClassVar[Mapping[str, Entry]] = {"step": Entry(carried=True, of_group=True)}
    about = About(
        "quantization",
        "ceil(bits * n / 8) + 11",
        "Gish & Pierce, 1968; Sullivan, 1996",
        candidates=tuple({"bits": bits} for bits in (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)),
        defaults=PlanDefaults(group_bytes=2**62),
    )

    @dataclass(frozen=True)
    class Settings:
        bits: float = setting(
            0.25,
            above=0,
            most=16,
            unit="bits per value",
            help="that messages take, unless the error or the step is set",
        )
        error: float | None = setting(
            None, above=0, below=1, unit="share of the norm", help="that a rank's values miss; None: `bits` decides"
        )
        step: float | None = setting(
            None,
            above=0,
            help="step in the gradient's unit; None: what gives messages the size or the error",
        )

        def __post_init__(self) -> None:
            both = self.error is not None and self.step is not None
            require(not both, "ecsq", "error", self.error, "None where the step is set")

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self._sizes: tuple[int, ...] = ()

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, varying=True, own_exchange=False)

    def for_layers(self, layers: Sequence[Layer]) -> ECSQ:
        def made() -> ECSQ:
            relative = type(self)(self.settings)
            relative._sizes = sizes
            return relative

        sizes = Table.of(layers).numels
        return self.cached(sizes, made)

    def part(self, start: int, stop: int) -> ECSQ:
        ends = np.cumsum([0, *self._sizes]).clip(start, stop)
        return self.for_layers(Table.of_shapes([(int(size),) for size in np.diff(ends) if size]))

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        vector, codec = grads.vector, self.for_layers(grads.table)
        key = f"{next(iter(grads), '')}/step"
        # A rank whose gradients were all zero keeps 0: which keys a state has is the same on all ranks.
        last = state.get(key, torch.zeros((), dtype=torch.float64))
        message: torch.Tensor
        quantized: Contribution | _ByKernels
        if sent := codec._sent_by_kernels(vector, [(codec, (0, len(vector)))], float(last)):
            (message,), used, unit = sent
            quantized = _ByKernels(message, codec._on_device(vector))
            after = codec._next(used, 0.0, len(message), len(vector))
        else:
            unit = _mean_magnitude(vector)  # the unit of steps from one iteration to the next
            message, quantized = codec.quantized(vector, float(last) * unit)
            after = codec.next_step(message, vector.numel())
        (answers,) = yield (Gather(message, varying=True, most=most_bytes(vector.numel())),)

        def mean() -> Tensors:
            total = context.memory.for_mean(vector, grads)
            payloads = [(answer,) for answer in answers]
            return grads.cut(average_of_ranks(codec, total, payloads, 1.0 / context.world_size))

        def own() -> Tensors:
            return grads.cut(quantized.added_to(context.memory.workspace.zeros_like(vector), 1.0))

        def error() -> Tensors:
            out = context.memory.copy(vector)
            return grads.cut(quantized.added_to(out, -1.0))

        kept: Tensors = {}
        if self.settings.step is None and len(vector):
            kept[key] = last
            if after is not None and 0 < unit < math.inf:
                kept[key] = torch.tensor(after / unit, dtype=torch.float64)
        return Exchanged(context.once(mean), Deferred(grads, own, error), kept)

    # --- one rank's message ---

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return the message, (bytes,), uint8, under the step that is set, or the one found on this vector."""
        return (self.quantized(vector, None)[0],)

    def quantized(self, vector: torch.Tensor, step: float | None) -> tuple[torch.Tensor, Contribution]:
        """Compress a vector (numel,) to a message (bytes,), uint8, and what it stands for: up to twice more if it
        misses the target by far, and then under a step that is searched. A step of None: as set, or searched."""
        numel, target, sent = vector.numel(), self._target(vector.numel()), None
        step, tried = self.settings.step or step, list[tuple[float, float]]()
        for _ in range(_TRIES if step else 0):
            if (sent := self._quantized(vector, step or 0.0)) is None:
                return self._message_of(vector, None), Contribution(None, None)
            message = self._message_of(vector, sent)
            beyond = self._beyond(sent.missed, len(message), numel, target)
            if abs(beyond) <= self._tolerance or not self._misses(len(message), numel, target):
                return message, sent.contribution
            tried.append((sent.step, beyond))
            step = _nearer(tried)
        found = self._found_step(vector, target, step)
        again = self._quantized(vector, found) if found or sent is None else sent
        return self._message_of(vector, again), again.contribution if again else Contribution(None, None)

    # --- on a GPU: few numbers go to the host ---

    def _on_device(self, vector: torch.Tensor) -> Any:
        """Return what kernels know of the layers, on the vector's device; None where they do not take it."""
        if not (len(vector) and kernels.usable(vector)):
            return None
        sizes = self._sizes or (len(vector),)
        made = functools.partial(_levels().table_for, sizes, vector.device, _HEADER.size)
        return self.cached(("on device", vector.device, sizes), made)

    def _sent_by_kernels(
        self, vector: torch.Tensor, parts: Parts, last: float
    ) -> tuple[list[torch.Tensor], float, float] | None:
        """Compress parts of a vector under a step of so many mean magnitudes, or as it is set. The host waits once,
        and for each further try of a step.

        Returns:
            A message for each part, the step, and the mean magnitude. None if a part needs its own table, or the step
            has to be another.
        """
        by_values = self.settings.error is not None  # on the host
        if by_values or not (self.settings.step or last) or not (len(vector) and kernels.usable(vector)):
            return None
        numel, target, magnitudes = len(vector), self._target_of(parts, len(vector)), vector.abs()
        unit = magnitudes.sum(dtype=torch.float32).double() / numel
        step = (unit * last if self.settings.step is None else torch.full_like(unit, self.settings.step)).float()
        tried: list[tuple[float, float]] = []
        for _ in range(_TRIES):
            coded = [part._encoded_by_kernels(vector[start:stop], step, target) for part, (start, stop) in parts]
            about = torch.stack([magnitudes.max().double(), unit, step.double()])
            largest, mean, used, *seen = torch.cat([about, *(ends for _, ends in coded)]).tolist()
            whole, misfits = int(sum(seen[::2])), any(seen[1::2])
            sound = 0 < used < math.inf and mean < math.inf and largest / LARGEST <= used  # NaN is not
            if misfits or not sound:
                return None
            beyond = self._beyond(0.0, whole, numel, target)
            if abs(beyond) <= self._tolerance or not self._misses(whole, numel, target):
                messages = [body[: int(nbytes)] for (body, _), nbytes in zip(coded, seen[::2], strict=True)]
                return (messages, used, mean) if sum(map(len, messages)) == whole else None
            tried.append((used, beyond))
            step = torch.full_like(step, _nearer(tried))
        return None

    def _encoded_by_kernels(
        self, vector: torch.Tensor, step: torch.Tensor, target: _Target
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a message with what follows it, and its bytes and how many parts do not fit, (2,), float64."""
        table = self._on_device(vector)
        if table is None:
            return _message(vector, b""), torch.zeros(2, dtype=torch.float64, device=vector.device)
        capacity = _HEADER.size + len(vector) // 8 + round(target.bits * len(vector) / 4) + 1024
        return _levels().encode(vector, step, table, capacity)

    def average_into(self, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        """Overwrite a vector (numel,) with scale times the sum of what messages stand for, and return it."""
        messages = [payload[0] for payload in payloads]
        table = self._on_device(out)
        whole = table is not None and min(map(len, messages)) >= _HEADER.size
        if whole and not _levels().add_decoded(out.zero_(), messages, scale, table).any():  # the host waits for it once
            return out
        out.zero_()
        for message in messages:
            self._add_one(out, message, scale)
        return out

    def compress_parts(
        self, vector: torch.Tensor, parts: Parts, last: float
    ) -> tuple[list[tuple[torch.Tensor, ...]], float]:
        """Compress parts of a vector (numel,) under one step, so that together they take the size that is set.

        Args:
            parts: the compressor of each part, and where the part starts and stops.
            last: the step after the iteration before, in mean magnitudes; 0 if there was none.

        Returns:
            The message of each part, and the next step in mean magnitudes.
        """
        if sent := self._sent_by_kernels(vector, parts, last):
            messages, used, unit = sent
            after = self._next(used, 0.0, sum(map(len, messages)), len(vector), self._target_of(parts, len(vector)))
            return [(message,) for message in messages], last if after is None else after / unit
        unit, pieces = _mean_magnitude(vector), [(part, vector[start:stop]) for part, (start, stop) in parts]
        target = self._target_of(parts, len(vector))
        step, tried = self.settings.step or last * unit, list[tuple[float, float]]()
        for _ in range(_TRIES if step else 0):
            step = _nearer(tried) if tried else step
            messages, beyond = self._under_one_step(vector, pieces, step, target)
            if abs(beyond) <= self._tolerance:
                break
            tried.append((step, beyond))
        else:
            if step:
                more = sum(map(len, messages)) - len(self._encoded_under(vector, step))  # that parts take than all
                target = target._replace(fixed=self._target(len(vector)).fixed + 8 * more / len(vector))
            step = self._found_step(vector, target, _nearer(tried) if tried else None)
            messages, beyond = self._under_one_step(vector, pieces, step, target)
        stays = self.settings.step is not None or not 0 < unit < math.inf or not 0 < step < math.inf
        return [(message,) for message in messages], last if stays else step * _correction(beyond) / unit

    def _under_one_step(
        self, vector: torch.Tensor, pieces: Sequence[tuple[ECSQ, torch.Tensor]], step: float, target: _Target
    ) -> tuple[list[torch.Tensor], float]:
        """Return each piece's message, and by how many octaves the step is too fine for all of them."""
        quantized = [part._quantized(piece, step) for part, piece in pieces]
        messages = [
            part._message_of(piece, one) if len(piece) else _message(piece, b"")
            for (part, piece), one in zip(pieces, quantized, strict=True)
        ]
        missed = 0.0
        if self.settings.error is not None:
            lost = sum(one.missed * _square(piece) for one, (_, piece) in zip(quantized, pieces, strict=True) if one)
            missed = lost / max(_square(vector), _LEAST_ERROR)
        beyond = self._beyond(missed, sum(map(len, messages)), len(vector), target)
        return messages, beyond if all(quantized) else 0.0

    def _message_of(self, vector: torch.Tensor, quantized: _Quantized | None) -> torch.Tensor:
        """Return the message of a quantized vector; NaN for one that is not finite."""
        if quantized is None:
            return _message(vector, _HEADER.pack(math.nan, 0, 0, 0, math.nan))
        return _message(vector, self._encoded(quantized, vector.numel()))

    @property
    def _tolerance(self) -> float:
        """Octaves that a step may be off without a second one: those of a message more than a tenth off."""
        return _OFF * max(1.0, _SLOPE * self.settings.bits)

    def _encoded(self, quantized: _Quantized, numel: int) -> bytes:
        positions, levels = quantized.positions.cpu().numpy(), quantized.levels.cpu().numpy()
        coded = encode_levels(positions, levels, self._sizes or (numel,))
        return _HEADER.pack(quantized.step, *quantized.told, quantized.missed) + coded

    def _quantized(self, vector: torch.Tensor, step: float) -> _Quantized | None:
        """Quantize a vector (numel,); None if it is not finite."""
        step, positions, values = self._selected(vector, step)
        if not math.isfinite(step):
            return None
        scaled = values.abs().to(wide(vector.dtype)) / step
        levels = (scaled - DEAD_ZONE).floor_().add_(1).clamp_(1, LARGEST)
        told = centroids_of(scaled - levels, levels)
        signed = levels.copysign(values).to(torch.int32)
        decoded = values_of(signed, step, told, vector.dtype)
        missed = self._missed(vector, values, decoded)
        return _Quantized(step, told, missed, positions, signed, Contribution(positions, decoded))

    def _selected(self, vector: torch.Tensor, step: float) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Return the step as it is sent, the positions of values that are not zero under it, and these values. It is
        the least step under which all levels can be sent, if it was smaller; not finite if a value is not."""
        step = _float32(step)
        positions = self._reaching(vector, step)
        values = vector.index_select(0, positions)
        least = _largest(values if step > 0 else vector) / LARGEST
        if least <= step:  # False with NaN
            return step, positions, values
        least = _float32(least) if math.isfinite(least) else least
        positions = self._reaching(vector, least)
        return least, positions, vector.index_select(0, positions)

    def _reaching(self, vector: torch.Tensor, step: float) -> torch.Tensor:
        if 0 < step < math.inf:
            return at_least(vector, DEAD_ZONE * step)
        return torch.zeros(0, dtype=torch.int64, device=vector.device)

    def _missed(self, vector: torch.Tensor, values: torch.Tensor, decoded: torch.Tensor) -> float:
        """Compute ||C(x) - x||^2 / ||x||^2 where the step follows from it, 0 if x is zero, from the values not decoded
        as zero."""
        if self.settings.error is None:
            return 0.0
        whole = _square(vector)
        sent, left = _square(values), _square(values - decoded)
        return min(1.0, max(0.0, whole - sent + left) / whole) if whole > 0 else 0.0

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        table = self._on_device(total) if len(payload[0]) >= _HEADER.size else None
        if table is not None:
            before = total.clone()
            if not _levels().add_decoded(total, payload, scale, table).any():  # the host waits for it
                return
            total.copy_(before)
        self._add_one(total, payload[0], scale)

    def _add_one(self, total: torch.Tensor, message: torch.Tensor, scale: float) -> None:
        if total.numel():
            self._decoded(message, total).added_to(total, scale)

    def _decoded(self, message: torch.Tensor, like: torch.Tensor) -> Contribution:
        data = message.cpu().numpy().tobytes()
        step, *told, _ = _header(data)
        if math.isnan(step):
            return Contribution(None, None)
        positions, levels = decode_levels(data[_HEADER.size :], self._sizes or (len(like),))
        places, there = (torch.from_numpy(found).to(like.device) for found in (positions, levels))
        return Contribution(places, values_of(there, step, told, like.dtype))

    # --- the step ---

    def next_step(self, message: torch.Tensor, numel: int) -> float | None:
        """Return the step of the next iteration from this rank's message of `numel` values; None if it stays. The
        smallest that can be sent bounds it, where none is small enough for the size."""
        step, *_, missed = _header(bytes(message[: _HEADER.size].tolist()))
        return self._next(step, missed, len(message), numel)

    def _next(self, step: float, missed: float, nbytes: int, numel: int, target: _Target | None = None) -> float | None:
        if self.settings.step is not None or not step > 0 or not numel:  # NaN is not
            return None
        return step * _correction(self._beyond(missed, nbytes, numel, target or self._target(numel)))

    def _target_of(self, parts: Parts, numel: int) -> _Target:
        """Return the bits per value asked for, and those of zeros, of messages of parts of a vector (numel,)."""
        shares = [(part._target(stop - start), (stop - start) / max(1, numel)) for part, (start, stop) in parts]
        bits, fixed = (sum(one[at] * share for one, share in shares) for at in range(2))
        return _Target(bits, fixed)

    def _target(self, numel: int) -> _Target:
        """Return the bits per value asked for; more of few values, which need some bytes for levels."""
        fixed = 8 * (_FIXED + _BY_LAYER * len(self._sizes or (numel,))) / max(1, numel)
        levels = max(self.settings.bits / 2, 8 * _FEWEST / max(1, numel))
        return _Target(max(self.settings.bits, fixed + levels), fixed)

    def _beyond(self, missed: float, nbytes: int, numel: int, target: _Target) -> float:
        """Return how many octaves the step is too fine for what was asked for, about; 0 where it is set."""
        if self.settings.step is not None or not numel:
            return 0.0
        if self.settings.error is not None:
            return math.log2(max(self.settings.error**2, _LEAST_ERROR) / max(missed, _LEAST_ERROR)) / 2
        return (8 * nbytes / numel - target.bits) / min(1.0, _SLOPE * target.bits)

    def _misses(self, nbytes: int, numel: int, target: _Target) -> bool:
        """Whether a message misses the size asked for by more bytes than chance makes of few values."""
        if self.settings.error is not None:
            return True
        return abs(nbytes - target.bits * numel / 8) > _CHANCE

    def _found_step(self, vector: torch.Tensor, target: _Target, guess: float | None = None) -> float:
        """Search the step of the size or the error that is set, on a sample, from a guess near it (None: from the mean
        magnitude); 0 if it is all zero or not finite."""
        sample, sizes = sample_of(vector, self._sizes or (vector.numel(),), _FEW if guess else _MANY)
        largest = min(_largest(sample), _LARGEST_STEP) if sample.isfinite().all() else 0.0
        if largest == 0:
            return 0.0
        on_sample, mean = copy.copy(self), _mean_magnitude(sample)
        on_sample._sizes = sizes
        finest, coarsest = largest / LARGEST, min(1.01 * largest / DEAD_ZONE, _LARGEST_STEP)
        if (error := self.settings.error) is not None:
            signal = functools.partial(on_sample._signal, sample)
            return searched_step(signal, 1 / max(error**2, _LEAST_ERROR), finest, coarsest, guess or 3 * error * mean)
        more = target.fixed - on_sample._target(len(sample)).fixed
        if _DEAREST * int(sample.count_nonzero()) / len(sample) + more <= target.bits:
            return finest
        bits = functools.partial(on_sample._bits, sample, more)
        return searched_step(bits, target.bits, finest, coarsest, guess or mean * 2 ** (_OF_GAUSSIAN - target.bits))

    def _bits(self, vector: torch.Tensor, more: float, step: float) -> float:
        """Count the bits per value of a message under a step, and so many more."""
        return 8 * len(self._encoded_under(vector, step)) / len(vector) + more

    def _encoded_under(self, vector: torch.Tensor, step: float) -> bytes:
        """Return the message of finite values under a step."""
        quantized = self._quantized(vector, step)
        assert quantized is not None  # it was looked at
        return self._encoded(quantized, len(vector))

    def _signal(self, vector: torch.Tensor, step: float) -> float:
        """Compute ||x||^2 / ||C(x) - x||^2 under a step."""
        quantized = self._quantized(vector, step)
        return 1 / max(_LEAST_ERROR, quantized.missed) if quantized else 0.0

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        lasting = None if self.settings.step is None and Table.of(layers).numel else GONE
        return for_any(layers, "step", Kept((), (torch.float64,), least=0.0, lasting=lasting))

    # --- forecasts ---

    def compressed_bytes(self, numel: int) -> int:
        """Return the bytes set; an error counts the bits of a Gaussian at that error, and a step alone a bit per
        value."""
        bits = self.settings.bits
        if self.settings.step is not None:
            bits = 1.0
        elif self.settings.error is not None:
            bits = max(0.02, -math.log2(self.settings.error))
        return _HEADER.size + math.ceil(bits * numel / 8)


@dataclass(frozen=True)
class Contribution:
    """The values that one rank's message stands for.

    positions: positions of values other than zero, ascending, (count,), int64.
    values: there, (count,). Both None: the vector was not finite.
    """

    positions: torch.Tensor | None
    values: torch.Tensor | None

    def added_to(self, total: torch.Tensor, scale: float) -> torch.Tensor:
        """Add scale * C(x) to a vector (numel,), in place, and return it."""
        if self.values is None or self.positions is None:
            return total.fill_(math.nan)
        return total.index_add_(0, self.positions, self.values if scale == 1.0 else self.values * scale)


class _ByKernels(NamedTuple):
    """The values that a message stands for, which kernels decode where it is."""

    message: torch.Tensor
    table: Any

    def added_to(self, total: torch.Tensor, scale: float) -> torch.Tensor:
        """Do what `Contribution` does."""
        _levels().add_decoded(total, [self.message], scale, self.table)
        return total


def _levels() -> Any:
    from gradlab.kernels import levels

    return levels


class _Target(NamedTuple):
    """Bits per value asked for, and those of messages of which all levels are zero."""

    bits: float
    fixed: float


@dataclass(frozen=True)
class _Quantized:
    """One rank's vector before it is coded: what its message begins with, and levels other than zero."""

    step: float
    told: Sequence[int]
    missed: float
    positions: torch.Tensor
    levels: torch.Tensor
    contribution: Contribution


def _header(data: bytes) -> tuple[Any, ...]:
    """Read what a message begins with: the step, three centroids, the squared error's share."""
    if len(data) < _HEADER.size:
        raise GradlabError(f"ecsq: a message of {len(data)} bytes, expected {_HEADER.size} or more")
    step, *told, share = _HEADER.unpack_from(data)
    if not (math.isnan(step) or (0 <= step < math.inf and 0 <= share <= 1)):
        raise GradlabError(f"ecsq: a step of {step:g} and an error of {share:g}, expected from 0, and 0 to 1")
    return step, *told, share


def _message(vector: torch.Tensor, data: bytes) -> torch.Tensor:
    """Bytes as a tensor where the vector is."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(vector.device)


def _largest(values: torch.Tensor) -> float:
    """Return the largest magnitude, infinite or NaN if a value is; 0 of nothing."""
    return max(map(abs, map(float, torch.aminmax(values)))) if values.numel() else 0.0


def _mean_magnitude(vector: torch.Tensor) -> float:
    """Average magnitudes, piece by piece in the cache."""
    total = math.inf
    for dtype in (wide(vector.dtype), torch.float64):  # single precision may end before the sum does
        if math.isinf(total) and vector.numel():
            sums = torch.stack([part.abs().sum(dtype=dtype) for part in vector.split(2**18)])
            total = float(sums.double().sum())
    return total / vector.numel() if vector.numel() else 0.0


def _square(values: torch.Tensor) -> float:
    """Sum squares, which do not leave double precision where values are single."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _float32(number: float) -> float:
    """Round to single precision; infinite where that ends."""
    return struct.unpack("<f", struct.pack("<f", number))[0] if number < 3.4e38 else math.inf


def _nearer(tried: Sequence[tuple[float, float]]) -> float:
    """Return the step to try after others, each with the octaves that it was too fine by: the first estimate, and then
    where a line through the last two ends at 0."""
    (before, finer), (step, octaves) = tried[-2:] if len(tried) > 1 else (tried[0], tried[0])
    apart = math.log2(step / before) if min(step, before) > 0 else 0.0
    if apart * (octaves - finer) < 0:
        octaves *= -apart / (octaves - finer)
    return step * 2 ** max(-_FARTHEST, min(_FARTHEST, octaves))


def _correction(doublings: float) -> float:
    """Return the factor on the step that takes half of so many doublings, and at most one. Sums, products and quotients
    alone give the same bits on every processor."""
    half = min(1.0, max(-1.0, doublings / 2))
    return (3 + half) / (3 - half)
