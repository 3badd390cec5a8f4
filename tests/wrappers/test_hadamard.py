"""The Hadamard rotation: orthonormal, its own inverse, as scipy's matrix has it, and better for what has outliers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy.linalg import hadamard

from gradlab import codecs, wrappers
from gradlab.codec import Context, exchange_group
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.wrappers.hadamard import draw_signs, rotate, rotate_back, transform
from support.laws import law


def signs_of(block: int) -> torch.Tensor:
    return draw_signs(block, torch.Generator().manual_seed(3)).double()


def matrix_of(numel: int, block: int) -> np.ndarray:
    """The rotation of a vector as a matrix, block by block."""
    rows, start, signs = np.zeros((numel, numel)), 0, signs_of(block).numpy()
    while start < numel:
        left = numel - start
        size = block if left >= block else 2 ** int(np.log2(left))
        rows[start : start + size, start : start + size] = hadamard(size) / np.sqrt(size) * signs[:size]
        start += size
    return rows


@law(st.integers(1, 300), st.sampled_from([2, 16, 64]), st.integers(0, 99), examples=40)
def test_it_is_the_matrix_and_its_transpose_undoes_it(numel: int, block: int, seed: int) -> None:
    values, signs = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).double(), signs_of(block)
    rotated = rotate(values, signs)
    np.testing.assert_allclose(rotated.numpy(), matrix_of(numel, block) @ values.numpy(), atol=1e-12)
    np.testing.assert_allclose(rotate_back(rotated, signs).numpy(), values.numpy(), atol=1e-12)
    assert float(rotated.norm()) == pytest.approx(float(values.norm()))


def test_any_shape_and_none_of_the_input_changes() -> None:
    values, signs = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0)), signs_of(16).float()
    before = values.clone()
    assert rotate(values, signs).shape == values.shape
    assert rotate(values.mT, signs).shape == values.mT.shape
    assert rotate(torch.empty(0, 4), signs).shape == (0, 4)
    assert torch.equal(values, before)
    torch.testing.assert_close(transform(torch.eye(2)) * 2**0.5, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))


def around(codec: str, settings: dict[str, Any], feedback: bool = False) -> Any:
    made = wrappers.get("hadamard")(codecs.make(codec, **settings))
    return wrappers.get("error_feedback")(made) if feedback else made


@pytest.mark.parametrize(("codec", "settings"), [("block_scaled", {"dtype": "int4"}), ("qsgd", {"bits": 4})])
def test_it_lowers_the_error_of_gradients_with_outliers(codec: str, settings: dict[str, Any]) -> None:
    """Student's t of 2 degrees of freedom: a few values are hundreds of times the others."""
    values = torch.from_numpy(np.random.default_rng(0).standard_t(2, (64, 500))).float()
    plain, rotated = (
        one.apply(values).relative_error for one in (codecs.make(codec, **settings), around(codec, settings))
    )
    assert rotated < 0.75 * plain


def test_decoded_and_residual_are_the_gradient() -> None:
    codec = around("block_scaled", {"dtype": "int4"}, feedback=True)
    generator = torch.Generator().manual_seed(1)
    ranks = [{"a": torch.randn(33, 20, generator=generator)} for _ in range(2)]
    contexts = [Context(rank=rank, world_size=2, group="g", iteration=0) for rank in range(2)]
    coroutines = [exchange_group(codec, grads, {}, context) for grads, context in zip(ranks, contexts, strict=True)]
    results = [rank.value for rank in run_lockstep(coroutines)]
    for grads, result in zip(ranks, results, strict=True):
        torch.testing.assert_close(result.own["a"] + result.state["a/residual"], grads["a"], rtol=0, atol=1e-5)
        assert torch.equal(result.mean["a"], results[0].mean["a"])


@pytest.mark.parametrize("codec", ["topk", "powersgd", "cast", "dct_topk", "random_k", "gradiveq"])
def test_other_codecs_are_refused_by_name(codec: str) -> None:
    with pytest.raises(GradlabError, match=f"hadamard around {codec}"):
        around(codec, {})


def test_a_wrapper_inside_and_an_odd_block_are_refused() -> None:
    inner = wrappers.get("error_feedback")(codecs.make("qsgd"))
    with pytest.raises(GradlabError, match="error_feedback inside hadamard"):
        wrappers.get("hadamard")(inner)
    kind = wrappers.get("hadamard")
    with pytest.raises(GradlabError, match="block = 100, expected a power of two"):
        kind(codecs.make("qsgd"), kind.Settings(block=100))
