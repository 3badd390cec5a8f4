"""What a sparse plan selects over a recorded trace: the values that LGC's autoencoder codes, of all ranks.

Accumulation is part of it, so the plan runs in lockstep as it would in its second phase, without learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradlab.analysis.lockstep_plan import LockstepPlan
from gradlab.analysis.replay import replay_steps
from gradlab.codec import Context, concatenate
from gradlab.codecs.lgc_ring import LgcRing
from gradlab.errors import GradlabError
from gradlab.learned_selection import SELECTING
from gradlab.lgc_plan import GROUP
from gradlab.plan import Plan
from gradlab.progress import Progress
from gradlab.wrapper import innermost

if TYPE_CHECKING:
    from gradlab.trace import Trace


@dataclass(frozen=True)
class Selections:
    """iterations: (T,); values: (T, K, count), float32, in the order in which they are coded; scales: (T, count), what
    they are divided by before; leaders: (T,), the ranks whose positions these are."""

    iterations: list[int]
    values: torch.Tensor
    scales: torch.Tensor
    leaders: torch.Tensor

    def __len__(self) -> int:
        return len(self.iterations)

    @property
    def led(self) -> torch.Tensor:
        """The leaders' own values, (T, count)."""
        return self.values[torch.arange(len(self)), self.leaders]

    def part(self, start: int, stop: int) -> Selections:
        """Iterations at places start..stop."""
        here = slice(start, stop)
        return Selections(self.iterations[here], self.values[here], self.scales[here], self.leaders[here])


def collect_selections(trace: Trace, plan: Plan, *, progress: Progress | None = None) -> Selections:
    """Run the plan's autoencoder group over the whole trace, values sent as they are.

    plan: with `lgc_ring` in group "autoencoder"; its dense phase is left out: accumulation begins with the trace.

    Raises:
        GradlabError: for a trace of averaged gradients or another plan, or without one finite iteration.
    """
    if trace.world_size < 2:
        raise GradlabError(f"{trace.path}: holds one rank's gradients; an autoencoder learns from those of several")
    [group] = [group for group in plan.groups if group.name == GROUP]
    alone = Plan(plan.layers, (group,), seed=plan.seed)
    lockstep = LockstepPlan(alone, trace.world_size, plain_sgd=trace.metadata.get("plain_sgd") is True)
    codec = innermost(lockstep.codecs[GROUP])
    if not isinstance(codec, LgcRing):
        raise GradlabError(f"selections: codec {codec.name}, expected lgc_ring: others select for each rank apart")
    clock = {f"{group.layers[0]}/clock": torch.tensor([SELECTING, 0], dtype=torch.float32)}
    lockstep.states = [{GROUP: dict(clock)} for _ in range(trace.world_size)]
    sizes = [layer.numel for layer in alone.members(group)]
    iterations, values, scales, leaders = [], [], [], []
    for done, (result, _) in enumerate(replay_steps(trace, lockstep, 0, len(trace.steps))):
        if progress:
            progress("selections", done + 1, len(trace.steps))
        if not result.finite:
            continue
        asked = torch.stack([concatenate(one.asked) for one in result.exchanged[GROUP]]).float()
        context = Context(0, trace.world_size, result.iteration, GROUP, plan.seed)
        chosen, scale = codec.selected(asked, sizes, context)
        iterations.append(result.iteration)
        values.append(chosen)
        leaders.append(codec.leader(context))
        scales.append(torch.as_tensor(scale).expand(chosen.shape[-1]))
    if not iterations:
        raise GradlabError(f"{trace.path}: no iteration with finite gradients: there is nothing to learn from")
    return Selections(iterations, torch.stack(values), torch.stack(scales), torch.tensor(leaders))
