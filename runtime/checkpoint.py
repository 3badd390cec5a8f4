"""A rank's state as plain values and tensors, and what becomes of the ranks' states at another world size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradlab.codec import Tensors
from gradlab.codec.measures import is_finite
from gradlab.codec.wrapper import POLICIES
from gradlab.errors import GradlabError
from gradlab.executor import PlanRun
from gradlab.layout import Layer
from gradlab.plan.replanning import ROOT
from gradlab.runtime.engine.device import HostDevice

_FORMAT = 2
_WHOLE = ("residual", "velocity", "momentum")  # kept in the layer's own shape


def save(run: PlanRun, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Collect a run's state for a checkpoint. Tensors are copies, keyed "<group>::<layer>/<what>".

    Args:
        run: between two steps.
        identity: plan, rank and world size.

    Returns:
        Plain values and tensors.
    """
    states = {f"{group}::{key}": t.clone() for group, kept in run.states.items() for key, t in kept.items()}
    return {
        "format": _FORMAT,
        **identity,
        "iteration": run.iteration,
        "learning_rates": dict(run.learning_rates),
        "states": states,
        **({} if run.replanner is None else {"refresh": run.replanner.state()}),
    }


def restore(run: PlanRun, saved: Mapping[str, Any], identity: Mapping[str, Any], device: HostDevice) -> None:
    """Continue from `save` of the same plan, rank and world size.

    Args:
        run: the run that continues.
        saved: what `save` gave.
        identity: plan, rank and world size of this run.
        device: where the states are needed.

    Raises:
        GradlabError: naming what differs. The run is then as it was.
    """
    for key, expected in {"format": _FORMAT, **identity}.items():
        if not isinstance(saved, Mapping) or type(saved.get(key)) is not type(expected) or saved[key] != expected:
            came = repr(saved.get(key))[:80] if isinstance(saved, Mapping) else type(saved).__name__
            hint = "; load_state_dicts takes the checkpoints of all old ranks" if key == "world_size" else ""
            raise GradlabError(f"checkpoint: {key} is {came}, this run has {expected!r}{hint}")
    states = _states(run, saved)
    _continue(run, saved, _moved(states, device), saved.get("refresh"))


def redistribute(
    run: PlanRun,
    saved: Sequence[Mapping[str, Any]],
    identity: Mapping[str, Any],
    residuals: str,
    device: HostDevice,
) -> None:
    """Continue from the `save` of every rank of a run at any world size.

    Args:
        run: the run that continues.
        saved: what `save` gave on each of the old ranks, in rank order.
        identity: plan, rank and world size of this run.
        residuals: what becomes of the residuals, see `CompressionState.load_state_dicts`.
        device: where the states are needed.

    Raises:
        GradlabError: for another policy, another plan, or checkpoints that are not those of one run, whole.
    """
    if not isinstance(saved, Sequence) or isinstance(saved, (str, bytes)):
        raise GradlabError(f"expected a list with the checkpoint of every old rank, not {type(saved).__name__}")
    if residuals not in POLICIES:
        raise GradlabError(f"residuals = {residuals!r}, expected one of {', '.join(POLICIES)}")
    ranks = [one.get("rank") if isinstance(one, Mapping) else None for one in saved]
    if not saved or ranks != list(range(len(saved))):
        raise GradlabError(f"checkpoints of ranks {ranks}, expected those of ranks 0 to N - 1, in order")
    for key, expected in (("format", _FORMAT), ("plan", identity["plan"]), ("world_size", len(saved))):
        if different := [one for one in saved if one.get(key) != expected]:
            raise GradlabError(
                f"checkpoint of rank {different[0]['rank']}: {key} is {different[0].get(key)!r}, not {expected!r}"
            )
    if len({one.get("iteration") for one in saved}) > 1:
        raise GradlabError(f"checkpoints of iterations {[one.get('iteration') for one in saved]}, expected one step's")
    by_rank = [_states(run, one) for one in saved]
    if others := [rank for rank, one in enumerate(saved) if set(one["states"]) != set(saved[0]["states"])]:
        raise GradlabError(f"checkpoint of rank {others[0]}: other states than in that of rank 0")
    rank, world_size = identity["rank"], identity["world_size"]
    states = {
        group: run.codecs[group].redistribute([one[group] for one in by_rank], rank, world_size, residuals)
        for group in by_rank[0]
    }
    _continue(run, saved[0], _moved(states, device), saved[ROOT].get("refresh"))


def _states(run: PlanRun, saved: Mapping[str, Any]) -> dict[str, Tensors]:
    """States by group, from a checkpoint's; their own copies."""
    states, rates, iteration = saved.get("states"), saved.get("learning_rates"), saved.get("iteration")
    sound = type(iteration) is int and 0 <= iteration < 2**63
    if not sound or not isinstance(states, Mapping) or not isinstance(rates, Mapping):
        raise GradlabError("checkpoint: expected the states, rates and iteration that state_dict gives")
    if not all(type(rate) in (int, float) and math.isfinite(rate) for rate in rates.values()):
        raise GradlabError("checkpoint: learning rates that are not finite numbers")
    groups = {group.name: group for group in run.plan.groups}
    by_group: dict[str, Tensors] = {}
    for key, tensor in states.items():
        name, _, rest = str(key).partition("::")
        if name not in run.codecs:
            raise GradlabError(f"checkpoint: {str(key)[:80]!r}: the plan has no group {name[:80]!r}")
        _check_tensor(str(key), tensor, states, run.plan.members(groups[name]))
        by_group.setdefault(name, {})[rest] = tensor
    return by_group


def _check_tensor(key: str, tensor: Any, states: Mapping[Any, Any], layers: Sequence[Layer]) -> None:
    name, _, what = key.partition("::")[2].rpartition("/")
    layer = next((layer for layer in layers if layer.name == name), None)
    if layer is None:
        raise GradlabError(f"checkpoint: {key[:80]!r} belongs to no layer of its group")
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise GradlabError(f"checkpoint: {key[:80]!r} is no dense tensor")
    if what in _WHOLE and tuple(tensor.shape) != layer.shape:
        raise GradlabError(
            f"checkpoint: {key[:80]!r} has the shape {list(tensor.shape)}, its layer {list(layer.shape)}"
        )
    int8 = tensor.dtype == torch.int8 and f"{key}_scale" in states
    if not int8 and (tensor.dtype not in (torch.float32, torch.float64) or not is_finite(tensor)):
        raise GradlabError(f"checkpoint: {key[:80]!r} is {tensor.dtype}, or not finite: expected finite float32 values")


def _moved(states: dict[str, Tensors], device: HostDevice) -> dict[str, Tensors]:
    """Copies on the device, made where the worker makes its own, and there before anybody uses them."""
    ready = device.ready()
    with device.working():
        device.wait(ready)
        copies = {
            group: {key: tensor.detach().clone().to(device.device) for key, tensor in state.items()}
            for group, state in states.items()
        }
        device.synchronize()
    return copies


def _continue(run: PlanRun, saved: Mapping[str, Any], states: dict[str, Tensors], refresh: Any) -> None:
    if run.replanner is not None:
        plan = run.replanner.load(refresh)
        run.states = {}  # those of the settings before; the ones below are of the settings that come
        run.adopt(plan)
    run.states, run.iteration = states, saved["iteration"]
    run.learning_rates = {name: float(rate) for name, rate in saved["learning_rates"].items()}
