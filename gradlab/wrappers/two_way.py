"""Two-way compression: a server averages the ranks' compressed gradients and compresses the mean, with error feedback.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
Algorithm 2, lines 9 to 12 (one server); Tang et al., "DoubleSqueeze", ICML 2019. With a sharded server, every rank
is the server of one part, so that no link carries more than the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradlab.codec import (
    Batch,
    Bytes,
    Codec,
    Compressor,
    Context,
    Deferred,
    Exchanged,
    Sparsifier,
    Table,
    Tensors,
    concatenate,
)
from gradlab.codec.abilities import decompress, for_layers, part_of, position_bytes
from gradlab.codec.batch import Sums
from gradlab.codec.contraction import contraction_setting, next_zeta, scale_down
from gradlab.codec.exchanged import run_codec
from gradlab.codec.kept import GONE, Entry, Kept, for_any
from gradlab.codec.routes import (
    Payload,
    Shard,
    Sharded,
    Shards,
    Shardwise,
    compressed,
    residual,
    shards_of,
    shards_on,
)
from gradlab.codec.settings import fields_of, setting
from gradlab.codec.wrapper import (
    MEASURED,
    SHARED,
    Effects,
    Wrapper,
    buffer_setting,
    in_own_memory,
    kept_buffer,
    load_buffer,
    load_buffers,
    scales,
    step_size_setting,
    store_buffer,
    store_buffers,
)
from gradlab.codecs.chunk_topk import ChunkTopK
from gradlab.collectives import Broadcast, Coroutine, Gather, ring_sends
from gradlab.collectives.requests import LENGTH_BYTES
from gradlab.errors import GradlabError
from gradlab.layout import Layer

_SERVER = 0  # the rank that serves all, where there is one
_SOME = 2**16  # values, to see whether a setting makes messages longer
_SELECTIONS = Sparsifier, ChunkTopK
_CHUNKS, _LEAST = 8, 2**13  # of answers that a server is worth, or values: each answer begins with some bytes
_CHUNK, _BITS = 1024, 4  # of answers to selections, most of whose bytes would be values of 32 bits


class TwoWay(Wrapper):
    """Rank i sends C(x_i), shard by shard, to each shard's server; a server answers C(mean + server residual).

    The ranks' own compression errors, x_i - C(x_i), are not kept here: put error feedback or momentum correction around
    this wrapper. The servers' compression errors are kept: each rank holds that of its shard as "server_residual".
    After a change of the world size every rank has the whole layers' as "server_whole", until the next exchange cuts
    it. Between fewer ranks than `from_ranks` the codec exchanges as it does alone, and each rank's message brings
    along what servers of an earlier exchange have left.

    >>> codec = wrappers.get("two_way")(codecs.make("one_bit"))
    >>> codec.apply([torch.ones(64), 3 * torch.ones(64)])
    Applied(24 bytes instead of 256, or 128 in 16 bits, relative error 0)
    """

    name = "two_way"
    entries: ClassVar[Mapping[str, Entry]] = {
        "server_residual": Entry("joined", residual=True, carried=True, joined_as="server_whole"),
        "server_whole": replace(SHARED, residual=True),
        "server_zeta": MEASURED,
        "server_step": Entry(carried=True, of_group=True),
    }
    effects = Effects(server_residual=True)

    @dataclass(frozen=True)
    class Settings:
        server: str = setting(
            "sharded", choices=("sharded", "rank"), help="every rank serves one shard, or rank 0 serves all"
        )
        error_feedback: bool = setting(True, help="whether a server adds the compression errors of its earlier answers")
        from_ranks: int = setting(
            1, least=1, unit="ranks", help="between which means come back compressed; fewer: the codec's own exchange"
        )
        answer: float = setting(
            1.0,
            least=1,
            unit="times",
            help="a message's bytes that an answer about as many values takes, by the codec's setting that says so",
        )
        step_size_ratio: bool | None = step_size_setting(None, "the server's residual")
        buffer: str = buffer_setting("the server's residual is", host=True)
        contraction: str = contraction_setting()

    def __init__(self, codec: Codec, settings: TwoWay.Settings | None = None) -> None:
        super().__init__(codec, settings)
        if not isinstance(codec, Compressor):
            raise GradlabError(
                f"two_way around {codec.name}: it needs a codec that a rank computes alone, such as topk or qsgd, with "
                "no wrapper between them"
            )
        if codec.traits.own_exchange and not hasattr(codec, "settled"):
            raise GradlabError(
                f"two_way around {codec.name} with a form of exchange of its own ({codec.settings}): inside, it would "
                "not have that"
            )
        if codec.traits.varying and self.settings.server == "rank":
            raise GradlabError(
                f"two_way around {codec.name} with messages whose sizes vary: that of one server's answer must be "
                'known to all; choose settings that fix it, or server = "sharded"'
            )
        self.compressor = codec
        self.answering = finer(codec, self.settings.answer)
        if self.answering.blocks.size != codec.blocks.size and not isinstance(codec, _SELECTIONS):
            raise GradlabError(f"two_way around {codec.name}: answer = {self.settings.answer} would cut other shards")

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if context.dense or context.world_size < self.settings.from_ranks:
            return (yield from self._one_way(grads, state, context))
        compressor, learned = yield from self._settled(grads, state, context)
        whole = for_layers(compressor, grads.table)
        shards = self._shards_of(whole, grads.table.numel, context.world_size, context.group)
        sharded = Sharded(whole, grads, shards, context, float(state.get(_key(grads, "step"), 0.0)))
        average = yield from sharded.average()
        same = self.answering is self.compressor and not compressor.traits.selects
        answers_of = sharded if same else self._answers(grads, shards, context)
        held = self._server_residual(grads, state, context, average)
        total = Batch({"": average})
        if self.settings.error_feedback:
            total = Sums(total, average, self._rescaled(held, context), context.memory.like(average))
        answer, errors, kept = self._served(answers_of.codec, total, sharded.step, grads, state, context)
        answers = yield self._answer_requests(answer, answers_of, context)
        kept |= self._kept(held, errors, context) | learned
        mean = context.once(lambda: answers_of.mean(self._by_shard(answers, answers_of), grads))
        asked = Deferred(grads, lambda: _cut_alike(average, held))
        return Exchanged(mean, sharded.own(grads), kept, server_input=asked)

    def _served(
        self, codec: Compressor, total: Batch, step: float, grads: Batch, state: Tensors, context: Context
    ) -> tuple[Payload, torch.Tensor | None, Tensors]:
        """Compress a server's mean and residual. Return the answer, its compression error if that is kept, and the
        state's entries."""
        left, last = None, float(state.get(_key(grads, "server_step"), 0.0))
        zeta, draws = self._zeta(codec, total, grads, state, context), context.random.of_rank("server")
        if compress_parts := getattr(codec, "compress_parts", None):
            scaled = total.vector if zeta is None else scale_down(total.vector, zeta, context)
            (answer,), last = compress_parts(scaled, [(codec, (0, scaled.numel()))], last)
        elif zeta is None:
            answer, _, left = compressed(codec, total, draws)
        else:
            answer = codec.compress(scale_down(total.vector, zeta, context), draws)
        kept = self._measured(zeta, total, codec, answer, grads) | self._steps_of(grads, step, last)
        if left is None and self.settings.error_feedback:
            left = residual(codec, total.vector, answer)
        return answer, left, kept

    def _settled(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[tuple[Compressor, Tensors]]:
        """Return the codec of the ranks' messages, and its own state: of one that measures a setting, see `settled`."""
        if (settled := getattr(self.compressor, "settled", None)) is None:
            return self.compressor, {}
        return (yield from settled(grads, self.inner_state(state), context))

    def _one_way(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        """Exchange dense or by the codec's own way, and send the servers' residuals along.

        Each server adds N times its residual to its own gradient. Its contribution is what it sends less that.
        """
        of_codec = self.inner_state(state)
        if len(of_codec) == len(state):
            return (yield from run_codec(self.codec, grads, of_codec, context))
        total = grads.like(grads.cut(grads.vector.clone()))
        held = self._server_residual(grads, state, context, next(iter(grads.values())))
        added = self._rescaled(held, context).split([piece.numel() for piece in held.values()])
        cuts = self._cuts(grads.table, context.rank, context.world_size, context.group)
        for (name, (a, b)), piece in zip(cuts.items(), added, strict=True):
            total[name].view(-1)[a:b] += context.world_size * piece
        brought = {name: total[name] - grad for name, grad in grads.items()}
        done = yield from run_codec(self.codec, total, of_codec, context)
        own = Deferred(grads, lambda: {name: sent - brought[name] for name, sent in done.own.items()})
        kept = dict(done.state)
        still = context.training.frozen(held, self.settings.step_size_ratio)
        for name, piece in held.items() if self.settings.error_feedback else ():
            if name in still:
                kept |= store_buffer(name, "server_residual", in_own_memory(piece), self.settings.buffer)
        return Exchanged(done.mean, dict(grads) if context.dense else own, kept)

    def shards(self, layers: Sequence[Layer], world_size: int, group: str = "") -> Shards:
        """Return each rank's shard (start, stop) of layers: whole blocks, or all on one rank."""
        return self._shards_of(for_layers(self.compressor, layers), Table.of(layers).numel, world_size, group)

    def _shards_of(self, codec: Compressor, numel: int, world_size: int, group: str) -> Shards:
        """Return the shards of a vector (numel,), of which this is the compressor."""
        if self.settings.server == "rank":
            return shards_on(codec, _SERVER, numel, world_size)
        most = max(1, numel // self._least)
        if most < world_size:
            if self.answering.traits.varying:  # answers of more than half of the ranks would be padded to all of them
                most = max(1, min(most, world_size // 2))
            grid = max(codec, self.answering, key=lambda one: one.blocks.size)
            cut = shards_of(grid, numel, world_size, group, most)
            return codec.cached(("cut for answers", cut), lambda: Shards(codec, cut))
        return shards_of(codec, numel, world_size, group)

    @property
    def _least(self) -> int:
        """Values of a shard below which fewer ranks serve."""
        if isinstance(self.answering, ChunkTopK):
            return min(_LEAST, _CHUNKS * self.answering.blocks.size)
        return _LEAST if self.answering.traits.varying and not self.answering.traits.selects else 1

    def _answers(self, grads: Batch, shards: Shards, context: Context) -> Shardwise:
        """Return what servers answer by another compressor than the one of the ranks' messages, for the same shards."""
        whole = for_layers(self.answering, grads.table)
        answers = whole.cached((grads.table.numel, *shards.bounds), lambda: Shards(whole, shards))
        return Shardwise(whole, grads.vector, answers, context)

    def _answer_requests(self, answer: Payload, sharded: Shardwise, context: Context) -> tuple[Broadcast | Gather, ...]:
        """Requests by which the answers reach all ranks: one server's by a broadcast, all servers' by a gather."""
        if self.settings.server == "sharded":
            return sharded.gathers(answer)
        parts = answer if context.rank == _SERVER else tuple(torch.zeros_like(part) for part in sharded.sent[_SERVER])
        return tuple(Broadcast(part, _SERVER) for part in parts)

    def _by_shard(self, answers: Sequence[Any], sharded: Shardwise) -> Sequence[Payload]:
        if self.settings.server == "rank":  # the other shards are empty, and so is what was sent to them
            return [tuple(answers) if rank == _SERVER else own for rank, own in enumerate(sharded.sent)]
        return list(zip(*answers, strict=True))

    def _server_residual(self, grads: Batch, state: Tensors, context: Context, like: torch.Tensor) -> Tensors:
        """The server residual of this rank's shard, by layer, (elements in the shard,), in the dtype of `like`."""
        pieces = load_buffers(state, grads, "server_residual", self.settings.buffer, context)
        if len(pieces) == len(grads):
            return pieces
        for name, (a, b) in self._cuts(grads.table, context.rank, context.world_size, context.group).items():
            piece, whole = pieces.get(name), load_buffer(state, name, "server_whole")
            if whole is not None:
                piece = whole[a:b]
            elif piece is None:  # of a layer that has had no gradient on any rank yet
                piece = like.new_zeros(b - a)
            pieces[name] = piece
        return {name: pieces[name] for name in grads}

    def _rescaled(self, held: Tensors, context: Context) -> torch.Tensor:
        """Return the shard's residual at this iteration's step size, (shard elements,); zero where it is held."""
        wanted = self.settings.step_size_ratio
        if context.training.scales_residuals(wanted):
            still = context.training.frozen(held, wanted)
            ratios = {name: 0.0 if name in still else context.training.residual_ratio(name, wanted) for name in held}
            held = {name: piece if ratios[name] == 1.0 else piece * ratios[name] for name, piece in held.items()}
        return concatenate(held)

    def _cuts(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> dict[str, Shard]:
        """Return the part of each layer that lies in a rank's shard: (start, stop) in the layer."""
        numels = {layer.name: layer.numel for layer in layers}
        start, stop = self.shards(layers, world_size, group)[rank]
        cuts, first = {}, 0
        for name, numel in numels.items():
            a, b = (max(0, min(numel, edge - first)) for edge in (start, stop))
            cuts[name] = (a, b)
            first += numel
        return cuts

    def _kept(self, held: Tensors, errors: torch.Tensor | None, context: Context) -> Tensors:
        """Return this server's compression error, by layer; for a layer whose residual is held, the held one."""
        if errors is None:
            return {}
        pieces = _cut_alike(errors, held)
        for name in context.training.frozen(held, self.settings.step_size_ratio):
            pieces[name] = in_own_memory(held[name])
        return store_buffers(pieces, "server_residual", self.settings.buffer, context)

    def _steps_of(self, grads: Batch, step: float, server_step: float) -> Tensors:
        """Return the steps that the next iteration begins with, for a codec that adapts one: relative to magnitudes."""
        if "step" not in self.compressor.entries:
            return {}
        steps = {"step": step, "server_step": server_step}
        return {_key(grads, what): torch.tensor(value, dtype=torch.float64) for what, value in steps.items()}

    def _zeta(
        self, codec: Compressor, total: Batch, grads: Batch, state: Tensors, context: Context
    ) -> torch.Tensor | None:
        """Return the number that the server's input is divided by, (); None if it keeps no residual, or needs none."""
        if not (self.settings.error_feedback and scales(self, grads.table)):
            return None
        if (known := state.get(_key(grads, "server_zeta"))) is not None:
            return known
        vector = total.vector
        sent = decompress(codec, codec.compress(vector, context.random.of_rank("server", "contraction")), vector)
        return next_zeta(torch.ones((), device=vector.device), [vector], [sent])

    def _measured(
        self, zeta: torch.Tensor | None, total: Batch, codec: Compressor, answer: Payload, grads: Batch
    ) -> Tensors:
        if zeta is None:
            return {}
        return {_key(grads, "server_zeta"): next_zeta(zeta, [total.vector], [decompress(codec, answer, total.vector)])}

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        measured = self.settings.error_feedback and scales(self, Table.of(layers))
        zeta = for_any(layers, "server_zeta", Kept((), least=0.0, lasting=None if measured else GONE))
        found = {**self.codec.kept(layers, rank, world_size, group), **zeta}
        if "step" in self.compressor.entries:
            found |= for_any(layers, "server_step", Kept((), (torch.float64,), least=0.0))
        if self.settings.error_feedback:
            cuts = self._cuts(layers, rank, world_size, group)
            for layer, (a, b) in zip(layers, cuts.values(), strict=True):
                found |= kept_buffer(layer.name, "server_residual", (b - a,), self.settings.buffer)
                found[f"{layer.name}/server_whole"] = Kept((layer.numel,), lasting=GONE)
        return found

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        if world_size < self.settings.from_ranks:
            return super().forecast(layers, world_size, state)
        sent = self._bytes(self.compressor, layers, world_size, selected=True)
        answered = self._bytes(self.answering, layers, world_size, selected=False)
        positions = sent.positions + answered.positions / world_size
        both = sent.payload + answered.payload
        servers = len(self.shards(layers, world_size).occupied)
        # Lengths of values and of positions, for each shard but one's own.
        told = 2 * LENGTH_BYTES * self.compressor.traits.selects * (servers > 1) * servers / world_size
        return Bytes(
            sent.payload + answered.payload / world_size,
            told * (world_size - 1) + ring_sends(world_size) * both / 2,
            positions,
        )

    def _bytes(self, compressor: Compressor, layers: Sequence[Layer], world_size: int, selected: bool) -> Bytes:
        """Return the bytes of messages to all shards. selected: whether what they hold is chosen from all together."""
        codec, found = for_layers(compressor, layers), Bytes(0, 0)
        for a, b in filter(lambda shard: shard[1] > shard[0], self.shards(layers, world_size)):
            part = part_of(codec, a, b)
            positions = found.positions + position_bytes(part, b - a)
            found = Bytes(found.payload + part.compressed_bytes(b - a), 0, positions)
        values, numel = found.payload - found.positions, Table.of(layers).numel
        if not (selected and isinstance(codec, Sparsifier) and values):
            return found
        # Shards have values of one selection, not each its own share, which is rounded up.
        share = (codec.compressed_bytes(numel) - position_bytes(codec, numel)) / values
        return Bytes(found.payload * share, 0, found.positions * share)


def finer(codec: Compressor, times: float) -> Compressor:
    """Return a compressor whose payloads take so many times the bytes, by its first setting that is worth comparing.

    A codec without such a number, or with learned tensors, is returned as it is.

    >>> from gradlab.wrappers.two_way import finer
    >>> finer(codecs.make("topk", density=0.01), 3.0), finer(codecs.make("sign"), 3.0)
    (ChunkTopK(chunk=1024, count=88, bits=4), Sign(block_size=None))
    """
    if isinstance(codec, _SELECTIONS) and (times > 1.0 or codec.traits.own_exchange):
        return _of_chunks(times * codec.compressed_bytes(_SOME) / _SOME)
    name = next(iter(codec.about.candidates[0]), "")
    value: Any = getattr(codec.settings, name, None)
    if times == 1.0 or codec.learned or type(value) not in (int, float):
        return codec
    [field] = [one for one in fields_of(codec.Settings) if one.name == name]
    most = math.inf if field.about.most is None else field.about.most
    found = type(codec)(replace(codec.settings, **{name: min(type(value)(value * times), most)}))
    return found if found.compressed_bytes(_SOME) > codec.compressed_bytes(_SOME) else codec


def _of_chunks(bytes_a_value: float) -> Compressor:
    """Return a selection that takes so many bytes a value of the vector: 14 bits of a value that is sent."""
    count = min(_CHUNK, max(1, round(8 * bytes_a_value / (_BITS + (_CHUNK - 1).bit_length()) * _CHUNK)))
    return ChunkTopK(ChunkTopK.Settings(chunk=_CHUNK, count=count, bits=_BITS))


def _key(grads: Tensors, what: str) -> str:
    """Return the state's key of what belongs to a whole group: it is under the first layer's name."""
    return f"{next(iter(grads), '')}/{what}"


def _cut_alike(vector: torch.Tensor, pieces: Tensors) -> Tensors:
    """Cut a vector (numel,) into views as long as pieces (n,) that make up as much, by their names."""
    return dict(zip(pieces, vector.split([piece.numel() for piece in pieces.values()]), strict=True))
