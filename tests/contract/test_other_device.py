"""Codecs on tensors of a device that is not the CPU: the same step, with no more waits for the device than they say.

The device is that of `benchmarks/speed/device_calls.py`. It computes on the CPU, so that the way that codecs take on
a GPU runs without one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

from gradlab.executor import PlanRun, RunSettings
from gradlab.layout import Layer
from gradlab.plan import Plan, state_bytes
from gradlab.plan.state_bytes import with_buffers
from support.benchmark_modules import benchmark_modules
from support.laws import thorough

RANKS = 3
LAYERS = [
    Layer("large", (96, 200), "linear"),
    Layer("convolution", (32, 24, 3, 3), "convolution"),
    *(Layer(f"small {n}", (16, 8 + n), "linear") for n in range(4)),
    Layer("bias", (40,), "bias"),
]
EVERY_STEP = {"tolist": 1, "_local_scalar_dense": 1}  # whether gradients were finite, and whether means are
# What draws its random numbers on the device, and another way there, has other rounding, not another mean.
DRAWS = {"qsgd", "natural", "nuqsgd", "terngrad", "intsgd"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("cast", {"dtype": "float16"}),
    ("natural", {}),
    ("block_scaled", {"dtype": "int8"}),
    ("qsgd", {"bits": 4}),
    ("terngrad", {}),
    ("sign", {}),
    ("one_bit", {}),
    ("chunk_topk", {"count": 200}),
    ("nuqsgd", {"bits": 4}),
    ("intsgd", {}),
    ("topk", {"density": 0.01}),
    ("random_k", {"density": 0.01}),
    ("clt_k", {"density": 0.01}),
    ("dct_topk", {"chunk": 64, "count": 8}),
    ("powersgd", {"rank": 2}),
    ("gradiveq", {"ratio": 4.0, "slice_size": 16, "sample_steps": 2, "sample_bits": 0, "warmup_steps": 0}),
]
# Other settings of some, before a release.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("block_scaled", {"dtype": "int4"}),
    ("block_scaled", {"dtype": "float8_e4m3fn"}),
    ("block_scaled", {"dtype": "nvfp4"}),
    ("qsgd", {"bits": 8, "norm": "l2"}),
    ("sign", {"group_bytes": 0}),
    ("sign", {"block_size": 64}),
    ("sign", {"scale": "one"}),
    ("gradiveq", {"ratio": 8.0, "complement": 1.0, "warmup_steps": 0}),
]


@pytest.fixture(scope="module")
def calls() -> Iterator[ModuleType]:
    with benchmark_modules("device_calls") as modules, pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton"):  # the interpreter takes as long for few elements
            for name in ("blocks.TILE", "codes.TILE", "selection._TILE"):
                patch.setattr(f"gradlab.kernels.{name}", 2**14)
        yield modules["device_calls"]


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return {layer.name: torch.randn(layer.shape, generator=draw) for layer in LAYERS}


def steps(
    calls: ModuleType, plan: Plan, count: int, far: bool
) -> tuple[list[dict[str, torch.Tensor]], Mapping[str, int]]:
    """Rank 0's means, step by step; and the waits of the last step."""
    means = []
    with calls.far_device(triton=False) as device:  # tests/kernels hold what kernels compute
        settings = RunSettings(device=calls.FAR if far else calls.CPU)
        runs = [PlanRun(plan, rank, 2, settings) for rank in range(2)]
        for step in range(count):
            device.waits.clear()
            given = [gradients(rank, step) for rank in range(2)]
            if far:
                given = [{name: calls.FarTensor(value) for name, value in mine.items()} for mine in given]
            [mean, *others] = calls.step(runs, given, device)
            assert all(
                torch.equal(calls.near(other[name]), calls.near(mean[name])) for other in others for name in mean
            )
            means.append({name: calls.near(value).clone() for name, value in mean.items()})
    return means, {name: count for name, count in device.waits.items() if count}


@pytest.mark.parametrize(("codec", "settings"), [*CASES, *(thorough(*case) for case in MORE)], ids=str)
def test_a_step_is_the_same_and_waits_for_nothing(calls: ModuleType, codec: str, settings: dict[str, Any]) -> None:
    plan = Plan.uniform(LAYERS, codec, **settings)
    there, waits = steps(calls, plan, 3, far=True)
    assert waits == EVERY_STEP
    here, _ = steps(calls, plan, 3, far=False)
    for mean, expected in zip(there, here, strict=True):
        assert mean.keys() == expected.keys()
        for name in mean:
            if codec in DRAWS:  # an error of a rounding's size, as far as one may be from another
                assert (mean[name] - expected[name]).norm() < 2 * expected[name].norm()
            else:
                torch.testing.assert_close(mean[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["topk", "sign"])
def test_residuals_on_the_host_change_nothing(calls: ModuleType, codec: str) -> None:
    """Sign has a server's, too."""
    means, states = {}, {}
    for buffer in ("float32", "host"):
        plan = with_buffers(Plan.uniform(LAYERS, codec), buffer)
        with calls.far_device(triton=False) as device:
            runs = [PlanRun(plan, rank, RANKS, RunSettings(device=calls.FAR)) for rank in range(RANKS)]
            for step in range(3):
                given = [{name: calls.FarTensor(one) for name, one in gradients(r, step).items()} for r in range(RANKS)]
                [mean, *_] = calls.step(runs, given, device)
            means[buffer] = {name: calls.near(one).clone() for name, one in mean.items()}
            states[buffer] = [(key, one) for state in runs[0].states.values() for key, one in state.items()]
    for (key, usual), (_, one) in zip(states["float32"], states["host"], strict=True):
        assert isinstance(usual, calls.FarTensor)
        assert isinstance(one, calls.FarTensor) != key.endswith("residual")
        assert torch.equal(calls.near(usual), calls.near(one) if isinstance(one, calls.FarTensor) else one)
    assert any(key.endswith("/server_residual") for key, _ in states["host"]) == (codec == "sign")
    assert all(torch.equal(means["host"][name], mean) for name, mean in means["float32"].items())
    hosted = state_bytes(with_buffers(Plan.uniform(LAYERS, codec), "host"), RANKS)
    usual = state_bytes(Plan.uniform(LAYERS, codec), RANKS)
    assert hosted == {f"{what} on the host" if "residual" in what else what: n for what, n in usual.items()}


@pytest.mark.parametrize("codec", ["sign", "powersgd"])
@pytest.mark.parametrize("held", [False, True])
def test_what_is_not_finite_is_named(calls: ModuleType, codec: str, held: bool) -> None:
    """The largest magnitudes say it, and which layers have no gradient, once the step is over."""
    plan = Plan.uniform(LAYERS, codec)
    for bad in ({}, {1: ["small 3", "small 1"]}, {0: ["convolution"], 2: ["small 0"]}):
        with calls.far_device(triton=False):
            runs = [PlanRun(plan, r, RANKS, RunSettings(device=calls.FAR, hold_unused=held)) for r in range(RANKS)]
            given = [gradients(rank, 0) for rank in range(RANKS)]
            for mine in given:
                mine["large"].zero_()
            for rank, names in bad.items():
                for name in names:
                    given[rank][name].view(-1)[3] = torch.nan if rank else torch.inf
            one = [run.begin() for run in runs]
            for step, mine in zip(one, given, strict=True):
                step.add({name: calls.FarTensor(value) for name, value in mine.items()})
            calls.run_lockstep([step.agree(calls.FAR) for step in one])
            for rank, step in enumerate(one):
                assert step.finite == (not bad)
                assert sorted(step.non_finite) == sorted(bad.get(rank, []))
                assert step.held == (frozenset({"large"}) if held else frozenset())
