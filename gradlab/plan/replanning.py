"""Choose a plan anew while training, from gradients accumulated since the last choice.

Alimohammadi et al., "L-GreCo", MLSys 2024, section 4 and Fig. 2: one rank accumulates its gradients, measures what each
setting would lose of them, finds the smallest plan with no more error than the reference's, and broadcasts its choice.
Here the exact search chooses, a thread beside training makes the tables, and the codecs' states - residuals, warm
starts - are carried over to the new settings. If the plan's refresh follows Accordion (section 5.3), the reference
is the setting that Accordion takes for each layer: the less compressed one in a critical regime.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from gradlab.codec import Tensors
from gradlab.codec.measures import is_finite
from gradlab.collectives import Broadcast
from gradlab.errors import BadMessage, GradlabError
from gradlab.knapsack import allocate
from gradlab.plan.layer_errors import Candidate, squared_errors
from gradlab.plan.plan import Plan
from gradlab.plan.refresh import ROOT, Accordion, is_critical


def choose(
    plan: Plan, accumulated: Tensors, world_size: int, iteration: int, reference: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Choose the smallest plan within the refresh's budget of errors: by group name, the index of its setting. A group
    without accumulated means keeps the reference; codecs' random numbers follow from `iteration`."""
    refresh = plan.refresh
    assert refresh is not None
    choice = dict(refresh.reference if reference is None else reference)
    groups = [g for g in plan.compressed_groups if g.name in refresh.settings and g.layers[0] in accumulated]
    errors, sizes, budget = [], [], []
    for group in groups:
        [layer] = plan.members(group)
        candidates = [Candidate(group.codec, settings) for settings in refresh.settings[group.name]]
        row = np.array(squared_errors(layer, accumulated[layer.name], candidates, seed=plan.seed + iteration))
        errors.append(np.sqrt(row) if refresh.metric == "l2" else row)
        sizes.append([candidate.build().forecast([layer], world_size).payload for candidate in candidates])
        budget.append(errors[-1][choice[group.name]])
    if groups and np.isfinite(budget).all():
        smallest = allocate(errors, sizes, refresh.alpha * float(np.array(budget).sum())).choice
        choice |= {group.name: int(index) for group, index in zip(groups, smallest, strict=True)}
    return choice


def with_choice(plan: Plan, choice: Mapping[str, int]) -> Plan:
    """Return a plan of the same groups with the chosen settings."""
    assert plan.refresh is not None
    settings = plan.refresh.settings
    groups = tuple(
        replace(group, settings=settings[group.name][choice[group.name]]) if group.name in choice else group
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def message_of(plan: Plan, choice: Mapping[str, int] | None) -> Broadcast:
    """Return the root's broadcast of a choice: (groups,), int64, in the order of names, all -1 for no choice. The other
    ranks' values do not count."""
    assert plan.refresh is not None
    indices = [-1 if choice is None else choice[name] for name in sorted(plan.refresh.settings)]
    return Broadcast(torch.tensor(indices, dtype=torch.int64), ROOT)


def choice_in(plan: Plan, message: torch.Tensor) -> dict[str, int] | None:
    """Read the choice in a message (groups,), int64, the inverse of `message_of`; None: none was made."""
    assert plan.refresh is not None
    indices, known = message.tolist(), sorted(plan.refresh.settings)
    if -1 in indices:
        return None
    for name, index in zip(known, indices, strict=True):
        if not 0 <= index < len(plan.refresh.settings[name]):
            last = len(plan.refresh.settings[name]) - 1
            raise BadMessage(f"refresh: rank {ROOT} chose settings {index} of group {name}, expected 0 to {last}")
    return dict(zip(known, indices, strict=True))


class Regimes:
    """The groups in a critical regime, window by window, by Accordion's rule.

    norms: L2 norms of the mean gradients of the last window, by group name.
    rates: learning rates at its end, by group name.
    critical: groups in a critical regime since then; None before the first window ends.
    """

    def __init__(self, plan: Plan, accordion: Accordion) -> None:
        self._accordion = accordion
        self._layer_of = {group.name: group.layers[0] for group in plan.groups if group.name in accordion.least}
        self.norms: dict[str, float] = {}
        self.rates: dict[str, float] = {}
        self.critical: frozenset[str] | None = None

    def after(self, means: Tensors, learning_rates: Mapping[str, float]) -> dict[str, int]:
        """End a window of mean gradients; return the index of Accordion's setting by group. A missing layer makes one
        critical."""
        layers = self._layer_of.items()
        norms = {group: float(means[layer].double().norm()) for group, layer in layers if layer in means}
        rates = {group: float(learning_rates[layer]) for group, layer in layers if layer in learning_rates}
        rows = [self._row(values) for values in (self.norms, norms, self.rates, rates)]
        eta, least_decay = self._accordion.eta, self._accordion.least_decay
        flags = dict(zip(self._layer_of, is_critical(*rows, eta=eta, least_decay=least_decay).tolist(), strict=True))
        self.norms, self.rates = norms, rates
        self.critical = frozenset(group for group, flag in flags.items() if flag)
        least, most = self._accordion.least, self._accordion.most
        return {group: least[group] if flag else most[group] for group, flag in flags.items()}

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint. `load` continues from them."""
        critical = None if self.critical is None else sorted(self.critical)
        return {"norms": dict(self.norms), "rates": dict(self.rates), "critical": critical}

    def load(self, state: Any) -> None:
        """Continue from a state that `state` gave for the same plan."""
        sound = isinstance(state, Mapping) and set(state) == {"norms", "rates", "critical"}
        sound = sound and all(self._are_numbers(state[key]) for key in ("norms", "rates"))
        sound = sound and (state["critical"] is None or self._are_groups(state["critical"]))
        if not sound:
            raise GradlabError("checkpoint: the state of Accordion's regimes is not that of this plan")
        self.norms, self.rates = dict(state["norms"]), dict(state["rates"])
        self.critical = None if state["critical"] is None else frozenset(state["critical"])

    def _row(self, values: Mapping[str, float]) -> np.ndarray:
        return np.array([values.get(group, np.nan) for group in self._layer_of])

    def _are_groups(self, names: Any) -> bool:
        return isinstance(names, list) and all(isinstance(name, str) and name in self._layer_of for name in names)

    def _are_numbers(self, values: Any) -> bool:
        if not isinstance(values, Mapping):
            return False
        return self._are_groups(list(values)) and all(type(value) is float for value in values.values())


class Replanner:
    """Chooses a plan's settings anew while training, by its `refresh`. The root accumulates and measures.

    choice: choice in use, see `choose`. None before the first one.
    failure: reason why the last choice could not be made, on the root. The plan then stays as it is.
    sums, counts: gradients since the last choice, float32, and their number, by layer name, on the root.
    regimes: regimes of a refresh that follows Accordion, else None. The root alone sees windows.
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
        accordion = plan.refresh.accordion
        self.regimes = None if accordion is None else Regimes(plan, accordion)
        self._pending: _Pending | None = None

    def add(self, gradients: Tensors, iteration: int, scaled_by: float = 1.0) -> None:
        """Accumulate this rank's finite gradients, without their loss scale, from the first compressed iteration on."""
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

    def end(self, iteration: int, learning_rates: Mapping[str, float] | None = None) -> None:
        """End an iteration: begin to choose, if the refresh is due after it."""
        if self._refresh.chosen_after(iteration, self._first):
            means = {name: (total / self.counts[name]).cpu() for name, total in self.sums.items()}
            self.sums, self.counts = {}, {}
            if self._is_root:
                reference = None if self.regimes is None else self.regimes.after(means, learning_rates or {})
                make = partial(choose, self.plan, means, self._world_size, iteration, reference)
                self._pending = _Pending(make, self._beside)

    def message(self, iteration: int) -> Broadcast | None:
        """Wait for the root's choice that is due before an iteration, and return the request that sends it; None: none
        is due."""
        if not self._refresh.adopted_before(iteration, self._first):
            return None
        return message_of(self.plan, self.settled())

    def settled(self) -> dict[str, int] | None:
        """Wait for the choice that is made but not yet sent; None: there is none, or it failed."""
        if self._pending is None:
            return None
        choice, self.failure = self._pending.result()
        return choice

    def adopt(self, message: torch.Tensor) -> Plan:
        """Adopt the choice in a message (groups,), int64, and return the plan to go on with."""
        self._pending = None
        self.choice = choice_in(self.plan, message) or self.choice
        return self.plan if self.choice is None else with_choice(self.plan, self.choice)

    def state(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint. `load` continues from them."""
        return {
            "choice": self.choice,
            "pending": self.settled(),
            "counts": dict(self.counts),
            "sums": {name: total.clone() for name, total in self.sums.items()},
            **({} if self.regimes is None else {"regimes": self.regimes.state()}),
        }

    def load(self, state: Any) -> Plan:
        """Continue from a state that `state` gave for the same plan, and return the plan that was in use."""
        sound = isinstance(state, Mapping) and {"choice", "pending", "counts", "sums"} <= set(state)
        sound = sound and all(isinstance(state[key], Mapping) for key in ("counts", "sums"))
        if not sound or not all(self._possible(state[key]) for key in ("choice", "pending")):
            raise GradlabError("checkpoint: the refresh's state is not that of this plan")
        shapes = {layer.name: layer.shape for layer in self.plan.layers if layer.name in self._layers}
        for name, total in state["sums"].items():
            fits = isinstance(total, torch.Tensor) and tuple(total.shape) == shapes.get(name)
            if not fits or total.dtype != torch.float32 or type(state["counts"].get(name)) is not int:
                raise GradlabError(f"checkpoint: what was accumulated of {str(name)[:80]!r} is not of this plan")
        if self.regimes is not None:
            self.regimes.load(state.get("regimes"))
        self.choice = dict(state["choice"]) if state["choice"] is not None else None
        self.sums = {name: total.clone() for name, total in state["sums"].items()} if self._is_root else {}
        self.counts = dict(state["counts"]) if self._is_root else {}
        pending = state["pending"]
        self._pending = None if pending is None or not self._is_root else _Pending(lambda: dict(pending), False)
        return self.plan if self.choice is None else with_choice(self.plan, self.choice)

    def _possible(self, choice: Any) -> bool:
        if choice is None:
            return True
        settings = self._refresh.settings
        return (
            isinstance(choice, Mapping)
            and set(choice) == set(settings)
            and all(type(index) is int and 0 <= index < len(settings[name]) for name, index in choice.items())
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
