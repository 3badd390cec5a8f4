"""Tasks for real ranks: loss scalers, overflows, gradients that never become finite, resuming out of step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.collectives import sum_in_rank_order
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import layers_of
from gradlab.runtime import CompressionState, compression_hook
from support.contract import agree
from support.pool_groups import SPARE
from support.prescribed import Prescribed, gradients
from support.stacks import Stacks, several_plan, several_shapes

BadGradient = Callable[[int, int], float | None]  # by rank and step: what takes an element's place


class Scaled:
    """A prescribed model trained under a GradScaler. ahead: results come before the worker has ended a step, as on a
    GPU."""

    def __init__(
        self, group: dist.ProcessGroup, stacks: Stacks, scaler: Any = None, ahead: bool = False, **options: Any
    ) -> None:
        self.rank = dist.get_rank(group)
        self.group, self.shapes = group, several_shapes(stacks)
        self.model = DistributedDataParallel(Prescribed(self.shapes), process_group=group, bucket_cap_mb=0.01)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.state = CompressionState(
            several_plan(stacks, layers_of(self.model)),
            self.model,
            optimizer=self.optimizer,
            scaler=scaler,
            process_group=SPARE.get(dist.get_world_size(group)),
            deterministic=True,
            **options,
        )
        self.state._driver.around.device.shares_stream = not ahead
        self.model.register_comm_hook(self.state, compression_hook)

    def step(self, step: int, bad: float | None = None) -> torch.Tensor:
        """One step, with a bad element in the last bucket if wanted; the gradient without the loss scale."""
        grads = gradients(self.shapes, self.rank, step)
        if bad is not None:
            grads["first"][0, 0, 0, 0] = bad
        scale = self.scaler.get_scale()
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(grads)).backward()
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in self.model.parameters()]) / scale
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return flat

    def parameters(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1).clone() for parameter in self.model.parameters()])

    def states(self) -> dict[str, torch.Tensor]:
        return dict(self.state.state_dict()["states"])


def overflow(group: dist.ProcessGroup, stacks: Stacks, bad_rank: int, ahead: bool) -> dict[str, Any]:
    """An infinity in the last bucket of one rank in step 3: what moved then, and in the step after."""
    run = Scaled(group, stacks, torch.amp.GradScaler("cpu", init_scale=1024.0), ahead)
    with run.state:
        for step in range(3):
            run.step(step)
        before, parameters, nothing = run.states(), run.parameters(), torch.zeros(0)
        seen = run.step(3, torch.inf if run.rank == bad_rank else None)
        after, moved = run.states(), run.parameters()
        skipped = {
            "nothing but NaN": bool(seen.isnan().all()),
            "states changed": [
                k for k in before | after if not torch.equal(before.get(k, nothing), after.get(k, nothing))
            ],
            "parameters unchanged": torch.equal(parameters, moved),
            "scale": run.scaler.get_scale(),
        }
        next_one = run.step(4)
        normal = {
            "finite": bool(next_one.isfinite().all()),
            "moved": not torch.equal(run.parameters(), moved),
            "agree": agree(run.parameters(), group),
            "scale": run.scaler.get_scale(),
        }
    normal["broken"] = run.state._driver.broken  # by closing while the worker may be at the end of the last step
    return {"skipped": skipped, "next": normal, "with state": sorted({key.partition("::")[0] for key in before})}


def draws_after_an_overflow(group: dist.ProcessGroup, stacks: Stacks) -> dict[str, bool]:
    """Step 2 overflows on rank 1: what follows, beside lockstep without iteration 2, and resumed in a new engine."""
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    run = Scaled(group, stacks, torch.amp.GradScaler("cpu", init_scale=1024.0))
    with run.state:
        for step in range(3):
            run.step(step, torch.inf if (rank, step) == (1, 2) else None)
        saved = {**run.state.state_dict(), "scaler": run.scaler.state_dict()}
        got = [run.step(step) for step in (3, 4)]
        states = run.states()
    resumed = Scaled(group, stacks, torch.amp.GradScaler("cpu"))
    resumed.scaler.load_state_dict(saved.pop("scaler"))
    with resumed.state:
        resumed.state.load_state_dict(saved)
        again = [resumed.step(step) for step in (3, 4)]
        again_states = resumed.states()
    layers = layers_of(run.model)
    lockstep = LockstepPlan(several_plan(stacks, layers), world_size, plain_sgd=True)
    rates = {layer.name: 0.125 for layer in layers}
    wanted = []
    for step in (0, 1, 3, 4):
        of_ranks = [gradients(run.shapes, one, step) for one in range(world_size)]
        of_ranks = [{layer.name: grads[layer.name.rpartition(".")[2]] for layer in layers} for grads in of_ranks]
        done = lockstep.step(step, of_ranks, rates)
        means = {name: mean for ranks in done.exchanged.values() for name, mean in ranks[rank].mean.items()}
        dense = {x.name: sum_in_rank_order([grads[x.name] for grads in of_ranks]) for x in layers}
        wanted.append(torch.cat([means.get(x.name, dense[x.name]).reshape(-1) for x in layers]))
    expected = {f"{name}::{key}": value for name, kept in lockstep.states[rank].items() for key, value in kept.items()}
    return {
        "as lockstep": all(torch.equal(a, b) for a, b in zip(got, wanted[2:], strict=True)),
        "states as lockstep": expected.keys() == states.keys()
        and all(torch.equal(states[k], expected[k]) for k in states),
        "resumed": all(torch.equal(a, b) for a, b in zip(got, again, strict=True)),
        "states resumed": all(torch.equal(states[key], again_states[key]) for key in states),
    }


def scale_changes_nothing(group: dist.ProcessGroup, stacks: Stacks) -> list[int]:
    """Train with a scale that doubles every other step, and without a scaler: first elements that differ, by step."""
    with (plain := Scaled(group, stacks)).state:
        wanted = [plain.step(step) for step in range(6)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    with (scaled := Scaled(group, stacks, scaler)).state:
        got = [scaled.step(step) for step in range(6)]
    assert scaler.get_scale() == 256.0 * 2**3
    return [int((a != b).nonzero()[0]) for a, b in zip(wanted, got, strict=True) if not torch.equal(a, b)]


def never_finite(group: dist.ProcessGroup, scaled: bool) -> dict[str, Any]:
    """NaN from step 0 on, on one rank: what is said in each step, with a limit of 4."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    run = Scaled(group, [("topk", "feedback")], scaler, non_finite_limit=4)
    messages, finite = [], []
    with run.state, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            try:
                finite.append(bool(run.step(step, torch.nan if run.rank == 1 else None).isfinite().all()))
                messages.append("")
            except RuntimeError as error:
                messages.append(str(error))
    warned = [str(warning.message) for warning in caught if "gradlab" in str(warning.message)]
    return {"said": messages, "warned": warned, "finite": finite}


def resumed_out_of_step(group: dist.ProcessGroup) -> str:
    """One rank continues from another iteration than the others: what the first step says."""
    run = Scaled(group, [("topk", "feedback")])
    with run.state:
        saved = run.state.state_dict()
        for step in range(2):
            run.step(step)
        if run.rank == 1:
            run.state.load_state_dict(saved)
        else:
            run.state.load_state_dict(run.state.state_dict())
        try:
            run.step(2)
        except (GradlabError, RuntimeError) as error:
            return str(error)
    return ""
