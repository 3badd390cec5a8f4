"""A rank's state as plain values and tensors, and what becomes of the ranks' states at another world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradlab.codec import Tensors
from gradlab.errors import GradlabError
from gradlab.runtime.device import HostDevice
from gradlab.runtime.engine import Engine
from gradlab.wrapper import POLICIES

_FORMAT = 2


def save(engine: Engine, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's state; tensors are copies, keyed "<group>::<layer>/<what>". identity: plan, rank, world size."""
    states = {f"{group}::{key}": t.clone() for group, kept in engine.states.items() for key, t in kept.items()}
    return {
        "format": _FORMAT,
        **identity,
        "iteration": engine.iteration,
        "learning_rates": dict(engine.learning_rates),
        "states": states,
    }


def restore(engine: Engine, saved: Mapping[str, Any], identity: Mapping[str, Any], device: HostDevice) -> None:
    """Continue from `save` of the same plan, rank and world size.

    Raises:
        GradlabError: naming what differs; the engine is then as it was.
    """
    for key, mine in {"format": _FORMAT, **identity}.items():
        if not isinstance(saved, Mapping) or saved.get(key) != mine:
            came = repr(saved.get(key))[:80] if isinstance(saved, Mapping) else type(saved).__name__
            hint = "; load_state_dicts takes the checkpoints of all old ranks" if key == "world_size" else ""
            raise GradlabError(f"checkpoint: {key} is {came}, this run has {mine!r}{hint}")
    states = _states(engine, saved)
    _continue(engine, saved, _moved(states, device))


def redistribute(
    engine: Engine,
    saved: Sequence[Mapping[str, Any]],
    identity: Mapping[str, Any],
    residuals: str,
    device: HostDevice,
) -> None:
    """Continue from the `save` of every rank of a run at any world size; see `CompressionState.load_state_dicts`.

    Raises:
        GradlabError: for another policy, another plan, or checkpoints that are not those of one run, whole.
    """
    if residuals not in POLICIES:
        raise GradlabError(f"residuals = {residuals!r}, expected one of {', '.join(POLICIES)}")
    ranks = [one.get("rank") if isinstance(one, Mapping) else None for one in saved]
    if not saved or ranks != list(range(len(saved))):
        raise GradlabError(f"checkpoints of ranks {ranks}, expected those of ranks 0 to N - 1, in order")
    for key, mine in (("format", _FORMAT), ("plan", identity["plan"]), ("world_size", len(saved))):
        if different := [one for one in saved if one.get(key) != mine]:
            raise GradlabError(
                f"checkpoint of rank {different[0]['rank']}: {key} is {different[0].get(key)!r}, not {mine!r}"
            )
    if len({one.get("iteration") for one in saved}) > 1:
        raise GradlabError(f"checkpoints of iterations {[one.get('iteration') for one in saved]}, expected one step's")
    by_rank = [_states(engine, one) for one in saved]
    rank, world_size = identity["rank"], identity["world_size"]
    states = {
        group: engine.codecs[group].redistribute([one[group] for one in by_rank], rank, world_size, residuals)
        for group in by_rank[0]
    }
    _continue(engine, saved[0], _moved(states, device))


def _states(engine: Engine, saved: Mapping[str, Any]) -> dict[str, Tensors]:
    """States by group, from a checkpoint's; their own copies."""
    states, rates = saved.get("states"), saved.get("learning_rates")
    sound = isinstance(states, Mapping) and type(saved.get("iteration")) is int and isinstance(rates, Mapping)
    if not sound or not all(isinstance(value, torch.Tensor) for value in states.values()):  # type: ignore[union-attr]
        raise GradlabError("checkpoint: expected the states and the iteration that state_dict gives")
    found: dict[str, Tensors] = {}
    for key, tensor in states.items():  # type: ignore[union-attr]
        group, _, rest = key.partition("::")
        found.setdefault(group, {})[rest] = tensor
    if unknown := sorted(set(found) - set(engine.codecs)):
        raise GradlabError(f"checkpoint: states for groups the plan does not have: {', '.join(unknown)}")
    return found


def _moved(states: dict[str, Tensors], device: HostDevice) -> dict[str, Tensors]:
    """Copies on the device, made where the worker makes its own, and there before anybody uses them."""
    with device.working():
        copies = {
            group: {key: tensor.detach().clone().to(device.device) for key, tensor in state.items()}
            for group, state in states.items()
        }
        device.synchronize()
    return copies


def _continue(engine: Engine, saved: Mapping[str, Any], states: dict[str, Tensors]) -> None:
    engine.states, engine.iteration = states, saved["iteration"]
    engine.learning_rates = {name: float(rate) for name, rate in saved["learning_rates"].items()}
    engine.ranks_compared = False
