"""Selections of LGC over a recorded trace: the values that its autoencoder codes, of all ranks.

Accumulation is part of it, so the plan runs in lockstep as it would in its second phase, without learning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from gradlab.analysis.replay import lockstep_of, replay_steps
from gradlab.codec import Context, concatenate
from gradlab.codec.abilities import average_into
from gradlab.codec.wrapper import innermost
from gradlab.codecs.block_scaled import BlockScaled
from gradlab.coding.bits import packed_bytes
from gradlab.collectives import all_gather_wire_bytes, all_reduce_wire_bytes, broadcast_wire_bytes
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.learning.selection import SELECTING, TRAINER, LearnedSelection, layer_of
from gradlab.learning.slice_pca import principal_axes
from gradlab.plan import Plan
from gradlab.plan.lgc_recipe import GROUP
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace


@dataclass(frozen=True)
class Selections:
    """Selections of K ranks in T iterations, n values each, in the order in which values are coded.

    iterations: (T,).
    positions: (T, K, n), in the group.
    layers: (T, K, n), index of the layer that a position is in.
    values: (T, K, n), float32.
    scales: (T, K, n), divisors of values before coding.
    leaders: (T,), the ranks whose positions all ranks take, if shared; else the senders of the common code.
    shared: all ranks take the leader's positions.
    """

    iterations: list[int]
    positions: torch.Tensor
    layers: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    leaders: torch.Tensor
    shared: bool

    def __len__(self) -> int:
        return len(self.iterations)

    @property
    def count(self) -> int:
        """Values that a rank selects in an iteration."""
        return int(self.values.shape[-1])

    @property
    def led(self) -> torch.Tensor:
        """The leaders' own values, (T, n)."""
        return self.values[torch.arange(len(self)), self.leaders]

    @property
    def known(self) -> torch.Tensor:
        """Values (T, K, n) that the order of coding may follow: the leader's for shared positions, else each rank's."""
        return self.led[:, None].expand_as(self.values) if self.shared else self.values

    def part(self, start: int, stop: int) -> Selections:
        """Take the iterations with indices from start to stop, without stop."""
        span = slice(start, stop)
        return replace(
            self,
            iterations=self.iterations[span],
            **{name: getattr(self, name)[span] for name in ("positions", "layers", "values", "scales", "leaders")},
        )

    def errors(self, decoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute squared error and squared norm of the true average, (T,) each, for decoded (T, K, n).
        Values of several ranks at one position are added.
        """
        missed, true = (decoded - self.values).double(), self.values.double()
        if self.shared:
            return missed.mean(1).square().sum(-1), true.mean(1).square().sum(-1)
        squares = []
        for positions, *parts in zip(self.positions, missed, true, strict=True):
            distinct, inverse = positions.flatten().unique(return_inverse=True)
            for part in parts:
                sums = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, inverse, part.flatten())
                squares.append((sums / len(positions)).square().sum())
        return torch.stack(squares[::2]), torch.stack(squares[1::2])


def collect_selections(trace: Trace, plan: Plan, *, progress: Progress | None = None) -> Selections:
    """Run the plan's autoencoder group over the whole trace, and collect what it selects, sent uncoded."""
    if trace.world_size < 2:
        raise GradlabError(
            f"{trace.path}: holds one rank's gradients, or averages alone; an autoencoder learns from each rank's own"
        )
    [group] = [group for group in plan.groups if group.name == GROUP]
    alone = Plan(plan.layers, (group,), seed=plan.seed)
    lockstep = lockstep_of(trace, alone)
    codec = innermost(lockstep.codecs[GROUP])
    if not isinstance(codec, LearnedSelection):
        raise GradlabError(f"selections: codec {codec.name}, expected lgc_ring or lgc_server")
    clock = {f"{group.layers[0]}/clock": torch.tensor([SELECTING, 0], dtype=torch.float32)}
    lockstep.states = [{GROUP: dict(clock)} for _ in range(trace.world_size)]
    sizes = [layer.numel for layer in alone.members(group)]
    iterations, chosen, leaders = [], [], []
    for done, (result, _) in enumerate(replay_steps(trace, lockstep, 0, len(trace.steps))):
        if progress:
            progress("selections", done + 1, len(trace.steps))
        if not result.finite:
            continue
        inputs = torch.stack([concatenate(one.compressor_input) for one in result.exchanged[GROUP]]).float()
        context = Context(0, trace.world_size, result.iteration, GROUP, plan.seed)
        iterations.append(result.iteration)
        chosen.append(codec.selected(inputs, sizes, context))
        leaders.append(codec.leader(context) if codec.shared else TRAINER)
    if not iterations:
        raise GradlabError(f"{trace.path}: no iteration with finite gradients: there is nothing to learn from")
    positions = torch.stack([one.positions for one in chosen])
    values = torch.stack([one.values for one in chosen])
    scales = torch.stack([torch.as_tensor(one.scale).expand_as(one.values) for one in chosen])
    return Selections(
        iterations, positions, layer_of(positions, sizes), values, scales, torch.tensor(leaders), codec.shared
    )


# --- codes without learning: what LGC must beat, at their bytes -------------------------------------------------------
#
# Codes are compared by the error of the average over ranks. Scalar quantizers send more values' worth than a code of a
# quarter of the floats: int8 has just its bytes.


_BLOCK = 4  # values per float of a code that has a quarter of the floats


@dataclass(frozen=True)
class Code:
    """A way to send selected values.

    decoded: gives the values (T, K, n) after decoding.
    payload_bytes: per rank, mean over ranks, without the positions.
    wire_bytes: the part that rank 0 sends.
    """

    name: str
    decoded: Callable[[Selections], torch.Tensor]
    payload_bytes: float
    wire_bytes: float


def codes_without_learning(
    learned: Selections, selections: Selections, world_size: int, code_numel: int, in_order: bool = False
) -> list[Code]:
    """List the codes that an autoencoder is compared with: zeros, a quarter, block means, PCA, int8 and int4.
    At shared positions the leader sends the order once, and values are reduced; else each rank sends its own.
    """
    count, shared = selections.count, selections.shared
    quarter = -(-count // _BLOCK)

    def reduced(size: int) -> float:
        return float((all_reduce_wire_bytes if shared else all_gather_wire_bytes)(size, world_size))

    def code(name: str, decoded: Callable[[Selections], torch.Tensor], values: int, order: int = 0) -> Code:
        """values: floats that a rank sends; order: bytes of their order."""
        if not shared:
            return Code(name, decoded, 4 * values + order, reduced(4 * values + order))
        wire = reduced(4 * values) + broadcast_wire_bytes(order, 0, 0, world_size)
        return Code(name, decoded, 4 * values + order / world_size, wire)

    axes = max(0, min(code_numel, count, len(learned) * learned.values.shape[1] - 1))
    # An order that positions have already is not sent.
    sorting = 0 if in_order else packed_bytes(count, max(1, (count - 1).bit_length()))
    codes = [
        code("zeros (compressed layers stand still)", lambda selected: torch.zeros_like(selected.values), 0),
        code("largest quarter", _largest_quarter, quarter, packed_bytes(count, 1)),
        code("block means of 4", lambda selected: _means_of_blocks(selected.values), quarter),
        code("sorted block means of 4", _sorted_block_means, quarter, sorting),
        code(f"PCA, {axes} axes", _projected(learned, axes), axes),
    ]
    for dtype in ("int8", "int4"):
        codec = BlockScaled(BlockScaled.Settings(dtype, aggregation="gather"))
        size = codec.forecast([Layer("values", (count,))], world_size).payload
        wire = all_gather_wire_bytes(int(size), world_size)
        codes.append(Code(f"{dtype}, scale per 256", _quantized(codec), size, wire))
    return codes


def _largest_quarter(selections: Selections) -> torch.Tensor:
    kept = selections.known.abs().topk(-(-selections.count // _BLOCK), dim=-1).indices
    return torch.zeros_like(selections.values).scatter_(-1, kept, selections.values.gather(-1, kept))


def _sorted_block_means(selections: Selections) -> torch.Tensor:
    order = selections.known.argsort(dim=-1)
    means = _means_of_blocks(selections.values.gather(-1, order))
    return torch.zeros_like(means).scatter_(-1, order, means)


def _means_of_blocks(values: torch.Tensor) -> torch.Tensor:
    count = values.shape[-1]
    blocks = functional.pad(values, (0, -count % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    present = functional.pad(torch.ones(count), (0, -count % _BLOCK)).view(-1, _BLOCK).sum(1)
    return (blocks.sum(-1) / present).repeat_interleave(_BLOCK, dim=-1)[..., :count]


def _projected(learned: Selections, axes: int) -> Callable[[Selections], torch.Tensor]:
    """Project on principal axes of all ranks' vectors."""
    basis = principal_axes(learned.values.flatten(0, 1))[1][:, :axes].float()
    return lambda selections: selections.values @ basis @ basis.T


def _quantized(codec: BlockScaled) -> Callable[[Selections], torch.Tensor]:
    def decoded(selections: Selections) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        totals = torch.zeros_like(selections.values)
        for total, values in zip(totals.flatten(0, 1), selections.values.flatten(0, 1), strict=True):
            average_into(codec, total, [codec.compress(values, generator)], 1.0)
        return totals

    return decoded
