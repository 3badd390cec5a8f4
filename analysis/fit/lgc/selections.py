"""Selections of LGC over a recorded trace: the values that its autoencoder codes, of all ranks.

Accumulation is part of it, so the plan runs in lockstep as it would in its second phase, without learning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from gradlab.analysis.replay import lockstep_of, replay_steps
from gradlab.codec import Context, concatenate
from gradlab.codec.wrapper import innermost
from gradlab.errors import GradlabError
from gradlab.learning.selection import SELECTING, TRAINER, LearnedSelection, layer_of
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
