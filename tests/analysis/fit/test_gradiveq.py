"""Fitting GradiVeQ beyond the paper: pooled slices, ratios, byte budgets, random complements, what layers are told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.analysis.fit.gradiveq import PAPER, fit_gradiveq
from gradlab.analysis.replay import replay
from gradlab.artifact import Artifact
from gradlab.codec import Context, Tensors, exchange_group
from gradlab.codecs.gradiveq import DENSE, GradiVeQ
from gradlab.codecs.qsgd import QSGD
from gradlab.codecs.topk import TopK
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer, flatten
from gradlab.learning.slice_pca import fitted_slices
from gradlab.plan import Plan
from gradlab.plan.plan import FINITE_FLAG_BYTES
from gradlab.wrappers.error_feedback import ErrorFeedback
from support.laws import law, thorough
from support.recorded import CONVOLUTION, LINEAR, random_gradients, record

SIZE, SLICES = 40, 6
LAYER = Layer("w", (SIZE, SLICES, 1, 1), "convolution")  # K = F: slice m is what belongs to input m


def planted(rank: int, seed: int) -> tuple[torch.Tensor, torch.Generator]:
    """An orthonormal basis (K, rank) that all slices share, and a generator for `sample`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(SIZE, rank, generator=generator).double()).Q, generator


def sample(basis: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    """A gradient of the layer whose slices are signal in the basis, of unit variance per axis, under white noise."""
    signal = torch.randn(SLICES, basis.shape[1], generator=generator).double() @ basis.T
    slices = signal + noise * torch.randn(SLICES, SIZE, generator=generator).double()
    return slices.T.reshape(LAYER.shape).contiguous()


def loss(codec: GradiVeQ, gradients: list[torch.Tensor]) -> float:
    """Energy lost in one exchange, over all; the iterations differ, and with them coordinates."""
    lost = total = 0.0
    for step, gradient in enumerate(gradients):
        (done,) = run_lockstep([exchange_group(codec, {"w": gradient}, {}, Context(0, 1, step, "w"))])
        lost += float((done.value.mean["w"] - gradient).square().sum())
        total += float(gradient.square().sum())
    return lost / total


# --- what theory says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.5, thorough(0.1), thorough(1.0)])
def test_a_pca_half_beats_a_random_basis_by_the_margin_of_theory(noise: float) -> None:
    """Signal of r unit axes under white noise: with d codes of K, half of them of fitted axes (r <= d / 2), what is
    lost is the noise outside of these, (K - d/2) noise^2, less the share (d/2) / K; random coordinates alone lose
    (1 - d/K) of all."""
    rank, width = 4, 10
    basis, generator = planted(rank, 1)
    shared = {"slice_size": SIZE, "ratio": SIZE / width, "whitening": False, "compressed_steps": 0}
    samples = {"w": torch.stack([sample(basis, noise, generator) for _ in range(400)])}
    half = GradiVeQ(GradiVeQ.Settings(complement=0.5, pooled=9, **shared)).fit([LAYER], samples)
    alone = GradiVeQ(GradiVeQ.Settings(complement=1.0, **shared))
    later = [sample(basis, noise, generator) for _ in range(300)]
    energy = rank + SIZE * noise**2
    outside = 1 - width / 2 / SIZE
    assert loss(alone, later) == pytest.approx(1 - width / SIZE, rel=0.05)
    assert loss(half, later) == pytest.approx(outside**2 * SIZE * noise**2 / energy, rel=0.03)


def test_pooled_slices_find_what_the_first_alone_cannot() -> None:
    """Six slices share their covariance: six times the samples, and less noise in the axes."""
    basis, generator = planted(3, 2)
    samples = {"w": torch.stack([sample(basis, 0.4, generator) for _ in range(12)])}
    later = [sample(basis, 0.4, generator) for _ in range(100)]
    shared = {"slice_size": SIZE, "ratio": SIZE / 3, "whitening": False, "compressed_steps": 0}
    first, all_of_them = (
        loss(GradiVeQ(GradiVeQ.Settings(pooled=pooled, **shared)).fit([LAYER], samples), later) for pooled in (1, 9)
    )
    assert all_of_them < 0.9 * first


@pytest.mark.parametrize("reuse", [None, 1, 2, 4])
def test_pooled_bases_are_those_of_the_slices_they_serve(reuse: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(15, *LAYER.shape, generator=generator).double()
    settings = GradiVeQ.Settings(slice_size=SIZE, reuse=reuse, ratio=8, pooled=9, whitening=False)
    basis = GradiVeQ(settings).fit([LAYER], {"w": samples}).learned["w/basis"].double()
    slices = torch.stack([flatten(one, "gradiveq") for one in samples]).view(15, SLICES, SIZE)
    for b, served in enumerate(torch.arange(SLICES).split(reuse or SLICES)):
        rows = slices[:, served].reshape(-1, SIZE)
        _, vectors = torch.linalg.eigh(rows.T @ rows)
        cosines = torch.linalg.svdvals(vectors[:, -5:].T @ basis[b])
        torch.testing.assert_close(cosines, torch.ones(5).double(), atol=1e-5, rtol=0)


# --- how many axes --------------------------------------------------------------------------------------------------


@law(st.integers(0, 30), st.integers(1, 9), st.integers(1, 9))
def test_slices_that_are_fitted_on_are_spread_over_those_served(slices: int, reuse: int, pooled: int) -> None:
    chosen = fitted_slices(slices, reuse, pooled)
    for b, run in enumerate(chosen):
        served = range(b * reuse, min((b + 1) * reuse, slices))
        assert run[0] == served[0]
        assert set(run) <= set(served)
        assert len(set(run)) == len(run) == min(pooled, len(served))
        gaps = np.diff([*run, run[0] + len(served)])
        assert max(gaps) - min(gaps) <= 1
    assert len(chosen) == -(-slices // reuse)
    assert fitted_slices(slices, None) == ([[0]] if slices else [])


@pytest.mark.parametrize("complement", [0.0, 0.25, 0.5, 1.0])
def test_a_ratio_is_kept(complement: float) -> None:
    """d = K / ratio, fitted axes and random coordinates together."""
    draw = torch.Generator().manual_seed(0)
    settings = GradiVeQ.Settings(slice_size=SIZE, ratio=5.0, complement=complement, compressed_steps=0)
    codec = GradiVeQ(settings).fit([LAYER], {"w": torch.randn(30, *LAYER.shape, generator=draw)})
    (done,) = run_lockstep(
        [exchange_group(codec, {"w": torch.randn(LAYER.shape, generator=draw)}, {}, Context(0, 1, 0))]
    )
    assert done.payload_bytes == 4 * SLICES * 8 == codec.forecast([LAYER], 1).payload


def test_a_complement_takes_what_too_few_samples_leave() -> None:
    """Three samples hold two axes around their mean: of ten, eight are random, whatever the share."""
    samples = torch.randn(3, *LAYER.shape, generator=torch.Generator().manual_seed(0))
    fitted = {}
    for complement in (0.0, 0.2):
        settings = GradiVeQ.Settings(slice_size=SIZE, ratio=4.0, complement=complement)
        fitted[complement] = GradiVeQ(settings).fit([LAYER], {"w": samples}).learned
    assert fitted[0.0]["w/basis"].shape[2] == 2 == int(fitted[0.0]["w/width"])
    assert fitted[0.2]["w/basis"].shape[2] == 2
    assert int(fitted[0.2]["w/width"]) == 10


# --- online ---------------------------------------------------------------------------------------------------------


def train(codec: GradiVeQ | ErrorFeedback, gradients: list[list[torch.Tensor]]) -> tuple[list[Tensors], list[float]]:
    """Rank 0's states after each iteration, and payloads. gradients: by step and rank."""
    states: list[Tensors] = [{} for _ in gradients[0]]
    seen, payloads = [], []
    for step, ranks in enumerate(gradients):
        context = Context(0, len(ranks), step, "w")
        parts = [exchange_group(codec, {"w": g}, states[r], replace(context, rank=r)) for r, g in enumerate(ranks)]
        results = run_lockstep(parts)
        states = [result.value.state for result in results]
        assert all(torch.equal(state["w/clock"], states[0]["w/clock"]) for state in states)
        seen.append(states[0])
        payloads.append(results[0].payload_bytes)
    return seen, payloads


def test_random_coordinates_alone_keep_no_state_and_send_everything_in_time() -> None:
    codec = GradiVeQ(GradiVeQ.Settings(slice_size=SIZE, ratio=4.0, complement=1.0))
    constant = torch.randn(LAYER.shape, generator=torch.Generator().manual_seed(0)).double()
    states, total = [{}], torch.zeros(LAYER.shape).double()
    stack = ErrorFeedback(codec)
    for step in range(200):
        (done,) = run_lockstep([exchange_group(stack, {"w": constant}, states[0], Context(0, 1, step, "w"))])
        states = [done.value.state]
        total += done.value.mean["w"]
    assert set(states[0]) == {"w/residual"}
    assert float((total / 200 - constant).norm() / constant.norm()) < 0.05


def test_a_layer_that_was_not_fitted_beside_others_is_dense() -> None:
    other = Layer("v", LAYER.shape, "convolution")
    draw = torch.Generator().manual_seed(0)
    samples = {"w": torch.randn(9, *LAYER.shape, generator=draw)}
    codec = GradiVeQ(GradiVeQ.Settings(slice_size=SIZE, compressed_steps=0)).fit([LAYER], samples)
    grads = {name: torch.randn(LAYER.shape, generator=draw) for name in "wv"}
    (done,) = run_lockstep([exchange_group(codec, grads, {}, Context(0, 1, 0))])
    assert torch.equal(done.value.mean["v"], grads["v"])
    assert int(done.value.state["v/clock"][0]) == DENSE
    assert done.payload_bytes == codec.forecast([LAYER, other], 1).payload


def test_means_do_not_depend_on_the_number_of_ranks() -> None:
    """The paper's mu / N: fitted on the averages of four nodes, used at two, where it is still the average's mean."""
    draw = torch.Generator().manual_seed(0)
    offset = 3 + torch.randn(LAYER.shape, generator=draw).double()
    nodes = [[offset + 0.1 * torch.randn(LAYER.shape, generator=draw).double() for _ in range(4)] for _ in range(30)]
    samples = {"w": torch.stack([sum(step) / 4 for step in nodes])}
    codec = GradiVeQ(GradiVeQ.Settings(slice_size=SIZE, ratio=20.0, compressed_steps=0)).fit([LAYER], samples)
    for ranks in (1, 2, 4, 7):
        grads = [offset + 0.1 * torch.randn(LAYER.shape, generator=draw).double() for _ in range(ranks)]
        context = Context(0, ranks, 0)
        parts = [exchange_group(codec, {"w": g}, {}, replace(context, rank=r)) for r, g in enumerate(grads)]
        mean = run_lockstep(parts)[0].value.mean["w"]
        average = sum(grads) / ranks
        assert float((mean - average).norm() / average.norm()) < 0.05


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.5])
@pytest.mark.parametrize("pooled", [1, 3])
def test_slices_that_never_change_cost_one_axis(value: float, pooled: int) -> None:
    """Zero, or constant: the mean, or the one axis they span without one, is all there is."""
    constant = torch.full((8, *LAYER.shape), value)
    for whitening in (True, False):
        settings = GradiVeQ.Settings(slice_size=SIZE, pooled=pooled, whitening=whitening, compressed_steps=0)
        codec = GradiVeQ(settings).fit([LAYER], {"w": constant})
        codec.check([LAYER])
        assert codec.learned["w/basis"].shape == (1, SIZE, 1)
        (done,) = run_lockstep([exchange_group(codec, {"w": constant[0]}, {}, Context(0, 1, 0))])
        torch.testing.assert_close(done.value.mean["w"], constant[0])


def test_all_axes_lose_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    samples = torch.randn(60, *LAYER.shape, generator=draw).double()
    codec = GradiVeQ(GradiVeQ.Settings(0.0, SIZE, pooled=9, compressed_steps=0)).fit([LAYER], {"w": samples})
    assert codec.learned["w/basis"].shape == (1, SIZE, SIZE)
    assert loss(codec, [torch.randn(LAYER.shape, generator=draw).double()]) < 1e-10


def test_fits_that_cannot_be(tmp_path: Path) -> None:
    name = CONVOLUTION.name
    with record(tmp_path / "t", random_gradients(0, 12, 2)) as trace:
        for words, arguments in (
            ("settings for nope: no layer of role convolution, .* has that name", {"layer_settings": {"nope": {}}}),
            ("one of off, absolute, normalised", {"layer_settings": {name: {"monitor": "cry"}}}),
            ("gradiveq has no setting size", {"layer_settings": {name: {"size": 1}}}),
            ("nothing to fit", {"settings": GradiVeQ.Settings(complement=1.0, ratio=4.0)}),
            ("at least 2", {"samples": 1}),
        ):
            with pytest.raises(GradlabError, match=words):
                fit_gradiveq(trace, **{"samples": 8, **arguments})


# --- the paper's cycle -----------------------------------------------------------------------------------------------


def test_a_paper_fit_samples_and_fits_again_in_the_run(tmp_path: Path) -> None:
    """The signal's subspace turns as the second sampling begins: its bases hold the new one, kept ones would not."""
    (before, generator), (after, _) = planted(3, 0), planted(3, 1)
    recorded = [
        [{"w": sample(basis, 0.01, generator).float().numpy()} for _ in range(2)]
        for basis in [before] * 25 + [after] * 25
    ]
    shared = {"slice_size": SIZE, "sample_steps": 10, "compressed_steps": 15}
    with record(tmp_path / "t", recorded, [LAYER]) as trace:
        fit = fit_gradiveq(trace, samples=10, settings=replace(PAPER, **shared))
        steps = replay(trace, fit.plan).steps
        kept = fit_gradiveq(trace, samples=10, settings=replace(PAPER, **shared | {"compressed_steps": 0}))
        stale = replay(trace, kept.plan).steps
    payloads = [step.payload_bytes_mean for step in steps]
    quantized = QSGD(QSGD.Settings(4)).forecast([LAYER], 2).payload + FINITE_FLAG_BYTES
    assert payloads[:10] == [4 * LAYER.numel] * 10
    assert payloads[10:25] == [fit.measured.payload_bytes] * 15
    assert payloads[25:34] == [quantized] * 9
    assert payloads[34] == quantized + 40  # digests of the new bases
    assert len(set(payloads[35:])) == 1
    errors = [step.aggregate_error for step in steps]
    assert max(errors[10:25]) < 0.1
    assert max(errors[35:]) < 0.3 < 0.9 < min(step.aggregate_error for step in stale[35:])
    compressed, sampled = fit.measured.payload_bytes, quantized
    # A cycle's mean, but for the digests of its last sample.
    assert fit.measured.mean_payload_bytes == pytest.approx((15 * compressed + 10 * sampled) / 25)
    assert fit.measured.mean_saving.ratio < fit.measured.saving.ratio


def test_the_papers_constants() -> None:
    assert (PAPER.sample_steps, PAPER.compressed_steps, PAPER.loss_threshold, PAPER.sample_bits) == (100, 400, 0.01, 4)
    assert (PAPER.refresh, PAPER.complement, PAPER.reuse) == ("sample", 0, None)


# --- offline to online ----------------------------------------------------------------------------------------------


def test_the_artifact_carries_schedule_and_monitor_layer_by_layer(tmp_path: Path) -> None:
    layers = (CONVOLUTION, Layer("second.weight", (4, 4, 3, 3), "convolution"), LINEAR)
    settings = GradiVeQ.Settings(
        slice_size=8, compressed_steps=40, sample_steps=10, monitor="normalised", complement=0.5, ratio=2.0
    )
    with record(tmp_path / "t", random_gradients(1, 30, 2, layers), layers) as trace:
        fit = fit_gradiveq(trace, samples=10, settings=settings, layer_settings={"second.weight": {"monitor": "off"}})
    plan = Artifact.load(fit.artifact().save(tmp_path / "plan")).plan
    monitors = {group.name: group.settings["monitor"] for group in plan.groups}
    assert monitors == {CONVOLUTION.name: "normalised", "second.weight": "off", LINEAR.name: "normalised"}
    assert all(group.settings["compressed_steps"] == 40 for group in plan.groups)
    assert all(group.wrappers[0].name == "error_feedback" for group in plan.groups)
    assert {key.rpartition("/")[2] for key in plan.learned[CONVOLUTION.name]} == {"basis", "mean", "width"}
    assert len(fit.provenance["holdout"]["loss_by_age"]) == len(fit.provenance["holdout"]["ages"])
    assert json.loads(json.dumps(fit.provenance)) == fit.provenance == Artifact.load(tmp_path / "plan").provenance
    assert list(fit.provenance)[:4] == ["method", "trace", "world_size", "settings"]
    assert fit.provenance["warnings"] == fit.measured.warnings == fit.warnings


def test_a_fit_says_what_its_roles_leave_dense(tmp_path: Path) -> None:
    layers = (CONVOLUTION, Layer("wide", (40, 30), "linear"), Layer("stack_bias", (2, 500), "bias"))
    with record(tmp_path / "t", random_gradients(1, 8, 2, layers), layers) as trace:
        fit = fit_gradiveq(trace, samples=4, roles=("convolution",))
        assert fit.warnings[0].endswith("dense: linear 4.80 kB (1 layer). Name their roles to compress them.")
        assert fit.provenance["left_dense"] == fit.warnings[0]
        assert not fit_gradiveq(trace, samples=4, roles=("convolution", "linear")).measured.left_dense
        with pytest.raises(GradlabError, match=r"no layer of role experts .*; there are linear 4\.80 kB"):
            fit_gradiveq(trace, samples=4, roles=("experts",))
        with pytest.raises(GradlabError, match="role 'conv': expected one of"):
            fit_gradiveq(trace, samples=4, roles=("conv",))


def test_a_codecs_default_layers_and_warm_up() -> None:
    layers = (CONVOLUTION, Layer("wide.weight", (20, 40), "linear"), Layer("big.weight", (8, 8, 3, 3), "convolution"))
    paper = Plan.uniform(layers, "gradiveq")
    assert [group.name for group in paper.groups] == ["wide.weight", "big.weight"]  # conv.weight is too small
    assert paper.schedule.warmup_steps == 2500
    settings = GradiVeQ.Settings()
    assert (settings.loss_threshold, settings.reuse, settings.sample_steps, settings.compressed_steps) == (
        0.01,
        None,
        100,
        400,
    )
    chosen = Plan.uniform(layers, "gradiveq", roles=("linear",), warmup_steps=3)
    assert [group.name for group in chosen.groups] == ["wide.weight"]
    assert chosen.schedule.warmup_steps == 3
    assert TopK.about.defaults.warmup_steps == 0
    assert [group.name for group in Plan.uniform(layers, "topk").groups] == ["wide.weight", "big.weight"]


@law(
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([None, 1, 2]),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 99),
    examples=60,
)
def test_compressed_sums_are_compressed_sums(
    ranks: int, dtype: torch.dtype, reuse: int | None, ring: bool, complement: float, seed: int
) -> None:
    """Eq. (1), in every form: sum over ranks of Q(g_n) == Q(sum of g_n), random coordinates and rings included."""
    draw = torch.Generator().manual_seed(seed)
    shape = tuple(int(n) for n in torch.randint(1, 5, (4,), generator=draw))
    layer = Layer("w", shape)
    slice_size = max(1, layer.numel // 3)
    settings = GradiVeQ.Settings(
        slice_size=slice_size, reuse=reuse, ratio=2.0, complement=complement, ring=ring, whitening=bool(seed % 2)
    )
    codec = GradiVeQ(settings).fit([layer], {"w": torch.randn(6, *shape, generator=draw)})
    grads = [torch.randn(shape, generator=draw).to(dtype) for _ in range(ranks)]
    context = Context(0, ranks, 4, "w")
    parts = [exchange_group(codec, {"w": g}, {}, replace(context, rank=r)) for r, g in enumerate(grads)]
    together = run_lockstep(parts)
    (alone,) = run_lockstep([exchange_group(codec, {"w": sum(grads) / ranks}, {}, Context(0, 1, 4, "w"))])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-5  # bases are float32
    for result in together:
        torch.testing.assert_close(result.value.mean["w"], alone.value.mean["w"], atol=tolerance, rtol=tolerance)
    assert math.isfinite(float(alone.value.mean["w"].sum()))
