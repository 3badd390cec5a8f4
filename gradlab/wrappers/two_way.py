"""Two-way compression: a server averages what ranks sent compressed, and answers compressed, with feedback of its own.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
Algorithm 2, lines 9 to 12 (one server); Tang et al., "DoubleSqueeze", ICML 2019. Sharded over the ranks, every rank is
the server of one part, so that no link carries more than the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gradlab.codec import Codec, Compressor, Context, Deferred, Exchanged, Tensors, concatenate, separate
from gradlab.codec_settings import require
from gradlab.collectives import AllToAll, Broadcast, Coroutine, Gather
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.wrapper import Wrapper, load_buffer, state_names, store_buffer
from gradlab.wrappers.error_feedback import BUFFERS

Shard = tuple[int, int]
Payload = tuple[torch.Tensor, ...]


class TwoWay(Wrapper):
    """Rank i sends C(x_i), shard by shard, to the shards' servers; a server answers C(mean + its residual).

    `own` is C(x_i) alone: put error feedback or momentum correction around it for the ranks' own remainder. The
    server's remainder is kept here, "server_residual", each rank that of its shard; after a change of the world size as
    "server_whole", of whole layers, until the next exchange cuts it.
    """

    name = "two_way"
    keys = ("server_residual", "server_whole")

    @dataclass(frozen=True)
    class Settings:
        """server: "sharded" over the ranks, or "rank": all on server_rank; server_rank: which, from 0;
        error_feedback: whether a server adds what its earlier answers left out;
        step_size_ratio: multiply its residual by eta_(t-1) / eta_t; None does so if the optimizer is SGD without
        momentum; buffer: of its residual, "float32" or "int8".
        """

        server: str = "sharded"
        server_rank: int = 0
        error_feedback: bool = True
        step_size_ratio: bool | None = None
        buffer: str = "float32"

        def __post_init__(self) -> None:
            require(self.server in ("sharded", "rank"), "two_way", "server", self.server, "'sharded' or 'rank'")
            require(self.server_rank >= 0, "two_way", "server_rank", self.server_rank, "a rank, from 0")
            require(self.buffer in BUFFERS, "two_way", "buffer", self.buffer, "'float32' or 'int8'")

    def __init__(self, codec: Codec, settings: TwoWay.Settings | None = None) -> None:
        super().__init__(codec, settings)
        if not isinstance(codec, Compressor):
            raise GradlabError(
                f"two_way around {codec.name}: it needs a codec that a rank computes alone, such as topk or qsgd, with "
                "no wrapper between them"
            )
        self.compressor = codec

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        vector, codec = concatenate(grads), self.compressor
        shards = self.shards(vector.numel(), context.world_size, context.group)
        sent = [codec.compress(vector[a:b], context.rank_generator("shard", a)) for a, b in shards]
        received = yield tuple(AllToAll(parts) for parts in zip(*sent, strict=True))
        start, stop = shards[context.rank]
        asked = context.workspace.zeros_like(vector[start:stop])
        for payload in zip(*received, strict=True):
            codec.add_decompressed(asked, payload, 1.0 / context.world_size)
        asked += self._server_residual(grads, state, context, asked)
        answer = codec.compress(asked, context.rank_generator("server"))
        root = self.root(vector.numel(), context.world_size, context.group)
        answers = yield self._answer_requests(answer, sent, root, context)
        mean = self._assembled(vector, shards, self._unpadded(answers, sent, root), context)
        own = Deferred(grads, lambda: separate(self._assembled(vector, shards, sent, context), grads))
        return Exchanged(separate(mean, grads), own, self._kept(grads, asked, answer, context))

    def dense_exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        """The servers' residuals are sent along: the one that holds a part adds N times it to its own gradient."""
        vector = concatenate(grads)
        start, stop = self.shards(vector.numel(), context.world_size, context.group)[context.rank]
        asked = vector.clone()
        asked[start:stop] += context.world_size * self._server_residual(grads, state, context, asked[start:stop])
        done = yield from self.codec.dense_exchange(separate(asked, grads), {}, context)
        return Exchanged(done.mean, dict(grads), {})

    def shards(self, numel: int, world_size: int, group: str = "") -> list[Shard]:
        """(start, stop) of each rank's shard of a group: whole blocks, as equal as they can be; or all on one rank."""
        root = self.root(numel, world_size, group)
        if root is not None:
            return [(0, numel) if rank == root else (numel, numel) for rank in range(world_size)]
        blocks = -(-numel // self.compressor.block)
        bounds = [min(numel, self.compressor.block * (blocks * n // world_size)) for n in range(world_size + 1)]
        return list(pairwise(bounds))

    def root(self, numel: int, world_size: int, group: str = "") -> int | None:
        """The rank that is the server of all of a group; None if it is sharded.

        A group of one block cannot be: its server follows from its name, so that other groups' are other ranks.
        """
        if self.settings.server == "rank":
            if self.settings.server_rank >= world_size:
                raise GradlabError(f"two_way: server_rank = {self.settings.server_rank} at world size {world_size}")
            return self.settings.server_rank
        return zlib.crc32(group.encode()) % world_size if numel <= self.compressor.block else None

    def _answer_requests(
        self, answer: Payload, sent: Sequence[Payload], root: int | None, context: Context
    ) -> tuple[Broadcast | Gather, ...]:
        if root is not None:
            mine = answer if context.rank == root else tuple(torch.zeros_like(part) for part in sent[root])
            return tuple(Broadcast(part, root) for part in mine)
        # What ranks answer differs in size by a block at most; a Gather of equal sizes saves a round.
        longest = [max(parts, key=len) for parts in zip(*sent, strict=True)]
        return tuple(Gather(_padded(part, len(most))) for part, most in zip(answer, longest, strict=True))

    def _unpadded(self, answers: Sequence[torch.Tensor], sent: Sequence[Payload], root: int | None) -> list[Payload]:
        """Every server's answer, by shard; a shard's payload has the sizes that this rank's own for it had."""
        if root is not None:
            return [tuple(answers) if rank == root else own for rank, own in enumerate(sent)]
        return [
            tuple(parts[rank][: len(part)] for parts, part in zip(answers, own, strict=True))
            for rank, own in enumerate(sent)
        ]

    def _assembled(
        self, vector: torch.Tensor, shards: Sequence[Shard], payloads: Sequence[Payload], context: Context
    ) -> torch.Tensor:
        """A vector like the gradients' from one payload per shard."""
        out = context.workspace.empty_like(vector)
        for payload, (start, stop) in zip(payloads, shards, strict=True):
            self.compressor.decompress_into(out[start:stop], payload)
        return out

    def _server_residual(self, grads: Tensors, state: Tensors, context: Context, like: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the residual (numel of `like`,), rescaled layer by layer."""
        pieces = []
        for name, (a, b) in self._cuts(grads, context).items():
            piece, whole = (load_buffer(state, name, what) for what in ("server_residual", "server_whole"))
            if whole is not None:
                piece = whole[a:b]
            elif piece is None:  # one layer's may be missing: it has had no gradient on any rank yet
                piece = like.new_zeros(b - a)
            ratio = context.residual_ratio(name, self.settings.step_size_ratio)
            pieces.append(piece if ratio == 1.0 else piece * ratio)
        return torch.cat(pieces)

    def _cuts(self, grads: Tensors, context: Context) -> dict[str, Shard]:
        """What this rank's shard holds of each layer: (start, stop) in the layer."""
        numel = sum(grad.numel() for grad in grads.values())
        start, stop = self.shards(numel, context.world_size, context.group)[context.rank]
        cuts, first = {}, 0
        for name, grad in grads.items():
            a, b = (max(0, min(grad.numel(), place - first)) for place in (start, stop))
            cuts[name] = (a, b)
            first += grad.numel()
        return cuts

    def _kept(self, grads: Tensors, asked: torch.Tensor, answer: Payload, context: Context) -> Tensors:
        """What the answer leaves of what was asked, this rank's shard, layer by layer."""
        if not self.settings.error_feedback:
            return {}
        cuts = self._cuts(grads, context)
        answered = self.compressor.decompress_into(context.workspace.empty_like(asked), answer)
        pieces = (asked - answered).split([b - a for a, b in cuts.values()])
        kept: Tensors = {}
        for name, piece in zip(cuts, pieces, strict=True):
            # A view would keep all layers' memory alive for one of them.
            kept |= store_buffer(
                name, "server_residual", piece if len(cuts) == 1 else piece.clone(), self.settings.buffer
            )
        return kept

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        numel = sum(layer.numel for layer in layers)
        shards = self.shards(numel, world_size)
        sizes = [self.codec.payload_bytes([Layer("shard", (b - a,))], world_size) for a, b in shards]
        answers = max(sizes) if self.root(numel, world_size) is None else sum(sizes) / world_size
        return sum(sizes) + answers

    def next_payload_bytes(self, layers: Sequence[Layer], world_size: int, state: Tensors) -> float:
        return self.payload_bytes(layers, world_size)

    def _redistribute_own(self, own: Sequence[Tensors], rank: int, world_size: int, residuals: str) -> Tensors:
        """Shards in rank order are the whole, which every rank gets. "sum" and "split" keep it, "drop" does not."""
        if residuals == "drop":
            return {}
        whole: Tensors = {}
        for name, what in state_names(own[0]):
            held = [load_buffer(one, name, what) for one in own]
            pieces = [piece for piece in held if piece is not None]
            whole[f"{name}/server_whole"] = torch.cat(pieces) if what == "server_residual" else pieces[0].clone()
        return whole


def _padded(part: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, length - len(part))) if len(part) < length else part
