"""Top-k against a dense numpy simulation, and its contraction property."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.codec import Codec, Context, Tensors, exchange_group
from gradlab.codecs.topk import TopK
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.wrappers.error_feedback import ErrorFeedback
from support.laws import law

SHAPES = {"a": (7, 5), "b": (11,), "c": ()}
NUMEL = 35 + 11 + 1


def exchange(codec: Codec, grads: list[Tensors], states: list[Tensors] | None = None) -> list[LockstepResult]:
    ranks = len(grads)
    states = states or [{}] * ranks
    return run_lockstep([exchange_group(codec, grads[r], states[r], Context(r, ranks, 0)) for r in range(ranks)])


def draw(rank: int, step: int) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat(tensors: Tensors) -> np.ndarray:
    return np.concatenate([tensors[name].numpy().reshape(-1) for name in SHAPES])


@pytest.mark.parametrize(("ranks", "density"), [(1, 0.1), (2, 0.001), (3, 0.5), (4, 0.1), (2, 1.0)])
def test_topk_with_feedback_is_the_dense_simulation(ranks: int, density: float) -> None:
    """Over five steps, bit for bit: mask all but the k largest of gradient + residual, average, keep the rest."""
    codec = ErrorFeedback(TopK(TopK.Settings(density)))
    k = math.ceil(density * NUMEL)
    states: list[Tensors] = [{}] * ranks
    residual = np.zeros((ranks, NUMEL), np.float32)
    for step in range(5):
        grads = [draw(rank, step) for rank in range(ranks)]
        results = exchange(codec, grads, states)
        states = [result.value.state for result in results]
        mean = np.zeros(NUMEL, np.float32)
        for rank, result in enumerate(results):
            asked = flat(grads[rank]) + residual[rank]
            sent = np.zeros_like(asked)
            largest = np.argsort(-np.abs(asked), kind="stable")[:k]
            sent[largest] = asked[largest]
            residual[rank] = asked - sent
            mean = mean + sent * np.float32(1.0 / ranks)
            np.testing.assert_array_equal(flat(result.value.compressor_input), asked)
            np.testing.assert_array_equal(flat(result.value.own), sent)
            assert result.payload_bytes == 4 * k + min(-(-k // 8) * 6, 4 * k, -(-NUMEL // 8))
        for result in results:
            np.testing.assert_array_equal(flat(result.value.mean), mean)


def single(codec: TopK, values: list[float]) -> torch.Tensor:
    (result,) = exchange(codec, [{"a": torch.tensor(values, dtype=torch.float64)}])
    return result.value.own["a"]


@law(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_ties_may_fall_either_way_but_the_k_largest_go(values: list[int], density: float) -> None:
    """With many equal magnitudes: what is sent is exact, and its energy is that of the k largest."""
    codec = TopK(TopK.Settings(density))
    own = single(codec, [float(value) for value in values]).tolist()
    k = math.ceil(density * len(values))
    assert all(sent in (0.0, value) for sent, value in zip(own, values, strict=True))
    assert sum(sent != 0 for sent in own) <= k
    largest = sorted((abs(value) for value in values), reverse=True)[:k]
    assert sorted((abs(sent) for sent in own if sent), reverse=True) == [value for value in largest if value]


@law(
    st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=30),
    st.floats(0.0, 1.0, exclude_min=True),
)
def test_topk_is_delta_approximate(values: list[float], density: float) -> None:
    """||C(x) - x||^2 <= (1 - k/n) ||x||^2 (Stich 2018, definition 2.1)."""
    codec = TopK(TopK.Settings(density))
    vector = torch.tensor(values, dtype=torch.float64)
    error = float((single(codec, values) - vector).square().sum())
    norm = float(vector.square().sum())
    k = codec.count(len(values))
    assert 1 <= k <= len(values)
    assert error <= (1 - k / len(values)) * norm + 1e-12 * norm


def test_the_selection_runs_over_the_whole_group() -> None:
    """One layer with large values may take all places: k is of the group, not of each layer."""
    grads = {"small": torch.full((9,), 0.1), "large": torch.full((3,), 5.0)}
    (result,) = exchange(TopK(TopK.Settings(0.25)), [grads])
    assert torch.equal(result.value.own["large"], grads["large"])
    assert not result.value.own["small"].any()
