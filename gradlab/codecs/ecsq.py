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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from gradlab.codec import (
    About,
    Compressor,
    Context,
    Deferred,
    Exchanged,
    Guarantees,
    PlanDefaults,
    Tensors,
    concatenate,
    separate,
)
from gradlab.codec.kept import Kept, for_any
from gradlab.codec.pieces import Pieces
from gradlab.codec.received import most_bytes, sent_by
from gradlab.codec.settings import require, setting
from gradlab.codec.shards import Payload
from gradlab.codec.sparsifier import at_least
from gradlab.coding.level_tables import CLASSES, LevelTables, advanced, nothing_known, running
from gradlab.coding.level_values import SEED, centroids_of, dither, in_units, undithered, uniform, values_of
from gradlab.coding.levels import FREQUENCIES, LARGEST, decode_levels, encode_levels
from gradlab.coding.random_bits import RandomBits
from gradlab.collectives import Coroutine, Gather
from gradlab.errors import GradlabError
from gradlab.layout import Layer

# The step, where values lie above three classes of levels (or which tables are known), the squared error's share.
_HEADER = struct.Struct("<f3bf")
_CENTROIDS = struct.Struct("<3b")  # in the header
_FITTED_TABLES = Kept(FREQUENCIES, (torch.int64,), least=0, most=2.0**53)
_RUNNING_TABLES = Kept(FREQUENCIES, (torch.float64,), least=0, most=2.0**53)  # whole numbers; states are floating point
_SAMPLE = 2**18  # values from which a first step is found
_SLOPE = 2.5  # bits that a doubling of the step saves, per bit, at low rates; at high ones it saves one bit
_OCTAVES, _HALVINGS = 30, 14  # of the interval in which the first step is looked for: it is found to 0.002 octaves


class ECSQ(Compressor):
    """C(x)_i = sign(x_i) (k_i + c(k_i)) step, with k_i = floor(|x_i| / step - dead_zone) + 1, or 0 below the dead zone.

    k is entropy-coded layer by layer (`gradlab.coding.levels`). c says how far from k steps the values of level 1, 2
    and of all higher ones lie on average. By default each message carries its tables and its c, with its step, so that
    whatever has to be known to decode travels. With `tables="running"` both follow, layer by layer, from what all ranks
    decoded before: code lengths from frequencies that lose an eighth with every iteration, and c from the share of
    level 1, as that of exponentially distributed magnitudes. With `tables="fitted"` both are those of a recording, in
    the artifact (`gradlab fit ecsq --tables fitted`). A layer whose tables do not fit sends its own. All ranks decode
    alike in each form, bit for bit.

    The step follows from one of three settings. With `bits` it is controlled from iteration to iteration so that
    messages take so many bits per value, with `error` so that C(x) misses so much of x. All ranks know the last
    iteration's messages and come to the same next step. The first one is found by every rank on its own gradient.
    With `step` it is fixed.

    Message sizes vary. Their forecast is what was asked for. Values that are not zero are few at low rates, so that
    error feedback is on by default. A plan has one group of all layers by default, so that there is one step.

    With `unbiased`, values are rounded to one of the two nearest levels by chance, without dead zone and centroids:
    E C(x) = x, and feedback is off by default. The step is at most the largest magnitude, whatever bits are asked for,
    so that E||C(x) - x||^2 <= (sqrt(numel) - 1) ||x||^2. A value far below the step is then sent as noise of the step's
    size; docs/ecsq.md has what that costs. With `dither` too, the random numbers that decide are subtracted from the
    levels again (subtractive dither; Roberts, "Picture coding using pseudo-random noise", IRE Transactions on
    Information Theory, 1962): they follow from a seed of 8 bytes in the message. Levels and bits are the same, all
    values are off by step^2 / 12 on average whatever they are, and E||C(x) - x||^2 <= numel / 12 ||x||^2. That is less
    than without where most values reach the step, and more where few do.

    >>> done = codecs.make("ecsq", step=1.0).apply(torch.tensor([0.1, -3.0, 0.2, 5.0]))
    >>> done.decoded.tolist()
    [0.0, -3.0, 0.0, 5.0]
    """

    name = "ecsq"
    about = About("quantization", "ceil(bits * n / 8) + 11", "Gish & Pierce, 1968; Sullivan, 1996")
    varying = True
    spreads = True
    defaults = PlanDefaults(group_bytes=2**62)
    group_state = frozenset({"step"})
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = tuple(
        {"bits": bits} for bits in (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
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
            None, above=0, help="in the gradient's unit; None: controlled, so that messages have the size or the error"
        )
        dead_zone: float = setting(
            0.65, least=0.5, most=1, unit="steps", help="below which values are zero; 0.5: all are rounded"
        )
        unbiased: bool = setting(
            False, help="round to one of the two nearest levels by chance, without a dead zone and centroids"
        )
        dither: bool = setting(False, help="subtract the chance again where levels are decoded, with `unbiased`")
        tables: str = setting(
            "message",
            choices=("message", "running", "fitted"),
            help='that codes and centroids follow from: each message\'s own, what was decoded before ("running"), or a '
            'recording ("fitted"); the last two are by layer, and not for shards',
        )

        def __post_init__(self) -> None:
            both = self.error is not None and self.step is not None
            require(not both, "ecsq", "error", self.error, "None where the step is set")
            require(self.unbiased or not self.dither, "ecsq", "dither", self.dither, "False without `unbiased`")

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self.defaults = replace(type(self).defaults, error_feedback=not self.settings.unbiased)
        self._sizes: tuple[int, ...] = ()
        self._known: LevelTables | None = None
        self._fitted: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # frequencies and centroids of layers
        self._step: float | None = None  # of `at`
        self._of_groups: dict[tuple[int, ...], ECSQ] = {}

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        if not self.settings.unbiased:
            return super().guarantees(layers)
        numel = sum(layer.numel for layer in layers)
        return Guarantees(unbiased=True, omega=numel / 12 if self.settings.dither else max(0.0, numel**0.5 - 1))

    @property
    def gathered(self) -> bool:
        return self.settings.tables == "message"  # a shard's tables would be those of whoever sent it

    def for_layers(self, shapes: Sequence[Sequence[int]]) -> ECSQ:
        sizes = tuple(map(math.prod, shapes))
        if sizes not in self._of_groups:
            relative = type(self)(self.settings)
            relative._sizes = sizes
            self._of_groups[sizes] = relative
        return self._of_groups[sizes]

    def held(self, vector: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Return the step, (), float64, see `quantized`."""
        return torch.tensor(self._step_for(vector, before if before is None else float(before)), dtype=torch.float64)

    def at(self, held: torch.Tensor | None) -> ECSQ:
        bound = copy.copy(self)
        bound._step = held if held is None else float(held)
        return bound

    def held_after(self, held: torch.Tensor | None, sent: Sequence[Payload], numel: int) -> torch.Tensor | None:
        after = self.next_step([message for (message,) in sent], numel)
        return held if after is None else torch.tensor(after, dtype=torch.float64)

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        vector, codec = concatenate(grads), self.of_group(grads)
        codec = codec._knowing(self._tables_of(list(grads), state))
        key = f"{next(iter(grads), '')}/step"
        before = float(state[key]) if key in state else None
        message, quantized = codec.quantized(vector, before, context.rank_generator())
        (answers,) = yield (Gather(message, varying=True, most=most_bytes(vector.numel())),)
        after = codec.next_step(answers, vector.numel() * len(answers))

        def mean() -> tuple[Tensors, Tensors]:
            total, seen = context.memory_for_mean(vector, grads).zero_(), nothing_known(len(grads))
            for rank, message in enumerate(answers):
                with sent_by(rank):
                    sent = codec._decoded((message,), total, codec._sizes, seen)
                sent.added_to(total, 1.0 / context.world_size)
            return separate(total, grads), codec._tables_after(list(grads), seen)

        def own() -> Tensors:
            return separate(quantized.added_to(context.workspace.zeros_like(vector), 1.0), grads)

        def error() -> Tensors:
            out = vector if context.reuse else context.workspace.empty_like(vector).copy_(vector)
            return separate(quantized.added_to(out, -1.0), grads)

        after = before if after is None else after
        kept = {} if after is None else {key: torch.tensor(after, dtype=torch.float64)}
        average, tables = context.alike(mean)
        return Exchanged(average, Deferred(grads, own, error), kept | tables)

    # --- tables that are known before a message ---

    def _knowing(self, known: LevelTables | None) -> ECSQ:
        told = copy.copy(self)
        told._known = known
        return told

    def _tables_of(self, names: Sequence[str], state: Tensors) -> LevelTables | None:
        """Return what is known of layers; None if messages carry it."""
        if self.settings.tables == "fitted":
            frequencies, centroids = zip(*map(self._fitted_of, names), strict=True)
            return LevelTables(frequencies, np.stack(centroids))
        if self.settings.tables == "running":
            frequencies = [
                state[key].cpu().numpy().astype(np.int64) if (key := f"{name}/tables") in state else nothing
                for name, nothing in zip(names, nothing_known(len(names)), strict=True)
            ]
            return self._bare(running(frequencies, self.settings.dead_zone))
        return None

    def _bare(self, tables: LevelTables) -> LevelTables:
        """Leave out the centroids where values are rounded by chance."""
        return replace(tables, centroids=np.zeros_like(tables.centroids)) if self.settings.unbiased else tables

    def _fitted_of(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a layer's fitted frequencies and centroids, on the host: they are read in every iteration."""
        if name not in self._fitted:
            frequencies, centroids = (self.learned[f"{name}/{what}"].cpu() for what in ("tables", "centroids"))
            self._fitted[name] = frequencies.numpy(), centroids.numpy().astype(np.int64)
        return self._fitted[name]

    def _tables_after(self, names: Sequence[str], seen: Sequence[np.ndarray]) -> Tensors:
        """Return the tables after an iteration, for the state. seen: frequencies of all ranks' messages."""
        if self._known is None or self.settings.tables != "running":
            return {}
        after = advanced(self._known.frequencies, seen)
        return {f"{name}/tables": torch.from_numpy(one).double() for name, one in zip(names, after, strict=True)}

    def check(self, layers: Sequence[Layer]) -> None:
        if self.settings.tables != "fitted":
            return super().check(layers)
        wanted = {f"{layer.name}/{what}" for layer in layers for what in ("tables", "centroids")}
        for key in sorted(wanted ^ self.learned.keys()):
            found = "is not there" if key in wanted else "belongs to no layer"
            raise GradlabError(
                f'ecsq: tables = "fitted", but {key} {found}: `gradlab fit ecsq TRACE --tables fitted` makes an '
                "artifact with the tables of all layers"
            )
        kept = {"tables": _FITTED_TABLES, "centroids": Kept((CLASSES,), (torch.int8,))}
        for key in sorted(wanted):
            if problem := kept[key.rpartition("/")[2]].problem(self.learned[key]):
                raise GradlabError(f"ecsq: {key} {problem}")

    def fit(self, layers: Sequence[Layer], samples: Mapping[str, torch.Tensor]) -> ECSQ:
        names = [layer.name for layer in layers]
        count = len(samples[names[0]])
        return self.fitted(layers, ({name: samples[name][number] for name in names} for number in range(count)))

    def fitted(self, layers: Sequence[Layer], contributions: Iterable[Tensors]) -> ECSQ:
        """Return this codec with the tables and the centroids of contributions, if its tables are fitted.

        contributions: of single ranks, in the order of their iterations, as the step follows from one to the next.
        """
        if self.settings.tables != "fitted":
            return self
        names, seen = [layer.name for layer in layers], nothing_known(len(layers))
        bare = LevelTables(nothing_known(len(layers)), np.zeros((len(layers), CLASSES), np.int64))
        codec = self.for_layers(self.shapes_of(layers))._knowing(bare)
        offsets, counts, step = np.zeros_like(bare.centroids, float), np.zeros_like(bare.centroids), None
        for number, grads in enumerate(contributions):
            vector = concatenate({name: grads[name].to(torch.float32) for name in names})
            message, _ = codec.quantized(vector, step, torch.Generator().manual_seed(number))
            found, *_ = _header(bytes(message.tolist()))
            if not math.isnan(found):
                codec._count_offsets(
                    codec._decoded((message,), vector, codec._sizes, seen), vector, found, offsets, counts
                )
                step = codec.next_step([message], vector.numel()) or step
        centroids = self._bare(LevelTables(seen, in_units(offsets / np.maximum(counts, 1)))).centroids
        learned: Tensors = {}
        for name, frequencies, of_layer in zip(names, seen, centroids, strict=True):
            learned[f"{name}/tables"] = torch.from_numpy(frequencies)
            learned[f"{name}/centroids"] = torch.from_numpy(of_layer.astype(np.int8))
        return type(self)(self.settings, learned)

    def _count_offsets(
        self, sent: Contribution, vector: torch.Tensor, step: float, offsets: np.ndarray, counts: np.ndarray
    ) -> None:
        """Add to how far values lie from their level, in steps, and to how many they are, by layer and class.

        sent: decoded without centroids.
        """
        if sent.values is None or sent.positions is None or not step:
            return
        levels = (sent.values.abs() / step).round_()
        beyond = vector.index_select(0, sent.positions).abs() / step - levels
        where = self._layers_at(sent.positions) * CLASSES + (levels.clamp(1, CLASSES) - 1).to(torch.int64)
        for total, weights in ((offsets, beyond.double().numpy()), (counts, None)):
            found = np.bincount(where.numpy(), weights, minlength=total.size)
            total += found.reshape(total.shape).astype(total.dtype)

    def _layers_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the layer at each position, (count,), int64."""
        ends = torch.tensor(self._sizes, device=positions.device).cumsum(0)
        return torch.bucketize(positions, ends, right=True)

    # --- one rank's message ---

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return the message, (bytes,), uint8, under the step that is set, or the one found on this vector."""
        return (self.quantized(vector, None, generator)[0],)

    def compress_pieces(
        self, vector: torch.Tensor, pieces: Pieces, generator: torch.Generator
    ) -> tuple[list[Payload], Callable[[torch.Tensor, float], torch.Tensor]]:
        quantized = self._quantized(vector, None, generator, pieces)
        if quantized is None:
            lost = Contribution(None, None)
            return [(_not_finite(vector),) for _ in range(pieces.world_size)], lost.added_to
        positions, levels = (one.cpu().numpy() for one in (quantized.positions, quantized.levels))
        sent: list[Payload] = []
        for rank, (there, of_shard) in enumerate(pieces.deal(positions, levels)):
            data = encode_levels(there, of_shard, pieces.sizes[rank].tolist())
            sent.append((_message(vector, quantized.headers[rank] + data),))
        return sent, quantized.contribution.added_to

    def quantized(
        self, vector: torch.Tensor, step: float | None, generator: torch.Generator
    ) -> tuple[torch.Tensor, Contribution]:
        """Compress a vector (numel,).

        step: of the last iteration's control; None: as set, or found on the vector.
        generator: of the chance with `unbiased`.

        Returns:
            The message, (bytes,), uint8, and what it stands for.
        """
        quantized = self._quantized(vector, step, generator)
        if quantized is None:
            return _not_finite(vector), Contribution(None, None)
        positions, levels = (one.cpu().numpy() for one in (quantized.positions, quantized.levels))
        known = None if self._known is None else self._known.frequencies
        data = encode_levels(positions, levels, self._sizes or (vector.numel(),), known)
        return _message(vector, quantized.headers[0] + data), quantized.contribution

    def _quantized(
        self, vector: torch.Tensor, step: float | None, generator: torch.Generator, pieces: Pieces | None = None
    ) -> _Quantized | None:
        """Quantize a vector (numel,), for a message to every shard if there are pieces; None if it is not finite."""
        step = self._step_for(vector, step)
        if self.settings.unbiased:
            return self._drawn(vector, step, generator, pieces)
        step, positions, values = self._selected(vector, step)
        if not math.isfinite(step):
            return None
        scaled = values.abs() / step
        levels = (scaled - self.settings.dead_zone).floor_().add_(1).clamp_(1, LARGEST)
        told = self._told(lambda: centroids_of(scaled - levels, levels))
        signed = levels.copysign(values).to(torch.int32)
        decoded = self._values(positions, signed, step, told, vector.dtype)
        header = _HEADER.pack(step, *told, self._missed(vector, values, decoded))
        return _Quantized([header] * _shards(pieces), positions, signed, Contribution(positions, decoded))

    def _told(self, centroids: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Return three bytes for the header: the message's centroids, or which tables it was written under."""
        return centroids() if self._known is None else _CENTROIDS.unpack(self._known.digest)

    def _values(
        self, positions: torch.Tensor, levels: torch.Tensor, step: float, told: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Decode levels (count,), int32: the same arithmetic in whoever sends and whoever receives.

        told: by the header.
        """
        if self._known is None:
            return values_of(levels, step, np.array([told]), dtype)
        return values_of(levels, step, self._known.centroids, dtype, self._layers_at(positions))

    def _drawn(
        self, vector: torch.Tensor, step: float, generator: torch.Generator, pieces: Pieces | None
    ) -> _Quantized | None:
        """Round x / step up or down by chance.

        The step is at most the largest magnitude, and at least such that all levels can be sent.
        """
        largest = _largest(vector)
        if not math.isfinite(largest):
            return None
        step = _float32(min(max(step, largest / LARGEST), largest))
        seeds, places = self._places(vector, generator, pieces)
        rounded = (vector / (step or 1.0)).add_(places).floor_()  # no value is above a step of 0
        positions = at_least(rounded, 1.0)
        levels = rounded.index_select(0, positions).clamp_(-LARGEST, LARGEST).to(torch.int32)
        if self.settings.dither:
            told, values, decoded = None, vector, undithered(places, positions, levels, step)
        else:
            told, values = positions, vector.index_select(0, positions)
            decoded = values_of(levels, step, np.zeros((1, CLASSES), np.int64), vector.dtype)
        header = _HEADER.pack(step, *self._told(lambda: [0] * CLASSES), self._missed(vector, values, decoded))
        return _Quantized([header + seed for seed in seeds], positions, levels, Contribution(told, decoded))

    def _places(
        self, vector: torch.Tensor, generator: torch.Generator, pieces: Pieces | None
    ) -> tuple[list[bytes], torch.Tensor]:
        """Draw numbers in (0, 1), (numel,), and return them after what each message says of those of its shard."""
        if not self.settings.dither:
            return [b""] * _shards(pieces), uniform(RandomBits(generator, vector.device), vector)
        drawn = torch.randint(2**62, (_shards(pieces),), generator=generator, device=generator.device).tolist()
        seeds = [SEED.pack(seed) for seed in drawn]
        if pieces is None:
            return seeds, dither(seeds[0], vector)
        places = torch.empty_like(vector)
        for rank, seed in enumerate(seeds):
            there = torch.from_numpy(pieces.in_vector(rank, np.arange(pieces.numel(rank)))).to(vector.device)
            places[there] = dither(seed, places[: pieces.numel(rank)])
        return seeds, places

    def _selected(self, vector: torch.Tensor, step: float) -> tuple[float, torch.Tensor, torch.Tensor]:
        """Return the step as it is sent, the positions of the values that are not zero under it, and these values.

        The step is the least one under which all levels can be sent, if it was smaller; not finite if a value is not.
        """
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
            return at_least(vector, self.settings.dead_zone * step)
        return torch.zeros(0, dtype=torch.int64, device=vector.device)

    def _step_for(self, vector: torch.Tensor, before: float | None) -> float:
        return self.settings.step or before or self._step or self._found_step(vector)

    def _missed(self, vector: torch.Tensor, values: torch.Tensor, decoded: torch.Tensor) -> float:
        """Compute ||C(x) - x||^2 / ||x||^2 where the step follows from it; 0 if x is zero.

        values, decoded: of what is not decoded as zero.
        """
        if self.settings.error is None:
            return 0.0
        whole = float(torch.linalg.vector_norm(vector)) ** 2
        sent, left = (float(torch.linalg.vector_norm(one)) ** 2 for one in (values, values - decoded))
        return min(1.0, max(0.0, whole - sent + left) / whole) if whole > 0 else 0.0

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        self._decoded(payload, total, self._sizes or (total.numel(),)).added_to(total, scale)

    def add_pieces(self, total: torch.Tensor, payload: Payload, rank: int, pieces: Pieces) -> None:
        in_vector = functools.partial(pieces.in_vector, rank)
        self._decoded(payload, total, pieces.sizes[rank].tolist(), None, in_vector).added_to(total, 1.0)

    def _decoded(
        self,
        payload: Sequence[torch.Tensor],
        like: torch.Tensor,
        sizes: Sequence[int],
        seen: Sequence[np.ndarray] | None = None,
        moved: Callable[[np.ndarray], np.ndarray] = lambda positions: positions,
    ) -> Contribution:
        """Decode a message of layers of these sizes.

        like: of the values' device and dtype.
        seen: frequencies by layer, to which those of the message are added, where tables are known.
        moved: where positions lie in the vector that they are added to.
        """
        data = payload[0].cpu().numpy().tobytes()
        step, *told, _ = _header(data)
        if math.isnan(step):
            return Contribution(None, None)
        known = None if self._known is None else self._known.frequencies
        if self._known is not None and _CENTROIDS.pack(*told) != self._known.digest:
            raise GradlabError("ecsq: a message under other tables: the ranks' states or artifacts are not the same")
        begins = _HEADER.size + (SEED.size if self.settings.dither else 0)
        _check_length(data, begins)
        positions, levels = decode_levels(data[begins:], sizes, known, seen)
        there = torch.from_numpy(levels).to(like.device)
        if self.settings.dither:
            places = dither(data[_HEADER.size : begins], like.new_empty(sum(sizes)))
            values = undithered(places, torch.from_numpy(positions).to(like.device), there, step)
            positions = np.arange(len(values))
        else:
            values = self._values(torch.from_numpy(positions).to(like.device), there, step, told, like.dtype)
        return Contribution(torch.from_numpy(moved(positions)).to(like.device), values)

    # --- the step ---

    def next_step(self, messages: Sequence[torch.Tensor], numel: int) -> float | None:
        """Return the step of the next iteration, the same on all ranks, or None if it stays as it is.

        It follows from the steps that were sent. The smallest that can be sent bounds it, where no step is small enough
        to give the size asked for, as with few values other than zero.

        messages: of all ranks, or one rank's to all servers.
        numel: values that they describe, all together.
        """
        headers = []
        for rank, message in enumerate(messages):
            with sent_by(rank):
                headers.append(_header(bytes(message[: _HEADER.size].tolist())))
        known = [header for header in headers if header[0] > 0]  # NaN is not
        if self.settings.step is not None or not known or not numel:
            return None
        step = math.fsum(header[0] for header in known) / len(known)
        if self.settings.error is not None:
            found = math.fsum(header[-1] for header in known) / len(known)
            wanted = self.settings.error**2
            return step * _correction((wanted - found) / max(wanted, found))
        bits, wanted = 8 * sum(map(len, messages)) / numel, self.settings.bits
        return step * _correction((bits - wanted) / min(1.0, _SLOPE * wanted))

    def _found_step(self, vector: torch.Tensor) -> float:
        """Find the step that gives the size or the error asked for, on a sample; 0 if all of the vector is zero."""
        every = max(1, vector.numel() // _SAMPLE)
        sample = vector[::every].abs().double()
        low, high = 0.0, float(sample.max()) / self.settings.dead_zone if sample.numel() else 0.0
        if not (0 < high < math.inf):
            return 0.0
        low = high * 2.0**-_OCTAVES
        for _ in range(_HALVINGS):
            step = math.sqrt(low * high)
            low, high = (step, high) if self._is_too_fine(sample, step) else (low, step)
        return high

    def _is_too_fine(self, sample: torch.Tensor, step: float) -> bool:
        if self.settings.unbiased:
            levels = (sample / step + _evenly(len(sample), sample)).floor_()
        else:
            levels = (sample / step - self.settings.dead_zone).floor_().add_(1)
        if self.settings.error is not None:
            missed = (levels * step).sub_(sample).square_().sum()
            wanted = self.settings.error**2 * float(sample.square().sum())
            return (len(sample) * step**2 / 12 if self.settings.dither else float(missed)) < wanted
        counts = levels.clamp_(max=255).to(torch.int64).bincount().double()
        shares = counts[counts > 0] / len(sample)
        bits = -float((shares * shares.log2()).sum()) + float((levels > 0).double().mean())  # and a sign each
        return bits > self.settings.bits

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        step = for_any(layers, "step", self.kept_by_messages)
        if self.settings.tables != "running":
            return step
        return step | {f"{layer.name}/tables": _RUNNING_TABLES for layer in layers}

    @property
    def kept_by_messages(self) -> Kept:
        return Kept((), (torch.float64,), least=0.0)

    def adopted_state(self, state: Tensors) -> Tensors:
        """Continue from the step of other settings, and from tables if these run, too."""
        continued = ("step", "tables") if self.settings.tables == "running" else ("step",)
        return {key: value for key, value in state.items() if key.rpartition("/")[2] in continued}

    # --- forecasts ---

    def compressed_bytes(self, numel: int) -> int:
        """Return the bytes asked for; an error or a step asks for as many bits as a Gaussian would take at that error.

        A step alone says nothing of a size: a bit per value stands for it.
        """
        bits = self.settings.bits
        if self.settings.step is not None:
            bits = 1.0
        elif self.settings.error is not None:
            bits = max(0.02, -math.log2(self.settings.error))
        return _HEADER.size + math.ceil(bits * numel / 8)


@dataclass(frozen=True)
class Contribution:
    """What one rank's message stands for.

    positions: of values other than zero, ascending, (count,), int64; None: all.
    values: there, (count,); None: the vector was not finite.
    """

    positions: torch.Tensor | None
    values: torch.Tensor | None

    def added_to(self, total: torch.Tensor, scale: float) -> torch.Tensor:
        """Add scale * C(x) to a vector (numel,), in place, and return it."""
        if self.values is None:
            return total.fill_(math.nan)
        if self.positions is None:
            return total.add_(self.values, alpha=scale)
        return total.index_add_(0, self.positions, self.values if scale == 1.0 else self.values * scale)


@dataclass(frozen=True)
class _Quantized:
    """One rank's vector before it is coded: what the message to each shard begins with, and levels other than zero."""

    headers: list[bytes]
    positions: torch.Tensor
    levels: torch.Tensor
    contribution: Contribution


def _shards(pieces: Pieces | None) -> int:
    """Count the messages of a vector."""
    return 1 if pieces is None else pieces.world_size


def _evenly(count: int, like: torch.Tensor) -> torch.Tensor:
    """Return numbers in [0, 1) that are spread evenly, (count,): multiples of the golden ratio."""
    return torch.arange(count, dtype=like.dtype, device=like.device).mul_((5**0.5 - 1) / 2).remainder_(1.0)


def _header(data: bytes) -> tuple[Any, ...]:
    """Read what a message begins with: the step, three centroids, the squared error's share."""
    _check_length(data, _HEADER.size)
    step, *told, share = _HEADER.unpack_from(data)
    if not (math.isnan(step) or (0 <= step < math.inf and 0 <= share <= 1)):
        raise GradlabError(f"ecsq: a step of {step:g} and an error of {share:g}, expected from 0, and 0 to 1")
    return step, *told, share


def _check_length(data: bytes, least: int) -> None:
    if len(data) < least:
        raise GradlabError(f"ecsq: a message of {len(data)} bytes, expected {least} or more")


def _not_finite(vector: torch.Tensor) -> torch.Tensor:
    """Say in a message that a vector is not finite."""
    return _message(vector, _HEADER.pack(math.nan, 0, 0, 0, math.nan))


def _message(vector: torch.Tensor, data: bytes) -> torch.Tensor:
    """Bytes as a tensor where the vector is."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(vector.device)


def _largest(values: torch.Tensor) -> float:
    """Return the largest magnitude, infinite or NaN if a value is; 0 of nothing."""
    return max(map(abs, map(float, torch.aminmax(values)))) if values.numel() else 0.0


def _float32(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", min(number, 3e38)))[0]


def _correction(doublings: float) -> float:
    """Return the factor on the step that takes half of so many doublings, and at most one.

    Sums, products and quotients alone, so that it is the same bits on every processor.
    """
    half = min(1.0, max(-1.0, doublings / 2))
    return (3 + half) / (3 - half)
