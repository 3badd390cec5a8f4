"""Choose a plan anew while training, from gradients accumulated since the last choice.

Alimohammadi et al., "L-GreCo", MLSys 2024, section 4 and Fig. 2: one rank accumulates its gradients, measures what each
setting would lose of them, finds the smallest plan with no more error than the reference's, and tells the others. Here
the exact search chooses, tables are made beside training, and what codecs remember - residuals, warm starts - is
carried over to the new settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradlab.codec import Codec, Tensors
from gradlab.codec.measures import is_finite
from gradlab.codec.wrapper import Wrapper
from gradlab.collectives import Broadcast
from gradlab.errors import GradlabError
from gradlab.knapsack import allocate
from gradlab.plan.layer_errors import Candidate, squared_errors
from gradlab.plan.plan import Plan

ROOT = 0  # the rank that accumulates, measures and chooses


def choose(plan: Plan, accumulated: Tensors, world_size: int, iteration: int) -> dict[str, int]:
    """By group, the place of the setting to be used: the smallest plan within the budget.

    accumulated: one rank's gradients by layer name, means over a window; groups whose layer is missing keep the
    reference. iteration: of the choice, for codecs' draws.

    Raises:
        GradlabError: if alpha leaves no plan within the budget.
    """
    refresh = plan.refresh
    assert refresh is not None
    found = dict(refresh.reference)
    groups = [g for g in plan.compressed_groups if g.name in refresh.settings and g.layers[0] in accumulated]
    errors, sizes, budget = [], [], []
    for group in groups:
        [layer] = plan.members(group)
        candidates = [Candidate(group.codec, settings) for settings in refresh.settings[group.name]]
        row = np.array(squared_errors(layer, accumulated[layer.name], candidates, seed=plan.seed + iteration))
        errors.append(np.sqrt(row) if refresh.metric == "plain" else row)
        sizes.append([candidate.build().payload_bytes([layer], world_size) for candidate in candidates])
        budget.append(errors[-1][refresh.reference[group.name]])
    if groups and np.isfinite(budget).all():
        choice = allocate(errors, sizes, refresh.alpha * float(np.array(budget).sum())).choice
        found |= {group.name: int(place) for group, place in zip(groups, choice, strict=True)}
    return found


def with_choice(plan: Plan, choice: Mapping[str, int]) -> Plan:
    """The plan with the settings chosen, by group the place among those of its refresh."""
    assert plan.refresh is not None
    some = plan.refresh.settings
    groups = tuple(
        replace(group, settings=some[group.name][choice[group.name]]) if group.name in choice else group
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def tell(plan: Plan, choice: Mapping[str, int] | None) -> Broadcast:
    """What the root sends to all ranks, -1 in every place for no choice. The others pass any choice."""
    assert plan.refresh is not None
    places = [-1 if choice is None else choice[name] for name in sorted(plan.refresh.settings)]
    return Broadcast(torch.tensor(places, dtype=torch.int64), ROOT)


def told(plan: Plan, answer: torch.Tensor) -> dict[str, int] | None:
    """The choice that was sent."""
    assert plan.refresh is not None
    places = answer.tolist()
    return None if -1 in places else dict(zip(sorted(plan.refresh.settings), places, strict=True))


def adopted_state(new: Codec, old: Codec, state: Tensors) -> Tensors:
    """What a stack goes on with after another setting of its codec: wrappers keep all they have."""
    if isinstance(new, Wrapper):
        assert isinstance(old, Wrapper)
        return {**new.own_state(state), **adopted_state(new.codec, old.codec, new.inner_state(state))}
    return new.adopted_state(state) if type(new) is type(old) else {}


class Replanner:
    """Chooses a plan's settings anew, as its `refresh` says; on the root it accumulates and measures.

    beside: measure in a thread while training goes on, else when the choice is due. choice: in use, by group; None
    before the first. failure: why the last choice could not be made, on the root; the plan then stays as it is.
    """

    def __init__(self, plan: Plan, rank: int, world_size: int, *, beside: bool) -> None:
        assert plan.refresh is not None
        self.plan, self._refresh = plan, plan.refresh
        self.choice: dict[str, int] | None = None
        self.failure = ""
        self.sums: Tensors = {}
        self.counts: dict[str, int] = {}
        self._is_root, self._world_size, self._beside = rank == ROOT, world_size, beside
        self._first = plan.schedule.warmup_steps
        self._layers = {layer for g in plan.groups if g.name in plan.refresh.settings for layer in g.layers}
        self._pending: _Pending | None = None

    def add(self, gradients: Tensors, iteration: int, scaled_by: float = 1.0) -> None:
        """Accumulate this rank's gradients of some layers, those that are finite; they bear a loss scale."""
        if not self._is_root or iteration < self._first:
            return
        for name in self._layers & gradients.keys():
            gradient = gradients[name]
            if not is_finite(gradient):
                continue
            if name in self.sums and self.sums[name].device != gradient.device:  # from a checkpoint
                self.sums[name] = self.sums[name].to(gradient.device)
            if name not in self.sums:
                self.sums[name] = torch.zeros(gradient.shape, dtype=torch.float32, device=gradient.device)
                self.counts[name] = 0
            self.sums[name].add_(gradient, alpha=1.0 / scaled_by)
            self.counts[name] += 1

    def end(self, iteration: int) -> None:
        """An iteration is over: begin to choose, if it is time."""
        if self._refresh.chosen_after(iteration, self._first):
            means = {name: (total / self.counts[name]).cpu() for name, total in self.sums.items()}
            self.sums, self.counts = {}, {}
            if self._is_root:
                self._pending = _Pending(lambda: choose(self.plan, means, self._world_size, iteration), self._beside)

    def due(self, iteration: int) -> Broadcast | None:
        """What the root tells all ranks before an iteration, if it is time; waits for the choice to be made."""
        if not self._refresh.adopted_before(iteration, self._first):
            return None
        return tell(self.plan, self.settled())

    def settled(self) -> dict[str, int] | None:
        """The choice that is not yet told, once it is made; None if there is none, or it failed."""
        if self._pending is None:
            return None
        found, self.failure = self._pending.result()
        return found

    def adopt(self, answer: torch.Tensor) -> Plan:
        """The plan to go on with, after `due` was answered."""
        self._pending = None
        self.choice = told(self.plan, answer) or self.choice
        return self.plan if self.choice is None else with_choice(self.plan, self.choice)

    def state(self) -> dict[str, Any]:
        """Plain values and tensors, from which `load` goes on."""
        return {
            "choice": self.choice,
            "pending": self.settled(),
            "counts": dict(self.counts),
            "sums": {name: total.clone() for name, total in self.sums.items()},
        }

    def load(self, state: Any) -> Plan:
        """Continue from `state`; the plan that was in use.

        Raises:
            GradlabError: for anything else than what `state` gives for this plan.
        """
        sound = isinstance(state, Mapping) and {"choice", "pending", "counts", "sums"} <= set(state)
        sound = sound and all(isinstance(state[key], Mapping) for key in ("counts", "sums"))
        if not sound or not all(self._possible(state[key]) for key in ("choice", "pending")):
            raise GradlabError("checkpoint: the refresh's state is not that of this plan")
        shapes = {layer.name: layer.shape for layer in self.plan.layers if layer.name in self._layers}
        for name, total in state["sums"].items():
            fits = isinstance(total, torch.Tensor) and tuple(total.shape) == shapes.get(name)
            if not fits or total.dtype != torch.float32 or type(state["counts"].get(name)) is not int:
                raise GradlabError(f"checkpoint: what was accumulated of {str(name)[:80]!r} is not of this plan")
        self.choice = dict(state["choice"]) if state["choice"] is not None else None
        self.sums = {name: total.clone() for name, total in state["sums"].items()} if self._is_root else {}
        self.counts = dict(state["counts"]) if self._is_root else {}
        pending = state["pending"]
        self._pending = None if pending is None or not self._is_root else _Pending(lambda: dict(pending), False)
        return self.plan if self.choice is None else with_choice(self.plan, self.choice)

    def _possible(self, choice: Any) -> bool:
        if choice is None:
            return True
        some = self._refresh.settings
        return (
            isinstance(choice, Mapping)
            and set(choice) == set(some)
            and all(type(place) is int and 0 <= place < len(some[name]) for name, place in choice.items())
        )


class _Pending:
    """A choice in the making."""

    def __init__(self, function: Callable[[], dict[str, int]], beside: bool) -> None:
        self._function = function
        self._result: tuple[dict[str, int] | None, str] | None = None
        self._thread = threading.Thread(target=self._run, name="gradlab-refresh", daemon=True) if beside else None
        if self._thread is not None:
            self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._result = self._function(), ""
        except Exception as error:  # training goes on with the plan that there is
            self._result = None, f"{type(error).__name__}: {error}"

    def result(self) -> tuple[dict[str, int] | None, str]:
        """The choice, or None and why there is none."""
        if self._thread is not None:
            self._thread.join()
        if self._result is None:
            self._run()
        assert self._result is not None
        return self._result
