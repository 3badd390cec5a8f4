"""Exchanges recorded as graphs: replayed, they give what they give without, and what cannot be recorded is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from gradlab import codecs
from gradlab.coding.random_bits import RandomBits
from gradlab.collectives import run_lockstep
from gradlab.executor import PlanRun, RunSettings
from gradlab.plan import Plan
from support.benchmark_modules import benchmark_modules
from support.contract import cases, plan_for
from support.prescribed import SHAPES, gradients, layers

RANKS, STEPS = 2, 7
FEW = {name: SHAPES[name] for name in ("conv", "wide")}
RANDOM, ON_HOST = "random numbers", "a part of its state is in the host's memory"
# What a case of the contract suite does on a device that no graph can repeat. All others are recorded.
NOT_RECORDED = {
    "clt_k": "it reads the iteration",
    "clt_k, int8": RANDOM,
    "ecsq": ON_HOST,
    "identity, ring": "it works while a ring's messages travel",
    "intsgd, running": ON_HOST,
    "lgc_ring": ON_HOST,
    "lgc_ring, by value": ON_HOST,
    "lgc_server": ON_HOST,
    "lgc_server, shared": ON_HOST,
    "qsgd, ring": "it works while a ring's messages travel",
    "random_k": RANDOM,
    "sampled_threshold": RANDOM,
    "threshold": ON_HOST,
    "topk, smallest coding": "it copies between the host and the device",
}
CHANGES_PHASE = ("gradiveq",)  # before there are three steps of one kind
OTHERS_OF_IT = ("gradiveq, coordinates", "gradiveq, ring")


@pytest.fixture(scope="module")
def calls() -> Iterator[ModuleType]:
    with benchmark_modules("device_calls") as modules:
        yield modules["device_calls"]


class Operations(TorchDispatchMode):
    """A graph of the CPU: operations with the tensors that they read and wrote, in whose memory they run again."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Any] = []
        self._ran = False

    @contextmanager
    def recording(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        with self:
            yield

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        self._operations.append((operation, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run them, but the first time, as they ran while they were recorded."""
        again = self._operations if self._ran else []
        self._ran = True
        for operation, args, kwargs, result in again:
            into, values = tree_flatten(result)[0], tree_flatten(operation(*args, **kwargs))[0]
            for one, value in zip(into, values, strict=True):
                if isinstance(one, torch.Tensor) and one.data_ptr() != value.data_ptr():
                    one.copy_(value)


def runs_of(plan: Plan, recorded: bool, device: torch.device) -> list[PlanRun]:
    settings = RunSettings(device=device, graphs=Operations if recorded else None)
    return [PlanRun(plan, rank, RANKS, settings) for rank in range(RANKS)]


def take_step(
    calls: ModuleType | None, runs: list[PlanRun], number: int, *, finite: bool = True, scale: float = 1.0
) -> list[Any]:
    """One step of all ranks, on the far device of `calls` or on the CPU; every rank's means and committed states."""
    steps, shapes = [], {layer.name: layer.shape for layer in runs[0].plan.layers}
    for run in runs:
        steps.append(run.begin(loss_scale=scale))
        mine = {name: one * scale for name, one in gradients(shapes, run.rank, number).items()}
        if not finite:
            next(iter(mine.values())).view(-1)[0] = torch.inf
        steps[-1].add({name: one if calls is None else calls.FarTensor(one) for name, one in mine.items()})
    means: list[dict[str, torch.Tensor]] = [{} for _ in runs]
    for group in runs[0].groups:
        results = run_lockstep([step.exchange(group, reuse=True) for step in steps])
        for mean, result in zip(means, results, strict=True):
            mean |= {name: one.clone() for name, one in result.value.mean.items()}
    run_lockstep([step.agree("cpu" if calls is None else calls.FAR) for step in steps])
    for run, step, mean in zip(runs, steps, means, strict=True):
        run.end(step, mean.values())
    return [means, [{name: dict(state) for name, state in run.states.items()} for run in runs]]


def same(calls: ModuleType, one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        one, other = calls.near(one), calls.near(other)
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    pairs = one.items() if isinstance(one, dict) else enumerate(one)
    return len(one) == len(other) and all(same(calls, value, other[key]) for key, value in pairs)


RECORDED = ("topk", "qsgd", "gradiveq")
FOR_A_REASON = ("clt_k", "random_k", "threshold", "qsgd, ring", "topk, smallest coding")


def of_suite(case: str) -> object:
    return pytest.param(case, marks=() if case in (*RECORDED, *FOR_A_REASON) else pytest.mark.thorough)


@pytest.mark.parametrize("case", [of_suite(case) for case in cases() if case not in OTHERS_OF_IT])
def test_a_recorded_run_is_the_run(calls: ModuleType, case: str) -> None:
    """Bit for bit, with a step in between that is not committed."""
    plan, were = plan_for(case, "model", feedback=True, shapes=FEW), set()
    with calls.far_device(triton=False):  # whose launches these graphs do not see
        plain, recorded = runs_of(plan, False, calls.FAR), runs_of(plan, True, calls.FAR)
        for number in range(4 if case in NOT_RECORDED else STEPS):
            ours, theirs = (take_step(calls, runs, number, finite=number != 5) for runs in (recorded, plain))
            assert same(calls, ours, theirs), number
            were |= {one.recorded for run in recorded for one in run.graphs.values()}
    whys = {one.why for run in recorded for one in run.graphs.values()}
    if case in NOT_RECORDED:
        assert were == {False}
        assert all(NOT_RECORDED[case] in why for why in whys), whys
    else:
        assert whys == {""}
        assert were == ({False} if case in CHANGES_PHASE else {False, True})


@pytest.mark.parametrize("more", [1, -1])
def test_random_numbers_drawn_in_another_way_are_not_recorded(
    calls: ModuleType, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """A codec whose fourth exchange, which would be recorded, draws from one stream more, or less, than under watch."""
    codec, drawn = type(codecs.make("qsgd", bits=4)), codecs.get("qsgd").compress
    exchanges: Counter[int] = Counter()  # by codec, of which each rank has one

    def compress(self: Any, vector: Any, generator: Any) -> Any:
        exchanges[id(self)] += 1
        for _ in range(2 + more if exchanges[id(self)] == 4 else 2):
            RandomBits(generator, vector.device)
        return drawn(self, vector, generator)

    plan = Plan.uniform([one for one in layers() if one.name == "wide"], "qsgd", bits=4)
    monkeypatch.setattr(codec, "compress", compress)
    with calls.far_device(triton=False):  # whose launches these graphs do not see
        runs = runs_of(plan, True, calls.FAR)
        for number in range(5):
            take_step(calls, runs, number)
    assert {one.why for run in runs for one in run.graphs.values()} == {
        "its random numbers are drawn in another way from step to step"
    }


class Counts(Operations):
    """Counts how often it ran again."""

    replays = 0

    def replay(self) -> None:
        Counts.replays += 1
        super().replay()


def test_graphs_are_made_once_and_anew_for_another_loss_scale() -> None:
    settings = RunSettings(graphs=Counts)
    plan = Plan.uniform(layers(), "powersgd", rank=1)
    runs = [PlanRun(plan, rank, RANKS, settings) for rank in range(RANKS)]
    stretches, seen = 3, []  # before the first request, after it, and after the second
    for number in range(10):
        Counts.replays = 0
        take_step(None, runs, number, scale=2.0 if number > 5 else 1.0)
        seen.append(Counts.replays)
    each = stretches * RANKS * len(runs[0].groups)
    # In the first step there is no state yet.
    assert seen == [0, 0, 0, 0, each, each, 0, 0, 0, each]


def test_learning_rates_that_residuals_follow_are_not_recorded() -> None:
    plan = Plan.uniform(layers(), "powersgd", rank=1)
    runs = [PlanRun(plan, rank, RANKS, RunSettings(graphs=Operations, plain_sgd=True)) for rank in range(RANKS)]
    for number in range(4):
        take_step(None, runs, number)
    assert {one.why for one in runs[0].graphs.values()} == {"it reads learning rates"}
