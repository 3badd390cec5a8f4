"""Spectra, agreement between ranks, and GradiVeQ fits against oracles and planted truth."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA as ScikitPCA

from gradlab.analysis.fit.gradiveq import NotFittable, fit_gradiveq
from gradlab.analysis.gradients import read_unscaled
from gradlab.analysis.measure import spectrum as spectrum_module
from gradlab.analysis.measure.agreement import rank_cosine, signal_to_noise
from gradlab.analysis.measure.holdout import age_bins, holdouts_by_age
from gradlab.analysis.measure.spectrum import (
    centred_eigenvalues,
    cumulative_variance,
    measure_spectrum,
    spread,
)
from gradlab.analysis.questions.slices import fit_verdict
from gradlab.artifact import Artifact
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.errors import GradlabError
from gradlab.formatting import (
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
)
from gradlab.jsonable import plain
from gradlab.layout import Layer, canonical_json, flatten, split_slices
from gradlab.learning.slice_pca import principal_axes
from gradlab.plan import Plan
from support.recorded import BIAS, CONVOLUTION, LAYERS, LINEAR, random_gradients, record, record_layer
from support.synthetic import GradientModel, draw, expected_cosine, expected_tail_energy

PLANTED = Layer("conv.weight", (8, 4, 3, 3), "convolution")  # one slice of 288


# --- spectra ------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), count=st.integers(2, 12), features=st.integers(1, 30), offset=st.floats(-5, 5))
def test_eigenvalues_from_the_gram_matrix_are_those_of_svd_and_scikit_learn(seed, count, features, offset):
    samples = np.random.default_rng(seed).standard_normal((count, features)) + offset
    eigenvalues = centred_eigenvalues(samples @ samples.T)
    singular = np.linalg.svd(samples - samples.mean(0), compute_uv=False) ** 2 / count
    keep = min(count, features)
    scale = 1e-10 * max(1.0, float(np.square(samples).sum()))
    np.testing.assert_allclose(eigenvalues[:keep], singular[:keep], atol=scale)
    np.testing.assert_allclose(eigenvalues[keep:], 0, atol=scale)
    scikit = ScikitPCA().fit(samples).explained_variance_ * (count - 1) / count
    np.testing.assert_allclose(eigenvalues[:keep], scikit, atol=scale)


def test_cumulative_variance_ends_at_one_and_survives_no_variance():
    np.testing.assert_allclose(cumulative_variance(np.array([3.0, 1.0])), [0.75, 1.0])
    np.testing.assert_array_equal(cumulative_variance(np.zeros(3)), np.ones(3))


def averaged(trace, layer):
    return torch.from_numpy(trace.mean(layer.name)).reshape(-1, *layer.shape)


@pytest.mark.parametrize("block", [2**25, 1])
def test_measured_spectra_are_those_of_the_slices_in_gradiveq_order(tmp_path, monkeypatch, block):
    layer = Layer("conv.weight", (8, 6, 3, 3), "convolution")  # 432 elements: two blocks at the least block width
    monkeypatch.setattr(spectrum_module, "_BLOCK_VALUES", block)
    monkeypatch.setattr(spectrum_module, "default_slice_size", lambda view: 144)
    with record(tmp_path / "t", random_gradients(0, 9, 2, [layer]), [layer]) as trace:
        spectrum = measure_spectrum(trace).layers[0]
        samples = averaged(trace, layer)
    slices = torch.stack([split_slices(flatten(sample, "gradiveq"), 144)[0] for sample in samples]).double()
    expected, _ = principal_axes(slices[:, 0] - slices[:, 0].mean(0))
    np.testing.assert_allclose(spectrum.slice_eigenvalues[: len(expected)], expected, rtol=1e-6)
    whole = ScikitPCA().fit(samples.reshape(9, -1).double().numpy()).explained_variance_ * 8 / 9
    np.testing.assert_allclose(spectrum.layer_eigenvalues, whole, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(spectrum.norm, samples.reshape(9, -1).norm(dim=1), rtol=1e-5)
    assert (spectrum.slice_size, spectrum.slices) == (144, 3)


def test_long_traces_are_sampled_evenly_and_say_so(tmp_path):
    gradients = random_gradients(1, 30, 1)
    with record(tmp_path / "t", gradients, indices=range(0, 60, 2)) as trace:
        spectra = measure_spectrum(trace, max_samples=7)
        wanted = spread(30, 7)
    assert spectra.steps.tolist() == [2 * p for p in wanted]
    expected = [np.linalg.norm(gradients[p][0][LINEAR.name]) for p in wanted]
    np.testing.assert_allclose(spectra.layers[1].norm, expected, rtol=1e-6)


def test_layers_are_matrices(tmp_path):
    with record(tmp_path / "t", random_gradients(2, 4, 2)) as trace:
        assert [s.layer.name for s in measure_spectrum(trace).layers] == [CONVOLUTION.name, LINEAR.name]
        assert measure_spectrum(trace).skipped_layers == (BIAS.name,)
    short = record(tmp_path / "short", random_gradients(4, 1, 2))
    with short, pytest.raises(GradlabError, match="1 steps to measure, expected at least 2"):
        measure_spectrum(short)


def test_steps_that_are_not_finite_are_left_out_and_listed(tmp_path):
    gradients = random_gradients(3, 6, 2)
    with record(tmp_path / "a", gradients[:2] + gradients[3:]) as trace:
        expected = measure_spectrum(trace)
    gradients[2][1][CONVOLUTION.name][0] = np.nan
    with record(tmp_path / "b", gradients) as trace:
        spectra = measure_spectrum(trace)
    assert (spectra.steps.tolist(), spectra.nonfinite_steps) == ([0, 1, 3, 4, 5], (2,))
    np.testing.assert_allclose(spectra.layers[0].layer_eigenvalues, expected.layers[0].layer_eigenvalues, atol=1e-9)


# --- agreement between ranks --------------------------------------------------------------------------------------


def test_cosine_is_the_mean_over_pairs():
    vectors = np.random.default_rng(0).standard_normal((5, 3, 7))
    units = vectors / np.linalg.norm(vectors, axis=2, keepdims=True)
    expected = [np.mean([u[0] @ u[1], u[0] @ u[2], u[1] @ u[2]]) for u in units]
    np.testing.assert_allclose(rank_cosine(np.einsum("tnc,tmc->tnm", vectors, vectors)), expected)


def test_agreement_of_planted_gradients(tmp_path):
    model = GradientModel(PLANTED.numel, (4.0, 2.0, 1.0), (0.1, 0.1, 0.1), shared=0.7)
    values = draw(model, 500, np.random.default_rng(1)).values
    with record_layer(tmp_path / "t", values, PLANTED) as trace:
        spectrum = measure_spectrum(trace, max_samples=500).layers[0]
    common, own = 0.7 * 7.0, 0.3 * 7.0 + PLANTED.numel * 0.01
    assert spectrum.signal_to_noise == pytest.approx(common / own, rel=0.1)
    units = values / np.linalg.norm(values, axis=2, keepdims=True)
    pairs = [(units[:, i] * units[:, j]).sum(1) for i, j in ((0, 1), (0, 2), (1, 2))]
    np.testing.assert_allclose(spectrum.cosine, np.mean(pairs, axis=0), atol=1e-5)
    assert 0.5 * expected_cosine(model)[0, 1] < spectrum.mean_cosine < expected_cosine(model)[0, 1]


def test_one_rank_has_no_agreement_and_equal_ranks_have_no_noise(tmp_path):
    with record(tmp_path / "t", random_gradients(5, 4, 1)) as trace:
        spectrum = measure_spectrum(trace).layers[0].to_json()
    assert (spectrum["cosine"], spectrum["mean_cosine"], spectrum["signal_to_noise"]) == ([None] * 4, None, None)
    assert signal_to_noise(np.ones((2, 3, 3))) is None
    assert np.isnan(rank_cosine(np.zeros((1, 2, 2)))).all()


# --- GradiVeQ -----------------------------------------------------------------------------------------------------


def exact_rank(seed, steps, rank, ranks=2):
    """Gradients (steps, ranks, numel) whose average lies in `rank` dimensions, around zero."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(rng.standard_normal((PLANTED.numel, rank)))[0]
    scores = rng.standard_normal((steps, ranks, rank))
    return (scores @ directions.T).astype(np.float32)


@pytest.mark.parametrize("rank", [1, 9])
def test_the_planted_rank_is_found_and_loses_nothing_later(tmp_path, rank):
    with record_layer(tmp_path / "t", exact_rank(rank, 60, rank), PLANTED) as trace:
        fit = fit_gradiveq(trace, samples=40, settings=GradiVeQ.Settings(loss_threshold=1e-6))
    assert fit.provenance["layers"][PLANTED.name]["dimension"] == rank
    assert fit.provenance["in_sample_loss"] < 1e-6
    assert fit.provenance["holdout"]["loss"] < 1e-6
    assert fit.provenance["random_basis"]["loss"] == pytest.approx(1 - rank / PLANTED.numel, abs=0.05)
    assert fit.warnings == []


def test_held_out_loss_is_the_planted_tail(tmp_path):
    model = GradientModel(PLANTED.numel, (8.0, 4.0, 2.0, 1.0), (0.05,))
    values = draw(model, 600, np.random.default_rng(2)).values
    with record_layer(tmp_path / "t", values, PLANTED) as trace:
        fit = fit_gradiveq(trace, samples=400, settings=GradiVeQ.Settings(ratio=PLANTED.numel / 4))
    expected = expected_tail_energy(model, kept=4)
    assert fit.provenance["holdout"]["loss"] == pytest.approx(expected, rel=0.08)
    assert fit.provenance["in_sample_loss"] == pytest.approx(expected, rel=0.08)


def test_held_out_loss_rises_with_age_as_the_planted_subspace_turns(tmp_path):
    turn = 0.02
    model = GradientModel(PLANTED.numel, (1.0,) * 4, (1e-4,), drift=turn)
    values = draw(model, 20 + 75, np.random.default_rng(3)).values
    with record_layer(tmp_path / "t", values, PLANTED) as trace:
        fit = fit_gradiveq(trace, samples=20, settings=GradiVeQ.Settings(loss_threshold=0.05))
        [held] = holdouts_by_age(trace, [fit.plan], start=20)
    assert held.to_json() == fit.provenance["holdout"]
    losses = held.loss_by_age
    assert sorted(losses) == losses
    # The fit sees the middle of its window: ages count from its end, 10 steps later.
    middle = [math.sin(turn * ((first + last) / 2 + 10)) ** 2 for first, last in held.ages]
    np.testing.assert_allclose(losses, middle, atol=0.06)
    assert "Expect the loss of later iterations" in fit.warnings[0]


def test_pure_noise_is_called_what_it_is(tmp_path):
    values = np.random.default_rng(4).standard_normal((70, 1, PLANTED.numel)).astype(np.float32)
    with record_layer(tmp_path / "t", values, PLANTED) as trace:
        found = fit_gradiveq(trace, samples=30)
    assert found.provenance["fitted_slices_loss"] <= 0.011
    assert found.provenance["holdout"]["loss"] > 0.9
    assert any("no better than random" in line for line in found.warnings)
    assert fit_verdict(found.measured).startswith("The GradiVeQ fit holds nothing that lasts")


def test_single_layers_without_structure_are_named(tmp_path):
    noisy = Layer("noisy.weight", PLANTED.shape, "convolution")
    structured, noise = exact_rank(5, 60, 3, ranks=1), np.random.default_rng(5)
    gradients = [
        [
            {"conv.weight": of_rank.reshape(PLANTED.shape), "noisy.weight": 0.01 * noise.standard_normal(PLANTED.shape)}
            for of_rank in step
        ]
        for step in structured
    ]
    with record(tmp_path / "t", gradients, [PLANTED, noisy]) as trace:
        fit = fit_gradiveq(trace, samples=40, settings=GradiVeQ.Settings(ratio=PLANTED.numel / 3))
    later, control = fit.provenance["holdout"]["groups"], fit.provenance["random_basis"]["groups"]
    assert later["conv.weight"]["loss"] < 0.01 < 0.9 < control["conv.weight"]["loss"]
    assert later["noisy.weight"]["loss"] > control["noisy.weight"]["loss"]
    assert fit.warnings[-1] == "No better than a random basis of the same size on later iterations: noisy.weight."


def test_loss_on_fitted_slices_meets_lambda_and_other_slices_are_told_apart(tmp_path):
    layer = Layer("conv.weight", (4, 2, 3, 3), "convolution")
    with record(tmp_path / "t", random_gradients(5, 30, 1, [layer]), [layer]) as trace:
        whole = fit_gradiveq(trace, samples=20, settings=GradiVeQ.Settings(slice_size=24, loss_threshold=0.1))
        each = fit_gradiveq(trace, samples=20, settings=GradiVeQ.Settings(slice_size=24, loss_threshold=0.1, reuse=1))
    assert whole.provenance["fitted_slices_loss"] <= 0.1 < whole.provenance["in_sample_loss"]
    assert each.provenance["fitted_slices_loss"] == each.provenance["in_sample_loss"] <= 0.1


def test_plan_has_one_group_per_layer_of_the_role_and_survives_saving(tmp_path):
    layers = (CONVOLUTION, Layer("wide.weight", (2, 2, 1, 1), "convolution"), LINEAR, BIAS)
    with record(tmp_path / "t", random_gradients(6, 40, 2, layers), layers) as trace:
        fit = fit_gradiveq(
            trace,
            samples=10,
            settings=GradiVeQ.Settings(slice_size=24),
            roles=("convolution", "linear"),
            warmup_steps=15,
            seed=3,
        )
        digest = trace.digest
    assert [group.name for group in fit.plan.groups] == [CONVOLUTION.name, LINEAR.name]
    assert fit.provenance["skipped"] == {"wide.weight": "4 elements, fewer than a slice of 24"}
    assert fit.provenance["fitted_on"] == list(range(5, 15))
    assert fit.provenance["held_out_on"] == [15, 39]
    assert fit.provenance["trace"] == digest
    assert (fit.plan.schedule.warmup_steps, fit.plan.seed, fit.plan.layers) == (15, 3, layers)
    path = fit.artifact().save(tmp_path / "a.safetensors")
    loaded = Artifact.load(path)
    assert loaded.plan.digest == fit.plan.digest
    assert loaded.provenance == fit.provenance == json.loads(canonical_json(fit.provenance))


def test_a_layer_that_would_save_nothing_stays_dense(tmp_path):
    tiny = Layer("tiny.weight", (2, 1, 1, 1), "convolution")
    layers = (CONVOLUTION, tiny)
    with record(tmp_path / "t", random_gradients(7, 40, 1, layers), layers) as trace:
        fit = fit_gradiveq(trace, samples=20, settings=GradiVeQ.Settings(loss_threshold=0.0))
    assert "nothing would be saved" in fit.provenance["skipped"]["tiny.weight"]


def test_steps_that_are_not_finite_take_no_part(tmp_path):
    gradients = random_gradients(8, 24, 2)
    gradients[3][0][CONVOLUTION.name][:] = np.inf
    gradients[20][1][CONVOLUTION.name][:] = np.nan
    with record(tmp_path / "t", gradients) as trace:
        fit = fit_gradiveq(trace, samples=12)
    assert fit.provenance["layers"][CONVOLUTION.name]["samples"] == 11
    assert 0 < fit.provenance["holdout"]["loss"] < 2


@pytest.mark.parametrize("every", [1, 3])
def test_a_fits_age_counts_from_its_last_iteration(tmp_path, every):
    """In iterations of the run, not in recorded ones: the first that is held out is `every` iterations old."""
    with record(tmp_path / "t", random_gradients(9, 12, 2), indices=range(0, 12 * every, every)) as trace:
        held = fit_gradiveq(trace, samples=6).provenance["holdout"]
    assert (held["ages"][0][0], held["ages"][-1][1]) == (every, 6 * every)
    assert sum(held["steps"]) == 6


def test_each_iteration_is_divided_by_its_own_loss_scale(tmp_path):
    gradients = random_gradients(9, 6, 2)
    name = LAYERS[0].name
    with record(tmp_path / "t", gradients, loss_scale=[1.0, 2.0, 8.0, 0.5, 2.0**16, 1.0]) as trace:
        for start, stop in [(0, 6), (2, 5), (5, 6)]:
            for rank in range(2):
                expected = np.stack([gradients[step][rank][name].ravel() for step in range(start, stop)])
                np.testing.assert_array_equal(read_unscaled(trace, name, rank, start, stop), expected)


def test_loss_scale_is_divided_out(tmp_path):
    gradients = random_gradients(9, 12, 2)
    with record(tmp_path / "a", gradients) as trace:
        plainly, measured = fit_gradiveq(trace, samples=6), measure_spectrum(trace)
    with record(tmp_path / "b", gradients, loss_scale=2.0**12) as trace:
        scaled, also_measured = fit_gradiveq(trace, samples=6), measure_spectrum(trace)
    assert scaled.plan.digest == plainly.plan.digest
    np.testing.assert_array_equal(also_measured.layers[0].norm, measured.layers[0].norm)


def test_what_cannot_be_fitted_is_refused_with_the_numbers(tmp_path):
    with record(tmp_path / "t", random_gradients(10, 12, 2)) as trace:
        for words, samples, arguments in (
            ("samples = 1, expected at least 2", 1, {}),
            ("12 of 12 steps are left from position 0; fitting on 12 .* needs at least 13", 12, {}),
            ("6 of 12 steps are left from position 6", 8, {"start": 6}),
            ("4 of 12 steps are left from position 8", 4, {"warmup_steps": 50}),
            ("6 steps are recorded before iteration 6, .* fitting on 8 needs as many", 8, {"warmup_steps": 6}),
            ("1 steps are recorded before iteration 1", 2, {"warmup_steps": 1}),
            ("warmup_steps = -1, expected a whole number from 0", 4, {"warmup_steps": -1}),
            (r"start = 12, expected a position in 0\.\.11", 4, {"start": 12}),
            (r"no layer of role embedding can be fitted \(the trace holds none\)", 4, {"roles": ("embedding",)}),
        ):
            with pytest.raises(GradlabError, match=words):
                fit_gradiveq(trace, samples=samples, **arguments)


@settings(max_examples=10, deadline=None)
@given(every=st.integers(1, 7), begin=st.integers(0, 9), samples=st.integers(2, 6), warmup=st.integers(0, 60))
def test_the_plan_never_compresses_what_it_was_fitted_on(tmp_path_factory, every, begin, samples, warmup):
    indices = [begin + every * position for position in range(9)]
    before = [index for index in indices if index < warmup]
    with record(tmp_path_factory.mktemp("t") / "t", random_gradients(13, 9, 1), indices=indices) as trace:
        if warmup and (len(before) < samples or len(before) == len(indices)):
            with pytest.raises(NotFittable):
                fit_gradiveq(trace, samples=samples, warmup_steps=warmup)
            return
        fit = fit_gradiveq(trace, samples=samples, warmup_steps=warmup)
    expected = before[-samples:] if warmup else indices[:samples]
    assert fit.provenance["fitted_on"] == expected
    assert fit.plan.schedule.warmup_steps == fit.provenance["warmup_steps"] == (warmup or expected[-1] + 1)
    assert not any(fit.plan.schedule.compresses(step) for step in expected)
    assert not any("Compression begins" in line for line in fit.warnings)


@pytest.mark.parametrize(("start", "last"), [(4, 9), (0, 5)])
def test_a_fit_after_compression_begins_is_possible_and_warned_of(tmp_path, start, last):
    with record(tmp_path / "t", random_gradients(14, 12, 2)) as trace:
        fit = fit_gradiveq(trace, samples=6, start=start, warmup_steps=3)
    assert fit.plan.schedule.warmup_steps == 3
    assert fit.provenance["fitted_on"][-1] == last
    assert (
        f"Compression begins at iteration 3, before the fit, which needs gradients up to iteration {last}"
        in (fit.provenance["warnings"][0])
    )


def test_hold_out_refuses_what_it_cannot_measure(tmp_path):
    with record(tmp_path / "t", random_gradients(11, 12, 2)) as trace:
        with pytest.raises(GradlabError, match="codec topk is not linear; replay the plan instead"):
            holdouts_by_age(trace, [Plan.uniform(LAYERS, "topk", minimum_numel=1)], start=6)
        with pytest.raises(GradlabError, match="nothing to hold out"):
            holdouts_by_age(trace, [fit_gradiveq(trace, samples=6).plan], start=12)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 3000), every=st.integers(1, 20))
def test_age_bins_cover_every_age_once(count, every):
    ages = np.arange(1, count + 1) * every
    bins = age_bins(ages)
    assert len(bins) <= 8
    assert sum(((ages >= first) & (ages <= last)).sum() for first, last in bins) == count
    assert all(earlier[1] + 1 == later[0] for earlier, later in pairwise(bins))


def test_progress_counts_to_the_end(tmp_path):
    calls = []
    with record(tmp_path / "t", random_gradients(12, 12, 2)) as trace:
        fit_gradiveq(trace, samples=6, progress=lambda *call: calls.append(call))
        measure_spectrum(trace, progress=lambda *call: calls.append(call))
    kinds = {what for what, _, _ in calls}
    assert kinds == {"fit", "hold out", "spectrum"}
    for kind in kinds:  # from nothing to all, counted in values
        done, totals = zip(*(call[1:] for call in calls if call[0] == kind), strict=True)
        assert [*done] == sorted(done)
        assert (done[0], done[-1], {*totals}) == (0, totals[0], {totals[0]})


# --- numbers as text ----------------------------------------------------------------------------------------------


def test_numbers_read_well():
    for function, texts in {
        format_bytes: {0: "0 B", 999: "999 B", 999.6: "1.00 kB", 1_234_567: "1.23 MB", 999_600: "1.00 MB", None: "-"},
        format_seconds: {0.0: "0 s", 0.0123: "12.3 ms", 0.99996: "1.00 s", 2.5e-7: "250 ns", 125: "2 min 05 s"},
        format_percent: {0.12345: "12.3 %", 0.0: "0.0 %", 0.00002: "0.002 %", None: "-"},
        format_ratio: {9.996: "10.0x", 1: "1.00x"},
        format_number: {0.012345: "0.0123", math.inf: "inf"},
        format_count: {1234567: "1\u202f234\u202f567"},
    }.items():
        assert {value: function(value) for value in texts} == texts
    assert format_seconds(math.nan) == "-"


def test_plain_makes_json_of_arrays_and_of_what_is_not_finite():
    value = {1: np.array([1.5, np.nan]), "a": (np.int64(3), math.inf), "b": [True, None, Layer]}
    assert plain(value) == {"1": [1.5, None], "a": [3, None], "b": [True, None, str(Layer)]}
