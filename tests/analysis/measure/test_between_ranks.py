"""What ranks share, over traces with planted answers: common signal, common scales only, nothing; noise; limits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy.optimize import brentq

from gradlab.analysis.figures.drawn import draw
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.measure.between_ranks import (
    CORRECTED,
    FIRST,
    LAST,
    BetweenRanks,
    LayerBetweenRanks,
    measure_between_ranks,
    rank_pairs,
    sampled_columns,
)
from gradlab.analysis.measure.information import PAPER_BINS, gaussian_information
from gradlab.analysis.measure.limits import (
    RELATIVE_ERRORS,
    floor_at,
    floor_slice_size,
    gaussian_floor,
    held_out_energies,
    limit_candidates,
    measure_limits,
    place_plans,
    rate_of_mean,
)
from gradlab.analysis.measure.noise_scale import (
    expected_cosine,
    group_cosine,
    measure_noise_scale,
    noise_scale,
    redundancy,
)
from gradlab.analysis.measure.spectrum import measure_spectrum
from gradlab.analysis.questions.between import between_ranks_section, over_iterations
from gradlab.analysis.replay import replay
from gradlab.errors import GradlabError
from gradlab.jsonable import plain
from gradlab.layout import Layer, flatten
from gradlab.plan import Plan
from gradlab.plan.layer_errors import Candidate
from support.laws import law
from support.recorded import random_gradients, record, record_layer

LAYER = Layer("conv.weight", (32, 16, 3, 3), "convolution")
QUICK = BetweenRanks(iterations=6, pairs=2, values=2048)
WITH_INTERVALS = replace(QUICK, iterations=30, pairs=1)


def planted(signal: float, *, nodes: int = 3, steps: int = 24, scales: bool = False, seed: int = 0) -> np.ndarray:
    """(T, N, n): sqrt(signal) s_t + sqrt(1 - signal) e_{t,n}, of unit variance; times a scale per parameter."""
    generator = np.random.default_rng(seed)
    common = generator.standard_normal((steps, 1, LAYER.numel))
    own = generator.standard_normal((steps, nodes, LAYER.numel))
    values = math.sqrt(signal) * common + math.sqrt(1 - signal) * own
    if scales:
        values *= np.exp(1.0 * generator.standard_normal(LAYER.numel))
    return values.astype(np.float32)


def measured(tmp_path: Path, values: np.ndarray, settings: BetweenRanks = QUICK) -> LayerBetweenRanks:
    with record_layer(tmp_path / "t", values, LAYER) as trace:
        return measure_between_ranks(trace, settings).layers[0]


def test_common_signal_is_found_by_all_and_exceeds_the_shifted_null(tmp_path: Path) -> None:
    result = measured(tmp_path, planted(0.6, steps=40), WITH_INTERVALS)
    true = float(gaussian_information(0.6))
    for method in CORRECTED:
        excess = result.estimators[method].excess
        assert excess.bits == pytest.approx(true, abs=0.05)
        assert excess.low > 0
        assert abs(result.estimators[method].shuffled) < 0.05
    assert result.mean_cosine.mean == pytest.approx(0.6, abs=0.02)
    assert result.mean_cosine.low < 0.6 < result.mean_cosine.high + 0.01
    assert result.signal_to_noise == pytest.approx(0.6 / 0.4, rel=0.05)


def test_common_scales_alone_are_no_excess(tmp_path: Path) -> None:
    """Estimators see dependence that ranks have by having the same parameters; the shifted null has it too."""
    result = measured(tmp_path, planted(0.0, steps=40, scales=True), WITH_INTERVALS)
    estimate = result.estimators["mixed"]
    assert np.mean(estimate.paired) > 0.1
    assert estimate.excess.bits == pytest.approx(0.0, abs=0.03)
    assert estimate.excess.low <= 0.0 <= estimate.excess.high
    assert abs(result.mean_cosine.mean) < 0.05


def test_a_drift_and_a_missing_interval_are_said_in_the_report(tmp_path: Path) -> None:
    """Ranks agree more and more: the mean over iterations has no interval, and the section names both."""
    share = np.linspace(0.1, 0.9, 40)[:, None, None]
    generator = np.random.default_rng(0)
    common, own = generator.standard_normal((40, 1, LAYER.numel)), generator.standard_normal((40, 2, LAYER.numel))
    values = (np.sqrt(share) * common + np.sqrt(1 - share) * own).astype(np.float32)
    with record_layer(tmp_path / "t", values, LAYER) as trace:
        result = measure_between_ranks(trace, WITH_INTERVALS)
    cosine = result.layers[0].mean_cosine
    assert (cosine.low, cosine.high) == (None, None)
    assert cosine.drift == pytest.approx((0.1, 0.7), abs=0.05)  # the last ten are the shifted null's
    section = between_ranks_section({"between_nodes": plain(result)})
    assert section is not None
    assert "Layers without an interval: 1, such as conv.weight: neighbours' autocorrelation is" in section.answer
    assert "It drifts over the iterations in 1 of 1 layers (conv.weight first)" in section.answer
    rows = {row[1]: row[2] for row in section.tables[1].rows}
    assert set(rows) == {"excess: copula", "excess: nearest neighbours", "cosine"}
    assert rows["cosine"].startswith(f"no interval: {cosine.refused}; drifts from 0.1")
    assert section.tables[0].rows[0][5].endswith(" [no interval]")
    draw(section.drawings[0].chart)


def test_the_papers_histogram_cannot_tell_them_apart(tmp_path: Path) -> None:
    """LGC's 2^32 levels: most of the entropy is common, shuffled pairs or not, signal or not."""
    for signal, name in ((0.6, "a"), (0.0, "b")):
        histogram = measured(tmp_path / name, planted(signal)).histograms[PAPER_BINS]
        parts = (histogram.information, histogram.shuffled, histogram.shifted)
        shares = [np.mean(part) / np.mean(histogram.entropy) for part in parts]
        assert min(shares) > 0.99


def test_layers_have_places_and_json_is_plain(tmp_path: Path) -> None:
    layers = [LAYER, Layer("head.weight", (20, 30), "linear"), Layer("head.bias", (20,), "bias")]
    with record(tmp_path / "t", random_gradients(0, 12, 2, layers), layers) as trace:
        alone = measure_between_ranks(trace, QUICK).to_json()
    json.dumps(alone, allow_nan=False)
    assert alone["skipped_layers"] == ["head.bias"]
    assert [row["place"] for row in alone["layers"]] == [[FIRST], [LAST]]


def test_nodes_beside_each_other_are_drawn_as_measured(tmp_path: Path) -> None:
    """A column for each number of nodes: the histogram's entropy and information, the copula's pair and null."""
    between = {}
    for nodes in (2, 4):
        with record_layer(tmp_path / f"{nodes}", planted(0.6, nodes=nodes), LAYER) as trace:
            between[f"{nodes} nodes"] = measure_between_ranks(trace, QUICK).to_json()
    with drawing():
        figure = draw(over_iterations(between, "what it was drawn with"))
    above, below = figure.axes[:2], figure.axes[2:]
    assert [axis.get_title("left") for axis in above] == list(between)
    for column, (high, low) in enumerate(zip(above, below, strict=True)):
        [layer] = between[f"{2 + 2 * column} nodes"]["layers"]
        histogram, copula = layer["histograms"][str(PAPER_BINS)], layer["estimators"]["copula"]
        drawn = [line.get_ydata() for line in (*high.get_lines(), *low.get_lines()[:2])]
        wanted = [histogram["information"], histogram["entropy"], copula["paired"], copula["shifted"]]
        assert [list(line) for line in drawn] == [list(line) for line in wanted]
    assert figure.get_supxlabel() == "what it was drawn with"


def test_iterations_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    values = planted(0.3)
    values[0, 1, 7] = np.nan
    result = measured(tmp_path, values)
    assert 0 not in result.iterations
    assert len(result.iterations) == 5


def test_nearest_neighbours_look_at_as_many_values_as_their_interval_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share that changes makes an interval wide with any number of values; noise does not."""
    monkeypatch.setattr("gradlab.analysis.measure.between_ranks._FIRST_VALUES", 512)
    monkeypatch.setattr("gradlab.analysis.measure.between_ranks._NARROW", 0.0)
    share = np.random.default_rng(1).uniform(0, 0.9, 40)[:, None, None]
    common, own = planted(1.0, nodes=2, steps=40, seed=1), planted(0.0, nodes=2, steps=40, seed=2)
    changing = measured(tmp_path / "a", np.sqrt(share) * common + np.sqrt(1 - share) * own, WITH_INTERVALS)
    noise = measured(tmp_path / "b", own, WITH_INTERVALS)
    assert changing.values == noise.values == 2048
    assert changing.estimators["mixed"].samples == 512
    assert noise.estimators["mixed"].samples == 2048  # nothing says that fewer are enough
    monkeypatch.setattr("gradlab.analysis.measure.between_ranks._NARROW", 0.1)
    few = measured(tmp_path / "c", own, WITH_INTERVALS).estimators["mixed"]
    assert few.samples == 512
    assert few.excess.high - few.excess.low <= 0.2


@pytest.mark.parametrize(
    ("steps", "nodes", "settings", "message"),
    [
        (12, 1, QUICK, "one rank"),
        (5, 2, QUICK, "5 iterations, expected at least 8"),
        (12, 2, BetweenRanks(iterations=1), "iterations = 1, expected at least 4"),
        (12, 2, BetweenRanks(shift=9), "shift = 9 recorded iterations, expected 1 to 8"),
        (12, 2, BetweenRanks(values=10), "values = 10"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, steps, nodes, settings, message) -> None:
    with (
        record_layer(tmp_path / "t", planted(0.1, nodes=nodes, steps=steps), LAYER) as trace,
        pytest.raises(GradlabError, match=message),
    ):
        measure_between_ranks(trace, settings)


@law(st.integers(2, 40), st.integers(1, 20), st.integers(0, 99))
def test_pairs_are_different_nodes(world_size: int, most: int, seed: int) -> None:
    pairs = rank_pairs(world_size, most, np.random.default_rng(seed))
    assert len(pairs) == min(most, world_size * (world_size - 1) // 2) == len(set(pairs))
    assert all(0 <= a < b < world_size for a, b in pairs)


@law(st.integers(1, 100_000), st.integers(256, 20_000))
def test_sampled_columns_lie_apart_and_within(numel: int, values: int) -> None:
    columns = sampled_columns(numel, values)
    assert sum(part.stop - part.start for part in columns) == (numel if numel <= values else values // 8 * 8)
    assert columns[0].start == 0
    assert columns[-1].stop == numel
    if numel >= 2 * values:
        assert all(a.stop <= b.start for a, b in pairwise(columns))


# --- noise scale ------------------------------------------------------------------------------------------------------


def products(values: np.ndarray) -> np.ndarray:
    return np.einsum("tnc,tmc->tnm", values.astype(float), values.astype(float))


@pytest.mark.parametrize("signal", [0.5, 0.1])
def test_the_planted_noise_scale_is_found_within_its_interval(signal: float) -> None:
    """tr(Sigma) / ||G||^2 = (1 - signal) / signal, in batches of one node."""
    scale = noise_scale(products(planted(signal, nodes=4, steps=60)))
    assert scale.batches == pytest.approx((1 - signal) / signal, rel=0.05)
    assert scale.low <= scale.batches <= scale.high
    assert scale.signal == pytest.approx(signal * LAYER.numel, rel=0.05)


def test_noise_alone_has_no_scale_that_is_finite_for_sure() -> None:
    scale = noise_scale(products(planted(0.0, nodes=4, steps=60)))
    assert scale.high == math.inf
    assert scale.low > 100


def test_groups_of_nodes_are_larger_batches() -> None:
    """Measured cosine between means of m nodes: what 1 / (1 + B / m) says."""
    inner = products(planted(0.2, nodes=8, steps=30))
    scale = noise_scale(inner).batches
    for size in (1, 2, 4):
        assert group_cosine(inner, size) == pytest.approx(expected_cosine(size, scale), abs=0.02)
    with pytest.raises(GradlabError, match="groups of 5 of 8 ranks"):
        group_cosine(inner, 5)


@law(st.floats(0.0, 0.99), st.integers(1, 12))
def test_redundancy_is_that_of_the_correlation_matrix(rho: float, nodes: int) -> None:
    matrix = np.full((nodes, nodes), rho)
    np.fill_diagonal(matrix, 1.0)
    assert redundancy(rho, nodes) == pytest.approx(-np.log2(np.linalg.det(matrix)) / (2 * nodes), abs=1e-6)


def test_noise_scale_of_a_trace_as_json(tmp_path: Path) -> None:
    with record_layer(tmp_path / "t", planted(0.5, nodes=4), LAYER) as trace:
        spectrum = measure_spectrum(trace)
    inner = np.stack([layer.inner for layer in spectrum.layers])
    scales = measure_noise_scale(inner, [LAYER.name], 16)
    assert scales.layers[0].batches == scales.model.batches == pytest.approx(1.0, rel=0.1)
    assert [row.batches for row in scales.measured_cosine] == [1, 2]
    assert scales.by_nodes[0].redundancy_bits == 0.0
    written = scales.to_json()
    json.dumps(written, allow_nan=False)
    for rows, columns in (
        (written["measured_cosine"], ["batches", "cosine"]),
        (written["by_nodes"], ["nodes", "redundancy_bits", "signal_share_of_mean"]),
        ([written["expected"]], ["batches", "cosine", "information"]),
    ):
        assert all(list(row) == columns for row in rows)
    with pytest.raises(GradlabError, match="1 ranks"):
        noise_scale(inner[0][:, :1, :1])


# --- limits -----------------------------------------------------------------------------------------------------------


@law(st.lists(st.floats(1e-12, 100), min_size=1, max_size=30).map(np.array), st.floats(1e-3, 0.999))
def test_the_floor_is_water_filling(variances: np.ndarray, share: float) -> None:
    """theta by bisection of sum min(theta, v) = D; R = sum max(0, log2(v / theta) / 2)."""
    error = share * variances.sum()
    theta = brentq(
        lambda level: np.minimum(level, variances).sum() - error, 0, variances.max(), xtol=1e-300, rtol=1e-14
    )
    bits = np.maximum(0, np.log2(variances / theta) / 2).mean()
    assert gaussian_floor(variances, [share])[0] == pytest.approx(bits, rel=1e-6, abs=1e-9)


def test_the_floor_falls_with_the_error() -> None:
    """Equal variances lose six decibels per bit; no variance takes none."""
    assert gaussian_floor(np.full(10, 3.0), [4.0**-bits for bits in (1, 2, 5)]) == pytest.approx([1, 2, 5])
    assert (np.diff(gaussian_floor(np.random.default_rng(0).exponential(size=50))) <= 0).all()
    assert (gaussian_floor(np.zeros(3)) == 0).all()


@law(st.floats(0.01, 100), st.floats(0, 0.99), st.integers(1, 8), examples=60)
def test_codes_for_the_mean_are_those_of_noisy_values_and_their_determinant(q: float, rho: float, ranks: int) -> None:
    """Oracle: the covariance of N values and of the same with noise q; D from the best linear estimate of the mean."""
    values = (1 - rho) * np.eye(ranks) + rho
    noisy, weights = values + q * np.eye(ranks), np.full(ranks, 1 / ranks)
    energy = weights @ values @ weights
    error = energy - weights @ values @ np.linalg.solve(noisy, values @ weights)
    bits = (np.linalg.slogdet(noisy)[1] - ranks * np.log(q)) / np.log(2) / (2 * ranks)
    assert rate_of_mean(error / energy, rho, ranks) == pytest.approx(bits, rel=1e-6)
    assert rate_of_mean(0.3, rho, ranks) <= gaussian_floor(np.ones(1), [0.3])[0] + 1e-12


def test_independent_ranks_learn_nothing_from_each_other_and_equal_ones_share_the_bits() -> None:
    for error in (0.01, 0.5, 1.0):
        assert rate_of_mean(error, 0.0, 7) == pytest.approx(-np.log2(error) / 2)
        assert rate_of_mean(error, 1.0, 7) == pytest.approx(-np.log2(error) / 14)
    for refused in ((0.0, 0.5, 2), (1.1, 0.5, 2), (0.5, -0.1, 2), (0.5, 1.1, 2), (0.5, 0.5, 0)):
        with pytest.raises(GradlabError, match="rate of the mean"):
            rate_of_mean(*refused)


@pytest.mark.parametrize("samples", [4, 8, 40])
def test_the_floor_of_measured_variances_is_that_of_the_true_ones(samples: int) -> None:
    """Mean squares of few values have too low a logarithm on average: left alone, their floor would be too low."""
    generator = np.random.default_rng(0)
    variances = generator.uniform(0.5, 2.0, size=20_000)
    measured = variances * generator.chisquare(samples, size=len(variances)) / samples
    fine = np.array(RELATIVE_ERRORS) < 1e-4  # all components are above the water
    true = gaussian_floor(variances)[fine]
    np.testing.assert_allclose(gaussian_floor(measured, samples=samples)[fine], true, atol=0.01)
    assert (gaussian_floor(measured)[fine] < true - 0.01).all()


def test_axes_of_one_half_do_not_lower_the_floor_of_the_other(tmp_path: Path) -> None:
    """White noise has no axes; judged on what they were fitted on, those of four rows each would seem to save bits."""
    layer = Layer("conv.weight", (4, 64, 3, 3), "convolution")
    white = np.random.default_rng(0).standard_normal((8, 2, layer.numel)).astype(np.float32)
    with record_layer(tmp_path / "t", white, layer) as trace:
        row = measure_limits(trace, candidates=[Candidate("sign")]).layers[0]
    bits = np.interp(math.log(0.25), np.log(RELATIVE_ERRORS), row.slices)
    assert bits == pytest.approx(1.0, abs=0.02)


@law(st.integers(0, 99), st.integers(1, 12))
def test_held_out_energies_keep_the_energy(seed: int, size: int) -> None:
    generator = np.random.default_rng(seed)
    fitted, later = generator.standard_normal((2, 30, size))
    assert held_out_energies(fitted, later).sum() == pytest.approx(np.square(later).sum() / 30)


def test_planted_rank_lowers_the_floor_and_white_noise_has_the_textbooks(tmp_path: Path) -> None:
    layer = Layer("conv.weight", (4, 64, 3, 3), "convolution")
    generator = np.random.default_rng(0)
    white = generator.standard_normal((24, 2, layer.numel)).astype(np.float32)
    size = floor_slice_size(layer, rows=24)
    axes = np.linalg.qr(generator.standard_normal((size, 2)))[0]
    scores = generator.standard_normal((24, 2, layer.numel // size, 2))
    noise = generator.standard_normal((*scores.shape[:3], size))
    flat = (scores @ axes.T + 0.01 * noise).astype(np.float32)
    floors = []
    for name, values in (("white", white), ("low", _from_slices(flat, layer))):
        with record_layer(tmp_path / name, values.reshape(24, 2, -1), layer) as trace:
            floors.append(measure_limits(trace, candidates=[Candidate("sign"), Candidate("cast")]).layers[0])
    assert floor_at(floors[0], 0.25) == pytest.approx(1.0, abs=0.07)
    assert floors[1].slice_size == size == 64
    assert floor_at(floors[1], 0.25) == pytest.approx(2 / size, abs=0.03)
    sign = floors[0].codecs[0]
    assert sign.relative_error == pytest.approx(1 - 2 / math.pi, abs=0.02)
    assert sign.above_floor == pytest.approx(sign.bits - 0.5 * math.log2(1 / sign.relative_error), abs=0.08)
    assert all(row.above_floor > 0 for floor in floors for row in floor.codecs)


def _from_slices(slices: np.ndarray, layer: Layer) -> np.ndarray:
    """Gradients (T, N, *shape) whose values in GradiVeQ's order are these slices, one after another."""
    order = flatten(torch.arange(layer.numel).reshape(layer.shape), "gradiveq").numpy()
    values = np.empty((*slices.shape[:2], layer.numel), np.float32)
    values[..., order] = slices.reshape(*slices.shape[:2], -1)
    return values


def test_plans_stand_where_their_replay_puts_them(tmp_path: Path) -> None:
    with record_layer(tmp_path / "t", planted(0.3, nodes=2, steps=12), LAYER) as trace:
        limits = measure_limits(trace, candidates=[Candidate("sign")])
        plan = Plan.uniform((LAYER,), "sign", wrappers=[])
        points = place_plans(limits, {"sign": replay(trace, plan, start=6)}, {"sign": plan})
    assert points[0].relative_error == pytest.approx(limits.layers[0].codecs[0].relative_error, rel=0.05)
    assert points[0].bits == pytest.approx(1.0, abs=0.02)


def test_every_codec_that_needs_no_fit_is_placed() -> None:
    names = {candidate.codec for candidate in limit_candidates()}
    assert {"topk", "qsgd", "powersgd", "sign", "cast", "terngrad"} <= names
    assert not names & {"gradiveq", "lgc_ring", "lgc_server", "identity"}
