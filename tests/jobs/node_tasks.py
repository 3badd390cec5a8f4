"""Tasks for real ranks that stand for nodes of several ranks each."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradlab.codec import Tensors
from gradlab.collectives import mean_of_node
from gradlab.ddp.groups import destroy, group_like, part_of
from gradlab.errors import GradlabError
from gradlab.executor import LockstepPlan
from gradlab.layout import Layer, layers_of
from gradlab.plan import FEEDBACK, Group, Plan
from gradlab.runtime import CompressionState, compression_hook
from gradlab.runtime.engine.device import HostDevice
from jobs import refresh_tasks
from jobs.matrix_cells import node_group
from support.prescribed import Prescribed, gradients

SHAPES = {"conv": (16, 8, 3, 3), "wide": (24, 150), "large": (90, 80), "tall": (200, 18), "vector": (65,)}


def prescribed(group: dist.ProcessGroup, shapes: dict[str, Any] | None = None) -> DistributedDataParallel:
    """A model of several small buckets."""
    return DistributedDataParallel(Prescribed(shapes or SHAPES), process_group=group, bucket_cap_mb=0.01)


def plan_of(model: nn.Module, codec: str, settings: dict[str, Any]) -> Plan:
    """Two layers in one group, which buckets part; one large layer dense, another one in a group of its own.

    Of a list in place of a setting the groups take one value each, in turn, as in a plan by layer. The codecs of "a+b"
    are of one group each; `settings` are by codec then.
    """
    if "+" in codec:
        members = (("both", ("conv", "tall")), ("wide", ("wide",)))
        pairs = zip(members, codec.split("+"), strict=True)
        return Plan(layers_of(model), tuple(Group(n, of, one, settings[one], FEEDBACK) for (n, of), one in pairs))
    if codec == "identity":
        return Plan(layers_of(model), ())
    return grouped_plan(layers_of(model), {"both": ("conv", "tall"), "wide": ("wide",)}, codec, settings)


def grouped_plan(
    layers: Sequence[Layer], members: dict[str, tuple[str, ...]], codec: str, settings: dict[str, Any]
) -> Plan:
    """Groups with feedback, by name; of a list in place of a setting they take one value each, in turn."""
    chosen = [
        {key: value[position % len(value)] if isinstance(value, list) else value for key, value in settings.items()}
        for position in range(len(members))
    ]
    pairs = zip(members.items(), chosen, strict=True)
    return Plan(tuple(layers), tuple(Group(name, of, codec, own, FEEDBACK) for (name, of), own in pairs))


def attached(
    group: dist.ProcessGroup, model: DistributedDataParallel, plan: Plan, local_ranks: int, **options: Any
) -> CompressionState:
    """A state between nodes of so many ranks, registered."""
    state = CompressionState(plan, model, within=node_group(group, local_ranks), **options)
    model.register_comm_hook(state, compression_hook)
    return state


def step_of(model: DistributedDataParallel, rank: int, step: int) -> Tensors:
    """One backward pass; the gradients that it leaves."""
    model.zero_grad()
    model(gradients(SHAPES, rank, step)).backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters()}


def bytes_of_steps(group: dist.ProcessGroup, codec: str, settings: dict[str, Any], local_ranks: int) -> dict[str, Any]:
    """Bytes counted and forecast, and how far uncompressed gradients are from plain DDP's."""
    rank = dist.get_rank(group)
    plain, model = prescribed(group), prescribed(group)
    state = attached(group, model, plan_of(model, codec, settings), local_ranks)
    farthest = 0.0
    for step in range(3):
        expected, given = step_of(plain, rank, step), step_of(model, rank, step)
        farthest = max(float((given[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)
    last, report = state.statistics.steps[-1], state.report()
    state.close()
    return {
        "payload": last.payload_bytes,
        "forecast": report["forecast_payload_bytes"],
        "dense": report["dense_payload_bytes"],
        "inside": last.inside_wire_bytes,
        "of the plan": state.plan.payload_bytes(group.size() // local_ranks),
        "nodes": report["nodes"],
        "groups": [row["group"] for row in report["groups"]],
        "farthest": farthest,
        "gradients": [float(value.double().sum()) for value in given.values()],
    }


def resumed(group: dist.ProcessGroup, local_ranks: int) -> list[bool]:
    """Steps after a checkpoint equal those of the run that went on, bit for bit."""
    rank = dist.get_rank(group)
    model, again = prescribed(group), prescribed(group)
    plan = plan_of(model, "topk", {"density": 0.05})
    state = attached(group, model, plan, local_ranks, deterministic=True)
    for step in range(4):
        step_of(model, rank, step)
    kept = state.state_dict()
    other = attached(group, again, plan, local_ranks, deterministic=True)
    other.load_state_dict(kept)
    same = []
    for step in range(4, 7):
        expected, given = step_of(model, rank, step), step_of(again, rank, step)
        same.append(all(torch.equal(given[name], expected[name]) for name in expected))
    state.close()
    other.close()
    return same


def redistributed(group: dist.ProcessGroup, before: int, after: int) -> dict[str, Any]:
    """What is due at the ranks, before a change of the number of local ranks and by policy; and the next step works."""
    rank = dist.get_rank(group)
    model, again = prescribed(group), prescribed(group)
    plan = plan_of(model, "topk", {"density": 0.05})
    state = attached(group, model, plan, before)
    for step in range(4):
        step_of(model, rank, step)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, state.state_dict(), group=group)
    other = attached(group, again, plan, after)
    due = {"before": _due(group, state, before)}
    for policy in ("drop", "sum", "split"):
        other.load_state_dicts(everyone, residuals=policy)
        due[policy] = _due(group, other, after)
    owned = sorted(other.run.states)
    step_of(again, rank, 4)
    iterations = [other.iteration, state.iteration]
    try:
        attached(group, prescribed(group), plan, after).load_state_dict(state.state_dict())
        refusal = ""
    except GradlabError as error:
        refusal = str(error)
    state.close()
    other.close()
    return {"due": due, "owned": owned, "iterations": iterations, "refusal": refusal}


def _due(group: dist.ProcessGroup, state: CompressionState, local_ranks: int) -> dict[str, float]:
    """The mean over nodes of what was not sent, as one number per layer."""
    due = {}
    for name in ("conv", "tall", "wide"):
        mine = [kept[f"{name}/residual"] for kept in state.run.states.values() if f"{name}/residual" in kept]
        total = (mine[0].double() if mine else torch.zeros(SHAPES[name], dtype=torch.float64)).clone()
        dist.all_reduce(total, group=group)
        due[name] = float(total.norm()) * local_ranks / group.size()
    return due


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    """What is said of meshes and groups that are not nodes."""
    rank, size = dist.get_rank(group), group.size()
    model = prescribed(group)
    plan = plan_of(model, "topk", {"density": 0.05})
    halves = node_group(group, 2)
    crossed = DeviceMesh("cpu", torch.arange(size).view(2, size // 2), mesh_dim_names=("node", "local"))
    alone = part_of((group,), [rank], None, torch.device("cpu"))
    uneven = part_of((group,), [0, 1, 2] if rank < 3 else [3], None, torch.device("cpu"))
    within: dict[str, Callable[[], Any]] = {
        "a whole mesh": lambda: crossed,
        "a word": lambda: "nodes",
        "a number": lambda: 2,
        "on one rank only": lambda: halves if rank == 0 else None,
        "one node": lambda: group,
        "other sizes": lambda: uneven,
        "overlapping": lambda: group if rank == 0 else halves,
        "not in it": lambda: dist.GroupMember.NON_GROUP_MEMBER if rank == 1 else alone,
    }
    messages = {
        name: _refusal(lambda value=value: CompressionState(plan, model, within=value()))  # type: ignore[misc]
        for name, value in within.items()
    }
    part = DistributedDataParallel(Prescribed(SHAPES), process_group=halves)
    messages["outside the model's group"] = _refusal(lambda: CompressionState(plan, part, within=group))
    changing = prescribed(group, refresh_tasks.SHAPES)
    messages["refresh"] = _refusal(lambda: CompressionState(refresh_tasks.plan_of("topk"), changing, within=halves))
    return messages


def _refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except GradlabError as error:
        return str(error)
    return ""


def as_torchrun_says(group: dist.ProcessGroup, sizes: list[int]) -> dict[str, Any]:
    """Where a rank stands by default, when torchrun has started machines of these sizes."""
    rank = dist.get_rank()
    firsts = [sum(sizes[:machine]) for machine in range(len(sizes))]
    first, size = next((f, s) for f, s in zip(firsts, sizes, strict=True) if f <= rank < f + s)
    model = prescribed(group)
    plan = plan_of(model, "topk", {"density": 0.05})
    with (
        _environment(RANK=rank, LOCAL_RANK=rank - first, LOCAL_WORLD_SIZE=size),
        warnings.catch_warnings(record=True) as w,
    ):
        warnings.simplefilter("always")
        with CompressionState(plan, model) as state:
            nodes = state.report().get("nodes")
        with CompressionState(plan, model, within=None) as state:
            flat = state.report().get("nodes")
    return {"nodes": nodes, "flat": flat, "warnings": [str(one.message) for one in w if "machines" in str(one.message)]}


@contextmanager
def _environment(**variables: int) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Late(dist.Store):
    """The store of a rank that is slow to learn where its peers are, while they have its address."""

    def __init__(self, store: dist.Store, delay: float) -> None:
        super().__init__()
        self._store, self._delay = store, delay

    def get(self, key: str) -> bytes:
        time.sleep(self._delay)
        return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait(keys, *timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def has_extended_api(self) -> bool:
        return False


def groups_dropped_at_once(group: dist.ProcessGroup, late: int) -> int:
    """Make groups and destroy them at once, where one rank connects later than the others; how many were made."""
    stores = dist.distributed_c10d._world.pg_map
    backend, store = stores[dist.group.WORLD]
    stores[dist.group.WORLD] = backend, _Late(store, 0.05 if dist.get_rank() == late else 0.0)
    try:
        for _ in range(3):
            destroy(group_like(group, None, torch.device("cpu")))
    finally:
        stores[dist.group.WORLD] = backend, store
    return 3


def told_once(group: dist.ProcessGroup, level: str) -> dict[str, Any]:
    """A rule that an owner's group breaks: a warning on one rank of all, or an error on all of them."""
    rank = dist.get_rank(group)
    model = prescribed(group)
    plan = plan_of(model, "topk", {"density": 0.05})
    error, steps = "", 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = attached(group, model, plan, 2, rules={"non_finite": level}, non_finite_limit=5)
        try:
            for step in range(3):
                grads = gradients(SHAPES, rank, step)
                if rank == 3:
                    grads["wide"] = grads["wide"] / 0
                model.zero_grad()
                model(grads).backward()
                steps += 1
        except Exception as raised:
            error = str(raised)
        everything_is_nan = all(bool(p.grad.isnan().all()) for p in model.parameters()) if not error else None
        found = [one["rule"] for one in state.report()["rules"]]
        state.close()
    told = [str(one.message) for one in caught if "gradlab" in str(one.message)]
    return {"told": told, "error": error, "found": found, "nan": everything_is_nan, "steps": steps}


def gradients_by_order(group: dist.ProcessGroup, codec: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The gradients of some steps where a node's collectives go by two orders, as on a CPU, and by one, as on a GPU."""
    rank = dist.get_rank(group)
    runs, orders, sent = [], [], []
    for shares_stream in (True, False):
        model = prescribed(group)
        with _attribute(HostDevice, "shares_stream", shares_stream):
            state = attached(group, model, plan_of(model, codec, settings), 2, deterministic=True)
            runs.append([step_of(model, rank, step) for step in range(4)])
            orders.append(len({state._driver._inside, state._driver._averaging}))  # type: ignore[attr-defined]
            sent.append(state.statistics.steps[-1].inside_wire_bytes)
            state.close()
    same = all(torch.equal(one[name], other[name]) for one, other in zip(*runs, strict=True) for name in SHAPES)
    return {"same": same, "orders": orders, "sent": sent}


@contextmanager
def _attribute(holder: type, name: str, value: object) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


LARGE = {"first": (220, 130), "second": (130, 220), "third": (220, 130), "empty": (0, 4), "fourth": (200, 143)}


def memory_is_not_reused_too_early(group: dist.ProcessGroup) -> list[bool]:
    """Layers large enough for recycled memory, one to a bucket, without feedback: lockstep's gradients, bit for bit."""
    rank, nodes = dist.get_rank(group), group.size() // 2
    model = DistributedDataParallel(Prescribed(LARGE), process_group=group, bucket_cap_mb=0.05)
    layers = layers_of(model)
    names = [("first",), ("second",), ("third", "empty"), ("fourth",)]
    codecs: list[tuple[str, dict[str, Any]]] = [("cast", {"dtype": "bfloat16"}), ("qsgd", {"bits": 8}), ("sign", {})]
    pairs = zip(names, [*codecs, codecs[0]], strict=True)
    plan = Plan(layers, tuple(Group("+".join(of), of, codec, settings) for of, (codec, settings) in pairs))
    reference = LockstepPlan(plan, nodes)
    same = []
    with attached(group, model, plan, 2, deterministic=True):
        for step in range(5):
            model.zero_grad()
            model(gradients(LARGE, rank, step)).backward()
            by_rank = [gradients(LARGE, one, step) for one in range(group.size())]
            means = [
                {name: mean_of_node([by_rank[2 * node][name], by_rank[2 * node + 1][name]]) for name in LARGE}
                for node in range(nodes)
            ]
            done = reference.step(step, means)
            expected = {n: mean for ranks in done.exchanged.values() for n, mean in ranks[0].mean.items()}
            given = {name: p.grad for name, p in model.module.named_parameters()}
            same.append(all(torch.equal(given[name], mean) for name, mean in expected.items()))
    return same


def bytes_in_16_bits(group: dist.ProcessGroup, local_ranks: int) -> list[tuple[float, float]]:
    """Bytes counted and forecast of a bfloat16 model whose vectors stay dense, uncompressed and in int4."""
    found = []
    for codec in ("identity", "block_scaled"):
        net = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).bfloat16()
        model = DistributedDataParallel(net, process_group=group)
        plan = Plan(layers_of(net)) if codec == "identity" else Plan.uniform(net, codec, dtype="int4")
        with CompressionState(plan, model, within=node_group(group, local_ranks) if local_ranks > 1 else None) as state:
            model.register_comm_hook(state, compression_hook)
            model(torch.ones(2, 32, dtype=torch.bfloat16)).sum().backward()
            found.append((state.statistics.steps[-1].payload_bytes, state.report()["forecast_payload_bytes"]))
    return found
