"""What GradiVeQ builds on, measured where the truth is known: planted subspaces, periods, drift; and in a report."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.analysis.figures import drawn
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.measure.slices import of_trace as module
from gradlab.analysis.measure.slices.of_trace import LayerStructure, looked_at, measure_slice_structure
from gradlab.analysis.measure.slices.structure import (
    adjacent_correlation,
    fit_basis,
    loss_by_slice_size,
    rotated_scatter,
    staleness,
    whole_slices,
)
from gradlab.analysis.questions.slices import structure_drawings, structure_table
from gradlab.cli.analyze import analyze
from gradlab.errors import GradlabError
from gradlab.jsonable import plain
from gradlab.layout import Layer, canonical_json, flatten
from support.laws import law
from support.recorded import CONVOLUTION, LINEAR, random_gradients, record, record_layer
from support.synthetic import GradientModel, draw, expected_tail_energy

CUBE = Layer("conv.weight", (4, 2, 3, 3), "convolution")  # nine slices of F D = 8
SEEDS = st.integers(0, 2**16)


def directions(rng: np.random.Generator, size: int, rank: int) -> np.ndarray:
    """Orthonormal (size, rank)."""
    return np.linalg.qr(rng.standard_normal((size, rank)))[0]


def with_spectrum(rng: np.random.Generator, samples: int, size: int, eigenvalues: list[float]) -> np.ndarray:
    """Samples (T, K) whose own covariance has exactly these eigenvalues, and whose mean is zero."""
    scores = rng.standard_normal((samples, len(eigenvalues)))
    scores = np.linalg.qr(scores - scores.mean(0))[0] * np.sqrt(samples * np.array(eigenvalues))
    return scores @ directions(rng, size, len(eigenvalues)).T


# --- 1: correlation and scatter ---------------------------------------------------------------------------------------


@law(SEEDS, st.integers(2, 20), st.integers(1, 6), st.floats(-100, 100), examples=30)
def test_correlation_is_that_of_numpy(seed: int, samples: int, count: int, offset: float) -> None:
    values = np.random.default_rng(seed).standard_normal((samples, count)) + offset
    correlation = adjacent_correlation(values)
    np.testing.assert_allclose(correlation.matrix, np.atleast_2d(np.corrcoef(values.T)), atol=1e-9)


def test_correlation_of_independent_and_of_equal_values() -> None:
    values = np.random.default_rng(0).standard_normal((100, 60))
    correlation = adjacent_correlation(values)
    assert correlation.mean_absolute == pytest.approx(correlation.by_chance, rel=0.05)
    assert adjacent_correlation(values[:, :1] * [1.0, -2.0, 3.0]).mean_absolute == pytest.approx(1)


def test_a_value_that_never_changes_has_no_correlation() -> None:
    values = np.random.default_rng(0).standard_normal((9, 3))
    values[:, 1] = 0.1
    correlation = adjacent_correlation(values)
    assert np.isnan(correlation.matrix[1]).all()
    assert correlation.mean_absolute == pytest.approx(abs(np.corrcoef(values[:, 0], values[:, 2])[0, 1]))
    assert correlation.to_json()["matrix"][1] == [None] * 3
    assert adjacent_correlation(np.ones((5, 2))).to_json()["mean_absolute"] is None


@law(SEEDS, examples=25)
def test_rotation_keeps_distances_and_orders_the_planted_variances(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = with_spectrum(rng, 40, 3, [6.0, 3.0, 1.0])
    scatter = rotated_scatter(values + 5.0)
    np.testing.assert_allclose(scatter.share, [0.6, 0.3, 0.1], atol=1e-9)
    np.testing.assert_allclose(scatter.after.T @ scatter.after / 40, np.diag([6.0, 3.0, 1.0]), atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(scatter.after, axis=1), np.linalg.norm(values, axis=1))


def test_three_values_in_a_plane_need_two_axes_and_constant_ones_none() -> None:
    plane = with_spectrum(np.random.default_rng(1), 30, 3, [2.0, 1.0])
    assert rotated_scatter(plane).share[2] < 1e-12
    still = rotated_scatter(np.ones((4, 3)))
    assert not still.share.any()
    assert not still.after.any()


# --- 2: Fig. 5 --------------------------------------------------------------------------------------------------------


def periodic(rng: np.random.Generator, steps: int, blocks: int, period: int, rank: int) -> np.ndarray:
    """Vectors (T, blocks * period): every block lies in the same `rank` dimensions, independently of the others."""
    return (rng.standard_normal((steps, blocks, rank)) @ directions(rng, period, rank).T).reshape(steps, -1)


@law(SEEDS, st.integers(6, 12), st.integers(1, 2), examples=15)
def test_loss_drops_to_nothing_exactly_at_multiples_of_the_period(seed: int, period: int, rank: int) -> None:
    values = periodic(np.random.default_rng(seed), 80, 9, period, rank)
    sizes = list(range(3, 4 * period + 1))
    curve = loss_by_slice_size(values[:40], values[40:], sizes, period=period, loss_threshold=0.0)
    assert curve.multiples.tolist() == [size % period == 0 for size in sizes]
    assert curve.later_loss[curve.multiples].max() < 1e-9
    assert curve.in_sample_loss[curve.multiples].max() < 1e-9
    assert curve.dimensions[curve.multiples].tolist() == [rank, 2 * rank, 3 * rank, 4 * rank]
    # Small slices may have as many axes as elements.
    short = curve.dimensions < curve.sizes
    assert curve.later_loss[short & ~curve.multiples].min() > 1e-6
    np.testing.assert_allclose(curve.ratios, curve.sizes / curve.dimensions)


def test_a_random_basis_loses_what_is_said_of_it() -> None:
    """Slices of independent subspaces: to the others, the first slice's basis is a random one."""
    rng = np.random.default_rng(2)
    values = np.concatenate([periodic(rng, 60, 1, 30, 5) for _ in range(200)], axis=1)
    curve = loss_by_slice_size(values[:30], values[30:], [30], period=30, loss_threshold=0.0)
    assert curve.random_loss[0] == pytest.approx(1 - 5 / 30, rel=0.1)
    assert curve.later_loss[0] == pytest.approx(curve.random_loss[0], rel=0.05)


def test_a_selection_of_a_layer_gives_what_its_whole_slices_give() -> None:
    values = np.random.default_rng(4).standard_normal((20, 100))
    columns = np.concatenate([np.arange(25), np.arange(38, 61)])
    numbers, positions = whole_slices(columns, 10)
    assert numbers.tolist() == [0, 1, 4, 5]
    np.testing.assert_array_equal(columns[positions], 10 * numbers[:, None] + np.arange(10))
    curve = loss_by_slice_size(values[:12, columns], values[12:, columns], [10], period=10, columns=columns)
    packed = np.concatenate([values[:, :20], values[:, 40:60]], axis=1)
    assert curve.to_json() == loss_by_slice_size(packed[:12], packed[12:], [10], period=10).to_json()


# --- 4: staleness -----------------------------------------------------------------------------------------------------


def turning(rng: np.random.Generator, before: int, after: int, size: int, rank: int, turn: float) -> np.ndarray:
    """Samples (before + after, K) of one subspace, and of what it becomes, turning by an angle per step."""
    both = directions(rng, size, 2 * rank)
    angles = turn * np.concatenate([np.zeros(before), np.arange(1, after + 1)])[:, None, None]
    bases = np.cos(angles) * both[:, :rank] + np.sin(angles) * both[:, rank:]
    # No step is so small that rounding of what is subtracted from it would show.
    scores = rng.uniform(0.5, 1.5, (before + after, rank)) * rng.choice([-1, 1], (before + after, rank))
    return np.einsum("tkr,tr->tk", bases, scores)


@law(SEEDS, st.integers(1, 4), st.floats(0.001, 0.1), examples=20)
def test_loss_of_a_turning_subspace_is_the_squared_sine_of_its_age(seed: int, rank: int, turn: float) -> None:
    values = turning(np.random.default_rng(seed), 20, 15, 12, rank, turn)
    result = staleness(values, np.arange(35), [(0, 20)], loss_threshold=0.0, bins=40)
    each = [age for age, (first, last) in zip(result.ages[:, 0], result.ages, strict=True) if first == last]
    assert each[:3] == [1, 2, 3]
    losses = dict(zip(result.ages[:, 0].tolist(), result.loss.tolist(), strict=True))
    for age in each:
        assert losses[age] == pytest.approx(math.sin(turn * age) ** 2, rel=1e-6, abs=1e-10)
    assert result.suggested == 1  # from nothing, any growth is more than a quarter
    assert result.last_age == 15


def expected_lifetime(model: GradientModel, lag: int, youngest: int, tolerance: float) -> int:
    """Steps after which the planted tail, seen `lag` steps after the basis' own, is first above the tolerance."""
    limit = (1 + tolerance) * expected_tail_energy(model, model.rank, age=youngest + lag)
    return next(age for age in range(400) if expected_tail_energy(model, model.rank, age=age + lag) > limit)


@pytest.mark.parametrize("drift", [0.004, 0.008])
@pytest.mark.parametrize("every", [1, 3])
def test_planted_drift_sets_the_suggested_lifetime(drift: float, every: int) -> None:
    """L_c in iterations, whatever the trace's spacing: where the planted tail has grown by a quarter."""
    model = GradientModel(60, (1.0,) * 4, (0.1,), drift=drift)
    values = draw(model, 700, np.random.default_rng(9)).values[:, 0].astype(float)
    steps = every * np.arange(700)
    windows = [(first, first + 30) for first in (0, 100, 200, 300)]
    assert [fit_basis(values[slice(*window)]).kept(0.2) for window in windows] == [4] * 4
    result = staleness(values, steps, windows, loss_threshold=0.2, bins=30)
    youngest = round(result.ages[0].mean() / every)
    truth = every * expected_lifetime(model, lag=15, youngest=youngest, tolerance=0.25)
    assert result.suggested == pytest.approx(truth, rel=0.35)
    assert result.last_age == every * 670


def test_what_does_not_turn_lasts_to_the_end() -> None:
    values = periodic(np.random.default_rng(10), 120, 1, 12, 3)
    result = staleness(values, np.arange(120), [(0, 20), (30, 50)], loss_threshold=0.0)
    assert result.loss.max() < 1e-9
    assert (result.suggested, result.last_age) == (None, 100)


def test_old_bins_are_compared_with_the_windows_that_reach_them() -> None:
    """The early window loses far more at every age; neither ages. Pooled losses rise with age all the same."""
    rng = np.random.default_rng(11)
    values = periodic(rng, 300, 1, 60, 15) + 0.05 * rng.standard_normal((300, 60))
    values[:30] = periodic(rng, 30, 1, 60, 15)  # another subspace
    result = staleness(values, np.arange(300), [(0, 30), (200, 230)], loss_threshold=0.02)
    assert result.by_window[0, 0] > 3 * result.by_window[1, 0]
    assert result.loss[-1] > 1.5 * result.loss[0]
    assert np.isnan(result.by_window[1, -1])  # the late window sees no old age
    assert result.suggested is None


# --- what is refused, and what is nothing -----------------------------------------------------------------------------


def test_gradients_that_never_change_lose_nothing() -> None:
    for value in (0.0, 0.3):
        still = np.full((20, 24), value)
        fit, later = still[:10], still[10:]
        assert loss_by_slice_size(fit, later, [6, 8], period=6).later_loss.max() < 1e-30
        assert staleness(still, np.arange(20), [(0, 10)]).suggested is None


def nan_at(*shape: int) -> np.ndarray:
    values = np.ones(shape)
    values[1, ..., 0] = np.nan
    return values


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: adjacent_correlation(np.ones((1, 3))), r"samples of shape \[1, 3\], expected at least 2"),
        (lambda: adjacent_correlation(nan_at(4, 3)), "samples with NaN or infinity; leave out the steps"),
        (lambda: rotated_scatter(np.ones((4, 1))), "at least two adjacent ones"),
        (lambda: fit_basis(np.ones((4, 0))), "of at least one value"),
        (lambda: loss_by_slice_size(np.ones((4, 9)), np.ones((2, 9)), [5], period=3), "slice size 5: 1 whole slices"),
        (lambda: loss_by_slice_size(np.ones((4, 9)), np.ones((2, 9)), [0], period=3), "slice size 0"),
        (lambda: loss_by_slice_size(np.ones((1, 9)), np.ones((2, 9)), [3], period=3), "expected at least 2"),
        (lambda: loss_by_slice_size(np.ones((4, 9)), np.ones((0, 9)), [3], period=3), "no later samples"),
        (lambda: loss_by_slice_size(np.ones((4, 9)), nan_at(2, 9), [2], period=3, columns=np.arange(9) + 1), "first"),
        (lambda: staleness(np.ones((4, 5)), np.arange(4), [(0, 4)]), "1 windows, none with later samples"),
        (lambda: staleness(np.ones((4, 5)), np.arange(4), [(0, 1)]), "expected at least 2"),
        (lambda: staleness(nan_at(4, 5), np.arange(4), [(0, 2)]), "NaN or infinity"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, words) -> None:
    with pytest.raises(GradlabError, match=words):
        call()


# --- over a trace -----------------------------------------------------------------------------------------------------

PARTS = tuple(
    field.name
    for field in dataclasses.fields(LayerStructure)
    if field.name not in {"layer", "slice_size", "period", "period_is", "remarks"}
)
WIDE = Layer("wide.weight", (8, 4, 3, 3), "convolution")


def test_a_trace_is_read_in_gradiveqs_order(tmp_path) -> None:
    values = np.random.default_rng(13).standard_normal((60, 2, CUBE.numel)).astype(np.float32)
    with record_layer(tmp_path / "t", values, CUBE) as trace:
        structure = measure_slice_structure(trace, samples=20)
    assert structure.fitted_on == tuple(range(20))
    assert (structure.held_out_on[0], structure.held_out_on[-1]) == (20, 59)
    assert canonical_json(structure.to_json())
    (layer,) = structure.layers
    assert (layer.slice_size, layer.period, layer.period_is) == (72, 8, "F D")
    assert layer.remarks == structure.remarks == ()
    mean = torch.from_numpy(values.mean(1, dtype=np.float64)).reshape(-1, *CUBE.shape)
    ordered = np.stack([flatten(sample, "gradiveq").numpy() for sample in mean]).astype(np.float32)
    later = ordered[list(structure.held_out_on)]
    expected = loss_by_slice_size(ordered[:20], later, layer.slice_sizes.sizes, period=8)
    assert layer.slice_sizes.to_json() == expected.to_json()
    np.testing.assert_array_equal(layer.scatter.before, ordered[:20, :3])
    assert structure.windows == ((0, 14), (15, 29), (30, 44), (45, 59))
    aged = staleness(ordered, np.arange(60), [(0, 15), (15, 30), (30, 45), (45, 60)])
    assert layer.staleness.to_json() == aged.to_json()


def test_planted_structure_is_found_in_a_trace(tmp_path, monkeypatch) -> None:
    """Every block of F D = 8 in the same two dimensions: dips, and bases that last."""
    for part in (loss_by_slice_size, staleness):
        monkeypatch.setattr(module, part.__name__, partial(part, loss_threshold=1e-9))
    rng = np.random.default_rng(14)
    ordered = periodic(rng, 120, 9, 8, 2).astype(np.float32)
    native = np.empty_like(ordered)
    native[:, flatten(torch.arange(CUBE.numel).reshape(CUBE.shape), "gradiveq").numpy()] = ordered
    with record_layer(tmp_path / "t", native[:, None], CUBE) as trace:
        (layer,) = measure_slice_structure(trace, samples=40).layers
    dips = layer.slice_sizes.multiples
    losses = layer.slice_sizes.later_loss
    assert losses[dips].max() < 1e-6 < 0.01 < losses[~dips & (layer.slice_sizes.sizes > 8)].min()
    assert layer.staleness.suggested is None


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 8, 9, 30])
def test_short_traces_say_what_they_cannot_show(tmp_path, steps: int) -> None:
    with record(tmp_path / "t", random_gradients(15, steps, 1, [CUBE]), [CUBE]) as trace:
        structure = measure_slice_structure(trace)
    assert canonical_json(structure.to_json())
    assert structure.remarks
    if steps < 3:
        assert structure.layers == ()
        return
    (layer,) = structure.layers
    missing = [part for part in PARTS if getattr(layer, part) is None]
    assert len(layer.remarks) == len(missing)
    assert missing == (["staleness"] if steps < 8 else [])


def test_steps_that_are_not_finite_are_left_out_and_counted(tmp_path) -> None:
    gradients = random_gradients(16, 41, 2, [CUBE])
    for step in (2, 20, 40):
        gradients[step][1][CUBE.name][0, 0, 0, 0] = np.inf
    with record(tmp_path / "a", gradients, [CUBE]) as trace:
        measured = measure_slice_structure(trace, samples=10).layers[0]
    kept = [gradients[step] for step in range(41) if step != 2][:9]
    with record(tmp_path / "b", kept, [CUBE]) as trace:
        mean = trace.mean(CUBE.name)
    assert measured.remarks == ("3 iterations with gradients that are not finite are left out",)
    first = flatten(torch.from_numpy(mean[0]).reshape(CUBE.shape), "gradiveq")[:3]
    np.testing.assert_array_equal(measured.scatter.before[0], first)
    assert len(measured.scatter.before) == 9


def test_a_layer_that_never_was_finite_is_a_remark(tmp_path) -> None:
    gradients = random_gradients(17, 20, 1, [CUBE])
    for step in gradients:
        step[0][CUBE.name][:] = np.nan
    with record(tmp_path / "t", gradients, [CUBE]) as trace:
        structure = measure_slice_structure(trace)
    assert [getattr(structure.layers[0], part) for part in PARTS] == [None] * len(PARTS)
    assert len(structure.layers[0].remarks) == len(PARTS) + 1


def test_layers_are_few_convolutions_else_other_matrices(tmp_path) -> None:
    sizes = (2, 2, 5, 2, 2, 2, 2)
    many = [Layer(f"c{n}.weight", (size, 2, 3, 3), "convolution") for n, size in enumerate(sizes)]
    with record(tmp_path / "a", random_gradients(18, 6, 1, [*many, LINEAR]), [*many, LINEAR]) as trace:
        names = [layer.layer.name for layer in measure_slice_structure(trace).layers]
        assert names == ["c0.weight", "c2.weight", "c3.weight", "c6.weight"]
        with pytest.raises(GradlabError, match="samples = 1: expected at least 2"):
            measure_slice_structure(trace, samples=1)
    with record(tmp_path / "b", random_gradients(19, 6, 1)[:6]) as trace:
        assert [layer.layer.name for layer in measure_slice_structure(trace).layers] == [CONVOLUTION.name]
    with record(tmp_path / "c", random_gradients(19, 6, 1, [LINEAR]), [LINEAR]) as trace:
        (layer,) = measure_slice_structure(trace).layers
    assert (layer.layer.name, layer.period, layer.period_is) == (LINEAR.name, 6, "F")  # along its inputs


def test_vectors_alone_are_a_remark(tmp_path) -> None:
    vectors = [Layer("bias", (5,), "bias"), Layer("one", (1,), "other"), Layer("none", (0, 3), "other")]
    with record(tmp_path / "t", random_gradients(20, 30, 1, vectors), vectors) as trace:
        assert measure_slice_structure(trace).remarks[0] == "No convolution and no other matrix to look at."


def test_of_large_layers_stretches_with_whole_slices_are_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_LARGEST_SLICE", 64)
    monkeypatch.setattr(module, "_MOST_VALUES", 256)
    monkeypatch.setattr(module, "_STRETCH", 128)
    columns = looked_at(WIDE.numel * 3)
    assert len(columns) == 256
    assert (columns[0], columns[-1]) == (0, 3 * WIDE.numel - 1)
    assert all(len(whole_slices(columns, size)[0]) >= 2 for size in range(1, 65))
    values = np.random.default_rng(21).standard_normal((20, 1, WIDE.numel)).astype(np.float32)
    with record_layer(tmp_path / "t", values, WIDE) as trace:
        (layer,) = measure_slice_structure(trace, samples=8).layers
    assert max(layer.slice_sizes.sizes) <= 64


# --- in the report ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """What `gradlab analyze` writes of a small trace: report.json, and the page's path."""
    folder = tmp_path_factory.mktemp("structure")
    record(folder / "t", random_gradients(22, 40, 2, [CUBE]), [CUBE]).close()
    analyze(folder / "t", folder / "report", only="within")
    return json.loads((folder / "report" / "report.json").read_text()), folder / "report" / "report.html"


def test_the_report_has_the_section_with_its_figures_and_data(reported, tmp_path) -> None:
    data, page = reported
    with record(tmp_path / "t", random_gradients(22, 40, 2, [CUBE]), [CUBE]) as trace:
        assert data["slice_structure"] == measure_slice_structure(trace).to_json()
    assert data["slice_structure"]["remarks"][0].startswith("40 iterations are recorded: L_t = 20 in place of 100")
    added = [figure for figure in data["figures"] if figure["title"].startswith("What GradiVeQ would find: ")]
    assert [figure["name"] for figure in added] == [f"gradiveq_{part}" for part in PARTS if part != "correlation"]
    text = html.unescape(page.read_text(encoding="utf-8"))
    assert ">What GradiVeQ would find</h" in text
    for figure in added:
        assert f">{figure['title']}</h" in text
        assert (page.parent / "figures" / f"{figure['name']}.svg").stat().st_size


def test_the_figures_mark_the_suggested_lifetime(reported) -> None:
    structure, page = reported[0]["slice_structure"], reported[1]
    svg = (page.parent / "figures" / "gradiveq_staleness.svg").read_text(encoding="utf-8")
    for layer in structure["layers"]:
        staleness = layer["staleness"]
        lasts = f"at least {staleness['last_age']}" if staleness["suggested"] is None else f"= {staleness['suggested']}"
        assert f"L_c {lasts}" in svg


def test_the_table_says_what_was_found_and_what_could_not_be(reported) -> None:
    structure = reported[0]["slice_structure"]
    layer = {
        **structure["layers"][0],
        "slice_sizes": {"sizes": [6, 8, 9], "multiples": [False, True, False], "later_loss": [0.4, 0.1, 0.6]},
        "staleness": {"suggested": 37, "last_age": 90},
    }
    bare = {
        **structure["layers"][0],
        "name": WIDE.name,
        **dict.fromkeys(PARTS),
        "remarks": ["no loss: too short"],
    }
    table = structure_table({**structure, "layers": [layer, bare], "remarks": ["40 iterations."]})
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["loss at multiples of F D / beside them"] == "10.0 % / 50.0 %"
    assert cells["L_c"] == "37"
    assert table.rows[1][0] == WIDE.name
    assert set("".join(table.rows[1][2:])) <= set("-/ ()")
    assert "wide.weight: no loss: too short." in table.note


def test_what_cannot_be_measured_has_no_figure_and_nothing_else_fails(tmp_path) -> None:
    zeros = [[{CUBE.name: np.zeros(CUBE.shape, np.float32)}] for _ in range(12)]
    for name, gradients in (("short", random_gradients(23, 4, 2, [CUBE])), ("zero", zeros)):
        with record(tmp_path / name, gradients, [CUBE]) as trace:
            items = structure_drawings(plain(measure_slice_structure(trace)))
        assert ("gradiveq_staleness" in [item.name for item in items]) == (name == "zero")
        for item in items if name == "zero" else ():
            with drawing():
                drawn.draw(item.chart).draw_without_rendering()
