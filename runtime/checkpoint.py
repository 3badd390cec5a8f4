"""A rank's state as plain values and tensors, and what becomes of the ranks' states at another world size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradlab.codec import Tensors, hash_tensor
from gradlab.codec.kept import state_problem
from gradlab.codec.wrapper import POLICIES, carried, on_host, resize
from gradlab.errors import GradlabError
from gradlab.executor import PlanRun
from gradlab.executor.ownership import share_out
from gradlab.plan.refresh import ROOT
from gradlab.runtime.engine.device import HostDevice
from gradlab.trial import trial

_FORMAT = 1
_BESIDE = ("sha256", "inside", "parameters", "marks")  # not among checksums of this checkpoint; two have their own
_ALONE = {"local_ranks": 1, "shards": 1}  # what a checkpoint of a run without nodes leaves out
_MOST_STEPS, _MOST_RATE = 2**48, 1e9


def save(run: PlanRun, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Collect a run's state between two steps: plain values, and copies of tensors keyed "<group>::<layer>/<what>"."""
    held, iteration = run.since_step
    check_kept(run, {group: [state] for group, state in held.items()}, [(run.rank, run.world_size)])
    states = {f"{group}::{key}": t.clone() for group, kept in held.items() for key, t in kept.items()}
    return sealed(
        {
            "format": _FORMAT,
            **identity,
            "iteration": iteration,
            "learning_rates": dict(run.learning_rates),
            "states": states,
            **({} if run.replanner is None else {"refresh": run.replanner.state()}),
        }
    )


def sealed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with the sha256 of each of its tensors, by path, and under "" of all else in it."""
    content = {key: value for key, value in saved.items() if key not in _BESIDE}
    return {**saved, "sha256": _hashes(content)}


def require(saved: object, identity: Mapping[str, Any]) -> None:
    """Refuse what is no whole checkpoint with these values, by key."""
    compare(saved, identity)
    assert isinstance(saved, Mapping)
    verify(saved)


def compare(saved: object, identity: Mapping[str, Any], where: str = "") -> None:
    """Refuse what has other values than a run, by key."""
    if not isinstance(saved, Mapping):
        raise GradlabError(f"checkpoint: {where}a {type(saved).__name__}, expected what state_dict gives")
    for key, expected in identity.items():
        came = saved.get(key, _ALONE.get(key))
        if type(came) is not type(expected) or came != expected:
            other = not where and key in ("world_size", *_ALONE)
            hint = "; load_state_dicts takes the checkpoints of all old ranks" if other else ""
            raise GradlabError(f"checkpoint: {where}{key} is {repr(came)[:80]}, this run has {expected!r}{hint}")


def verify(saved: Mapping[str, Any]) -> None:
    """Compare a checkpoint with its checksums; refuse a tensor that is missing, unknown or damaged."""
    listed = saved.get("sha256")
    found = _hashes({key: value for key, value in saved.items() if key not in _BESIDE})
    if not isinstance(listed, Mapping):
        raise GradlabError("checkpoint: without checksums, expected what state_dict gives")
    for key in (*listed, *found):
        what = f"{str(key)[:80]!r}" if key else "what is no tensor"
        if key not in found:
            raise GradlabError(f"checkpoint: {what} is missing")
        if key not in listed:
            raise GradlabError(f"checkpoint: {what} is not of it, as its checksums are without it")
        if listed[key] != found[key]:
            raise GradlabError(f"checkpoint: {what} is damaged (its sha256 differs)")


def _hashes(content: Mapping[str, Any]) -> dict[str, str]:
    """Hash each tensor, and the rest without them."""
    tensors: dict[str, torch.Tensor] = {}
    plain = _without_tensors(content, "", tensors)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors.values()}
    if sum(one.numel() * one.element_size() for one in tensors.values()) > sum(storages.values()):
        raise GradlabError("checkpoint: its tensors have more elements than there is memory behind them")
    try:
        rest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode(errors="surrogatepass")).hexdigest()
    except (TypeError, ValueError, RecursionError):
        raise GradlabError("checkpoint: it holds what state_dict does not give") from None
    return {"": rest, **{path: hash_tensor(tensor) for path, tensor in tensors.items()}}


def _without_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Copy a tree of dicts and lists without the tensors of its dicts, and collect these by path."""
    if isinstance(value, list | tuple):
        return [_without_tensors(inner, f"{path}/{number}", tensors) for number, inner in enumerate(value)]
    if isinstance(value, Mapping):
        found = {}
        for key, inner in value.items():
            here = str(key) if path in ("", "states") else f"{path}/{key}"
            if not isinstance(inner, torch.Tensor):
                found[str(key)] = _without_tensors(inner, here, tensors)
                continue
            dense = inner.layout == torch.strided and inner.device.type != "meta" and not inner.is_quantized
            if type(inner) is not torch.Tensor or not dense or here in tensors:
                raise GradlabError(f"checkpoint: {here[:80]!r} is no dense tensor")
            tensors[here] = inner
        return found
    return value


def restore(run: PlanRun, saved: Mapping[str, Any], identity: Mapping[str, Any], device: HostDevice) -> None:
    """Continue from `save` of the same plan, rank and world size. After an error the run is as it was."""
    if trial() is not None:
        return  # which tries another plan, and begins it anew
    require(saved, {"format": _FORMAT, **_ALONE, **identity})
    states = states_of(run, saved)
    if strangers := sorted(states.keys() - run.codecs.keys()):
        raise GradlabError(f"checkpoint: a state of group {strangers[0]!r}, which another local rank owns")
    check_kept(run, {group: [state] for group, state in states.items()}, [(run.rank, run.world_size)])
    _continue(run, saved, moved(run, states, device), saved["learning_rates"], saved.get("refresh"))


def check_kept(run: PlanRun, states: Mapping[str, Sequence[Tensors]], ranks: Sequence[tuple[int, int]]) -> None:
    """Compare states, by group of each old rank (its number, and how many), with what this run's codecs keep."""
    for group, kept in states.items():
        for state, (rank, world_size) in zip(kept, ranks, strict=True):
            if group in run.codecs:
                members = run.plan.members(run.groups[group])
                if problem := state_problem(run.codecs[group].kept(members, rank, world_size, group), state):
                    raise GradlabError(f"checkpoint: group {group[:80]!r}: {problem}")


def same_ranks(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Say whether a checkpoint is of as many ranks as a run, and as many to a node."""
    counts = [{**_ALONE, **one} for one in (saved, identity)]
    return all(counts[0].get(key) == counts[1][key] for key in ("world_size", *_ALONE))


def redistribute(
    run: PlanRun,
    saved: Sequence[Mapping[str, Any]],
    identity: Mapping[str, Any],
    residuals: str,
    device: HostDevice,
) -> None:
    """Continue, at any world size, from what `save` gave on all old ranks, in rank order."""
    check_arguments(saved, residuals)
    if trial() is not None:
        return
    ranks = [one.get("rank") if isinstance(one, Mapping) else None for one in saved]
    if not saved or ranks != list(range(len(saved))):
        raise GradlabError(f"checkpoints of ranks {ranks}, expected those of ranks 0 to N - 1, in order")
    require_together(saved, {"format": _FORMAT, "plan": identity["plan"], "world_size": len(saved), "shards": 1})
    by_node, layers = states_by_node(run, saved), {group.name: group.layers for group in run.plan.groups}
    rates = dict(saved[ROOT]["learning_rates"])
    states = {}
    for group, (owner, kept) in by_node.items():
        rates |= {name: rate for name, rate in owner["learning_rates"].items() if name in layers[group]}
        if group in run.codecs:
            states[group] = resize(run.codecs[group], kept, run.rank, run.world_size, residuals)
    _continue(run, saved[ROOT], moved(run, states, device), rates, saved[ROOT].get("refresh"))


def between_steps(run: PlanRun) -> dict[str, Any]:
    """Return what a run goes on from, for `take_over`; the tensors are its own, which it does not write to."""
    states, iteration = run.since_step
    rates = dict(run.learning_rates)
    return {
        "iteration": iteration,
        "learning_rates": rates,
        "states": {name: dict(one) for name, one in states.items()},
    }


def for_others(run: PlanRun, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return of what a run goes on from what a rank takes over that was not there."""
    return {**kept, "states": {name: carried(run.codecs[name], one, False) for name, one in kept["states"].items()}}


def take_over(run: PlanRun, kept: Mapping[str, Any], device: HostDevice) -> None:
    """Continue, among other ranks than before, from `between_steps` of this rank or `for_others` of another one."""
    states = {name: carried(run.codecs[name], one, True) for name, one in kept["states"].items() if name in run.codecs}
    check_kept(run, {name: [one] for name, one in states.items()}, [(run.rank, run.world_size)])
    _continue(run, kept, moved(run, states, device), kept["learning_rates"], None)


def require_together(saved: Sequence[Mapping[str, Any]], identity: Mapping[str, Any], where: str = "") -> None:
    """Refuse checkpoints of several ranks that are not of one step of one run, with these values by key."""
    for rank, one in enumerate(saved):
        compare(one, {**identity, "iteration": saved[ROOT].get("iteration")}, f"{where}of rank {rank}: ")
        verify(one)


def check_arguments(saved: object, residuals: str) -> None:
    """Refuse what is no list of checkpoints, or no policy for residuals."""
    if not isinstance(saved, Sequence) or isinstance(saved, (str, bytes)):
        raise GradlabError(f"expected a list with the checkpoint of every old rank, not {type(saved).__name__}")
    if residuals not in POLICIES:
        raise GradlabError(f"residuals = {residuals!r}, expected one of {', '.join(POLICIES)}")


def same_shards(saved: Sequence[Mapping[str, Any]], identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Choose the checkpoints of the same shards from those of all ranks, whose nodes hold as many shards each.

    Returns one per node, as a run of whole layers between as many ranks has them, for `redistribute`.
    """
    mine = (identity["shards"], identity["local_rank"])
    column = [one for one in saved if isinstance(one, Mapping) and (one.get("shards"), one.get("local_rank")) == mine]
    shards = {one.get("shards") if isinstance(one, Mapping) else None for one in saved}
    if shards != {mine[0]} or len(column) * mine[0] != len(saved):
        raise GradlabError(
            f"checkpoints of {len(saved)} ranks with {sorted(map(str, shards))} shards, this run has {mine[0]}: nodes "
            "may change in number, shards may not"
        )
    of_shards = ("shards", "node", "local_rank")
    alone = [{key: value for key, value in one.items() if key not in of_shards} for one in column]
    for before, one in zip(column, alone, strict=True):
        verify(before)
        one |= {"rank": before.get("node"), "world_size": len(column)}
    alone = [sealed(one) for one in alone]
    return sorted(alone, key=lambda one: one["rank"] if isinstance(one["rank"], int) else len(column))


def states_by_node(
    run: PlanRun, saved: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[Mapping[str, Any], list[Tensors]]]:
    """Sort all old ranks' states, checked: of each group, the checkpoint of an owner, and every node's state.

    Without nodes every rank is one, and owns all groups.
    """
    states = [states_of(run, one) for one in saved]
    places = [(one.get("node", rank), one.get("local_rank", 0)) for rank, one in enumerate(saved)]
    local_ranks = saved[ROOT].get("local_ranks", 1)
    if type(local_ranks) is not int or not 1 <= local_ranks <= len(saved):
        raise GradlabError(f"checkpoint of rank 0: local_ranks is {repr(local_ranks)[:80]}, of {len(saved)} ranks")
    nodes = len(saved) // local_ranks
    at = {place: rank for rank, place in enumerate(places)}
    if set(at) != {(node, local_rank) for node in range(nodes) for local_rank in range(local_ranks)}:
        raise GradlabError(f"checkpoints of nodes and local ranks {places}, expected {nodes} x {local_ranks}")
    for rank, one in enumerate(saved):
        compare(one, {"local_ranks": local_ranks}, f"of rank {rank}: ")
    owners = share_out(run.plan, local_ranks).groups
    for group, owner in owners.items():
        keys = [set(states[at[node, owner]].get(group, {})) for node in range(nodes)]
        if others := [node for node in range(nodes) if keys[node] != keys[0]]:
            raise GradlabError(
                f"checkpoint of rank {at[others[0], owner]}: other states than in that of rank {at[0, owner]}"
            )
    by_node = {
        group: (saved[at[0, owner]], [states[at[node, owner]][group] for node in range(nodes)])
        for group, owner in owners.items()
        if group in states[at[0, owner]]
    }
    for group, (_, kept) in by_node.items():
        check_kept(run, {group: kept}, [(node, nodes) for node in range(nodes)])
    return by_node


def states_of(run: PlanRun, saved: Mapping[str, Any]) -> dict[str, Tensors]:
    """Check a checkpoint's states and return them by group. The tensors are the checkpoint's own."""
    states, rates, iteration = saved.get("states"), saved.get("learning_rates"), saved.get("iteration")
    sound = type(iteration) is int and 0 <= iteration < _MOST_STEPS
    if not sound or not isinstance(states, Mapping) or not isinstance(rates, Mapping):
        raise GradlabError("checkpoint: expected the states, rates and iteration that state_dict gives")
    if not all(type(rate) in (int, float) and 0 <= rate <= _MOST_RATE for rate in rates.values()):
        raise GradlabError(f"checkpoint: learning rates that are no numbers from 0 to {_MOST_RATE:g}")
    compressed = {group.name for group in run.plan.compressed_groups}
    by_group: dict[str, Tensors] = {}
    for key, tensor in states.items():
        name, _, rest = str(key).partition("::")
        if name not in compressed:
            raise GradlabError(f"checkpoint: {str(key)[:80]!r}: the plan has no group {name[:80]!r}")
        by_group.setdefault(name, {})[rest] = tensor
    return by_group


def moved(run: PlanRun, states: dict[str, Tensors], device: HostDevice) -> dict[str, Tensors]:
    """Copies on the device, made where the worker makes its own, and there before anybody uses them. What a codec keeps
    in host memory stays there."""
    hosted = {group: on_host(codec) for group, codec in run.codecs.items()}
    ready = device.ready()
    with device.working():
        device.wait(ready)
        copies = {
            group: {
                key: copy if key.rpartition("/")[2] in hosted[group] else copy.to(device.device)
                for key, copy in ((key, tensor.detach().clone()) for key, tensor in state.items())
            }
            for group, state in states.items()
        }
        device.synchronize()
    return copies


def _continue(
    run: PlanRun, saved: Mapping[str, Any], states: dict[str, Tensors], rates: Mapping[str, Any], refresh: Any
) -> None:
    if run.replanner is not None:
        plan = run.replanner.load(refresh)
        run.states = {}  # those of the settings before; the ones below are of the settings that come
        run.adopt(plan)
    run.go_on_from(states, saved["iteration"], {name: float(rate) for name, rate in rates.items()})
