"""What a trace says of blockwise signs: the paper's figures from planted gradients, and scales where they keep most."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.analysis.figures.drawn import draw
from gradlab.analysis.figures.style import drawing, render
from gradlab.analysis.measure.sign_blocks import (
    bits_per_iteration,
    candidate_sizes,
    delta,
    equal_blocks,
    kept_energy,
    measure_sign_blocks,
    share_out_blocks,
    variation,
)
from gradlab.analysis.questions.signs import sign_drawings
from gradlab.codec.abilities import decompress
from gradlab.codecs.sign import Sign
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.trace import Trace
from support.laws import law
from support.recorded import random_gradients, record

seeds = st.integers(0, 1000)


@law(st.integers(1, 300), st.integers(1, 60), seeds)
def test_energy_kept_is_what_the_codec_keeps(numel: int, size: int, seed: int) -> None:
    """||v||^2 - ||C(v) - v||^2, by the codec's own code."""
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codec = Sign(Sign.Settings(size))
    sent = decompress(codec, codec.compress(vector, torch.Generator()), vector)
    kept = float(vector.square().sum() - (sent - vector).square().sum())
    assert kept_energy(vector.numpy(), size) == pytest.approx(kept, rel=1e-4, abs=1e-6)


@law(st.integers(1, 300), seeds)
def test_delta_follows_from_the_coefficient_of_variation(numel: int, seed: int) -> None:
    vector = np.random.default_rng(seed).standard_normal(numel)
    assert delta(vector) == pytest.approx(1 / (1 + variation(vector) ** 2))
    assert 1 / numel - 1e-12 <= delta(vector) <= 1 + 1e-12


def test_planted_magnitudes() -> None:
    large = np.random.default_rng(0).standard_normal(10**6)
    assert variation(large) == pytest.approx(math.sqrt(math.pi / 2 - 1), rel=0.01)
    assert variation(np.array([2.0, -2.0, 2.0])) == 0
    assert delta(np.array([0.0, 0.0, 5.0])) == pytest.approx(1 / 3)
    assert np.isnan([variation(np.zeros(3)), delta(np.zeros(3)), delta(np.zeros(0)), variation(np.zeros(0))]).all()


def test_table_1() -> None:
    assert bits_per_iteration(1000, 7, 4) == {
        "full-precision SGD": 64 * 4 * 1000,
        "signSGD with majority vote": 2 * 4 * 1000,
        "dist-EF-blockSGD": 2 * 4 * 1000 + 64 * 4 * 7,
    }


@law(st.lists(st.integers(1, 200), min_size=1, max_size=3), st.integers(0, 30), seeds, examples=60)
def test_scales_go_where_they_keep_most(numels: list[int], extra: int, seed: int) -> None:
    """Within the budget, no worse than one scale per tensor, no better than the best of all choices."""
    generator = np.random.default_rng(seed)
    tensors = [generator.standard_normal(n) * np.exp(generator.standard_normal(n)) for n in numels]
    sizes = [candidate_sizes(n) for n in numels]
    kept = [[kept_energy(t, size) for size in c] for t, c in zip(tensors, sizes, strict=True)]
    scales = len(numels) + extra

    def count(chosen: list[int] | tuple[int, ...]) -> int:
        return sum(-(-n // c[place]) for n, c, place in zip(numels, sizes, chosen, strict=True))

    def value(chosen: list[int] | tuple[int, ...]) -> float:
        return sum(k[place] for k, place in zip(kept, chosen, strict=True))

    chosen, equal = share_out_blocks(numels, kept, scales), equal_blocks(numels, scales)
    assert count(chosen) <= scales
    assert count(equal) <= scales
    choices = [c for c in itertools.product(*(range(len(s)) for s in sizes)) if count(c) <= scales]
    best = max(value(c) for c in choices)
    one_each = value([0] * len(numels))
    assert one_each <= value(chosen) <= best + 1e-9


def test_fewer_scales_than_tensors_are_refused() -> None:
    with pytest.raises(GradlabError, match="2 scales for 3 tensors"):
        share_out_blocks([4, 4, 4, 0], [[1.0]] * 4, 2)
    assert share_out_blocks([4, 0], [[1.0]] * 2, 1) == [0, 0]


MIXED, EVEN = Layer("mixed", (2, 64)), Layer("even", (128,))


def planted(steps: int, ranks: int) -> list[list[dict[str, np.ndarray]]]:
    """One tensor whose halves differ a hundredfold, and one that is Gaussian throughout, as small as the small half."""
    gradients = random_gradients(0, steps, ranks, (MIXED, EVEN))
    for step in gradients:
        for rank in step:
            rank["mixed"][1] *= 100
    return gradients


def test_a_trace_gives_figure_1_and_blocks(tmp_path: Path) -> None:
    gradients = planted(12, 2)
    with record(tmp_path / "trace", gradients, (MIXED, EVEN), loss_scale=8.0) as trace:
        measured = measure_sign_blocks(trace, window=4)
    drawn = measured.figure_1
    assert drawn.iterations == [0, 4, 8]
    for window in range(3):
        seen = [rank for step in gradients[4 * window : 4 * window + 4] for rank in step]
        tensors = [[rank[name].reshape(-1) for name in ("mixed", "even")] for rank in seen]
        assert drawn.variation[window] == pytest.approx(np.mean([[variation(t) for t in pair] for pair in tensors]))
        assert drawn.delta_by_tensor[window] == pytest.approx(min(delta(t) for pair in tensors for t in pair))
        assert drawn.delta_of_model[window] == pytest.approx(min(delta(np.concatenate(pair)) for pair in tensors))
    assert (drawn.bound_by_tensor, drawn.bound_of_model) == (1 / 128, 1 / 256)
    assert measured.bits_per_iteration == bits_per_iteration(256, 2, 2)
    rows = measured.suggestion.rows
    assert rows[0].block_sizes == {"mixed": 128, "even": 128}
    # The first scale goes where the gain is; all the energy is in the larger half.
    assert rows[1].block_sizes == {"mixed": 64, "even": 64}
    assert rows[0].kept == pytest.approx(1 / math.pi, rel=0.1)  # (2 / pi) of half of it
    assert rows[1].kept == pytest.approx(2 / math.pi, rel=0.1)
    assert rows[1].kept > rows[1].kept_by_equal_blocks - 1e-9
    with Trace(tmp_path / "trace") as trace:
        assert measure_sign_blocks(trace).window == 1
    with drawing():
        for item in sign_drawings(measured.to_json()):
            assert b"<svg" in render(draw(item.chart), "figure")["svg"]


def test_what_is_zero_or_not_finite_is_left_out(tmp_path: Path) -> None:
    gradients = planted(3, 2)
    gradients[0][1]["even"][3] = np.nan
    gradients[2][0] = {name: np.zeros_like(value) for name, value in gradients[2][0].items()}
    gradients[1][0]["even"][:] = 0
    with record(tmp_path / "some", gradients, (MIXED, EVEN)) as trace:
        measured = measure_sign_blocks(trace, window=1)
    assert np.isfinite(measured.figure_1.variation).all()
    assert measured.figure_1.variation[0] == pytest.approx(
        np.mean([variation(gradients[0][0][name]) for name in ("mixed", "even")])
    )
    nothing = [[{name: np.zeros_like(value) for name, value in rank.items()} for rank in step] for step in gradients]
    with record(tmp_path / "none", nothing, (MIXED, EVEN)) as trace, pytest.raises(GradlabError, match="no gradient"):
        measure_sign_blocks(trace)
