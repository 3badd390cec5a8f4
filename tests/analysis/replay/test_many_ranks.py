"""Estimates from a few ranks, beside many ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.analysis.forecast.speed import Judged
from gradlab.analysis.replay.many_ranks import RankSums, cosine_at, joined_products
from gradlab.analysis.replay.run import replay_plans
from gradlab.plan import Plan, Wrap
from support.laws import law
from support.recorded import LAYERS, random_gradients, record

GATHERED = [Wrap("error_feedback")]
SHARDS = [Wrap("error_feedback"), Wrap("two_way")]


def sums_of(sent: np.ndarray, true: np.ndarray, applied: np.ndarray, length: int) -> RankSums:
    """Sums over windows of steps (T, R, n), (T, R, n) and (T, n)."""
    sums = RankSums({}, length)
    for step in range(len(sent)):
        each = [{"w": torch.from_numpy(rank)} for rank in (*sent[step], *true[step], applied[step])]
        sums.add(step, each)
    return sums


@law(st.integers(3, 6), st.integers(1, 3), st.integers(0, 1000))
def test_between_the_recorded_ranks_the_estimate_is_what_they_applied(ranks: int, length: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    sent, true = (1.0 + draw.standard_normal((2 * length, ranks, 9)) for _ in range(2))
    windows = sums_of(sent, true, sent.mean(1), length).windows
    summed = [(sent[a : a + length].sum(0).mean(0), true[a : a + length].sum(0).mean(0)) for a in (0, length)]
    cosines = [float(a @ g) / float(np.linalg.norm(a) * np.linalg.norm(g)) for a, g in summed]
    found = cosine_at(windows, ranks)
    assert found is not None
    assert found.cosine == pytest.approx(np.median(cosines))
    assert found.low <= found.cosine <= found.high


def test_four_ranks_tell_of_sixty_four() -> None:
    """Ranks are drawn alike. Rounding by servers lowers the estimate."""
    draw = np.random.default_rng(0)
    true = 0.3 * draw.standard_normal(2000) + draw.standard_normal((8, 64, 2000))
    sent = true * (np.abs(true) > 1.5)
    means = [(sent[step].mean(0), true[step].mean(0)) for step in range(8)]
    wanted = np.median([a @ g / np.linalg.norm(a) / np.linalg.norm(g) for a, g in means])
    few, rounded = ((sent[:, :4], true[:, :4], sent[:, :4].mean(1) + lost) for lost in (0.0, 0.3))
    found, lower = (cosine_at(sums_of(*of, 1).windows, 64) for of in (few, rounded))
    assert found is not None
    assert lower is not None
    assert found.cosine == pytest.approx(wanted, abs=0.03)
    assert found.low < wanted < found.high
    assert lower.cosine < found.cosine


def test_windows_that_are_not_finite_or_of_two_ranks_tell_nothing() -> None:
    ones = np.ones((2, 2, 3))
    assert cosine_at(sums_of(ones, ones, ones[:, 0], 1).windows, 8) is None
    sums = RankSums({}, 2)
    sums.add(0, [{"w": torch.ones(2)}] * 7)
    sums.add(1, None)
    assert cosine_at(sums.windows, 8) is None
    assert [one.finite for one in joined_products([sums.windows, sums.windows])] == [False]


@pytest.mark.parametrize(("wrappers", "exact"), [(GATHERED, True), (SHARDS, False)])
def test_a_replay_for_more_nodes_says_what_its_ranks_say(tmp_path, wrappers: list[Wrap], exact: bool) -> None:
    """Plans that gather apply the mean of what recorded ranks sent."""
    plan = Plan.uniform(LAYERS, "topk", minimum_numel=1, density=0.1, wrappers=wrappers)
    gradients = random_gradients(0, 16, 4)
    for step in gradients[4:9]:  # a layer without a gradient is held, with its residual
        for rank in step:
            rank[LAYERS[0].name][:] = 0.0
    with record(tmp_path / "t", gradients, metadata={"find_unused_parameters": True}) as trace:
        few, many = (replay_plans(trace, {"": plan}, nodes=nodes)[""] for nodes in (4, 32))
    assert few.at_nodes is None
    assert many.at_nodes is not None
    assert (many.at_nodes.nodes, many.summary().at_nodes) == (32, many.at_nodes)
    assert f"; between 32 nodes {many.at_nodes})" in Judged.of(many).text
    assert many.at_nodes.at_most == (not exact)
    rounded = [window.rounded for window in many.products]
    assert len(rounded) == 4
    assert (max(rounded) < 1e-9) == exact
