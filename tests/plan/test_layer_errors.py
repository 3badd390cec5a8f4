"""Errors of settings on one layer: shortcuts against the codecs themselves, and a table against a slow reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.analysis.replay.error_tables import ErrorTable, accumulated, measure_errors, windows_of
from gradlab.codec import Codec, Context, exchange_group
from gradlab.codecs.powersgd import low_rank_errors
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan.layer_errors import Candidate, squared_errors
from gradlab.trace import Trace
from support.laws import law
from support.recorded import CONVOLUTION, LINEAR, random_gradients, record

MATRIX = Layer("w", (24, 20), "linear")
seeds = st.integers(0, 2**32 - 1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_exchange(codec: Codec, layer: Layer, gradient: torch.Tensor, rounds: int = 1) -> float:
    """||x - C(x)||^2 of a rank alone, after `rounds` iterations on the same gradient."""
    state: dict[str, torch.Tensor] = {}
    for iteration in range(rounds):
        run = exchange_group(codec, {layer.name: gradient}, state, Context(0, 1, iteration, group=layer.name))
        [result] = run_lockstep([run])
        state = result.value.state
    return float((gradient - result.value.own[layer.name]).double().norm()) ** 2


@law(seeds, st.sampled_from([(24, 20), (1, 300), (300, 1), (7, 7), (5, 3, 2, 2)]), examples=30)
def test_densities_share_one_sort(seed: int, shape: tuple[int, ...]) -> None:
    layer = Layer("w", shape, "linear")
    gradient = torch.randn(shape, generator=generator(seed)) ** 3
    candidates = [Candidate("topk", {"density": density}) for density in (1.0, 0.3, 0.01, 0.1)]
    expected = [by_exchange(candidate.build(), layer, gradient) for candidate in candidates]
    assert squared_errors(layer, gradient, candidates) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@law(seeds, st.tuples(st.integers(1, 30), st.integers(1, 30)), st.integers(1, 12), examples=60)
def test_ranks_share_one_decomposition(seed: int, shape: tuple[int, int], columns: int) -> None:
    """Both methods against singular values; power steps never promise more than there is."""
    left, right = (torch.randn(n, columns, generator=generator(seed + n)) for n in shape)
    matrix = left @ right.T + 0.1 * torch.randn(shape, generator=generator(seed))
    ranks = [1, 2, 5, 100]
    energies = torch.linalg.svdvals(matrix.double()) ** 2
    best = [float(energies[rank:].sum()) for rank in ranks]
    scale = float(energies.sum())
    assert low_rank_errors(matrix, ranks, method="svd") == pytest.approx(best, abs=1e-9 * scale)
    errors = low_rank_errors(matrix, ranks, method="power", generator=generator(seed))
    for one, least in zip(errors, best, strict=True):
        assert least - 1e-6 * scale <= one <= least + 0.1 * scale
    assert low_rank_errors(matrix, ranks) in (errors, low_rank_errors(matrix, ranks, method="svd"))
    for factor in (1e-30, 1e34):
        other = low_rank_errors(factor * matrix, ranks, method="power", generator=generator(seed))
        assert [one / factor**2 for one in other] == pytest.approx(errors, rel=0.01, abs=1e-6 * scale)


def test_five_power_steps_come_close_and_the_cheaper_method_is_taken() -> None:
    spectrum = torch.diag(0.7 ** torch.arange(60.0))
    bases = [torch.linalg.qr(torch.randn(n, 60, generator=generator(n))).Q for n in (400, 300)]
    matrix = bases[0] @ spectrum @ bases[1].T
    exact = low_rank_errors(matrix, range(1, 9), method="svd")
    power = low_rank_errors(matrix, range(1, 9), method="power", generator=generator(1))
    assert power == pytest.approx(exact, rel=0.02)
    # Few ranks of a large matrix: power steps; many ranks: all singular values at once (appendix B.3).
    few, many = low_rank_errors(matrix, [2], generator=generator(1)), low_rank_errors(matrix, range(32, 65))
    assert few == low_rank_errors(matrix, [2], method="power", generator=generator(1))
    assert many == low_rank_errors(matrix, range(32, 65), method="svd")


@pytest.mark.parametrize(("ranks", "method", "message"), [([0], "svd", "rank = 0"), ([1], "magic", "method = 'magic'")])
def test_what_no_decomposition_can_do_is_named(ranks: list[int], method: str, message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        low_rank_errors(torch.ones(3, 3), ranks, method=method)


def test_powersgd_comes_to_what_the_table_says() -> None:
    """The codec's own warm start on one gradient; a layer that it sends dense has no error."""
    gradient = torch.randn(24, 20, generator=generator(3)) @ torch.diag(0.6 ** torch.arange(20.0))
    candidates = [Candidate("powersgd", {"rank": rank}) for rank in (1, 3, 8, 16)]
    errors = squared_errors(MATRIX, gradient, candidates)
    expected = [by_exchange(candidate.build(), MATRIX, gradient, rounds=30) for candidate in candidates]
    assert errors == pytest.approx(expected, rel=0.02, abs=1e-6)
    assert errors[-1] == 0.0  # 16 columns of both factors are no smaller than the matrix


@pytest.mark.parametrize("name", [n for n in codecs.names() if n not in ("gradiveq",)])
def test_every_codec_has_an_error_for_each_candidate(name: str) -> None:
    """Finite, and at most the delta that the codec states."""
    gradient = torch.randn(24, 20, generator=generator(5))
    candidates = [Candidate(name, settings) for settings in codecs.get(name).about.candidates]
    errors = squared_errors(MATRIX, gradient, candidates)
    assert len(errors) == len(candidates)
    assert all(np.isfinite(error) and error >= 0 for error in errors)
    for candidate, error in zip(candidates, errors, strict=True):
        delta = candidate.build().guarantees([MATRIX]).delta
        if delta is not None and name != "random_k":  # whose delta is a mean over draws
            assert error <= (1 - delta) * float(gradient.norm()) ** 2 * (1 + 1e-5) + 1e-6


def test_candidates_of_several_codecs_keep_their_places() -> None:
    gradient = torch.randn(24, 20, generator=generator(7))
    candidates = [
        Candidate("topk", {"density": 0.1}),
        Candidate("powersgd", {"rank": 2}),
        Candidate("identity"),
        Candidate("topk", {"density": 0.5}),
        Candidate("powersgd", {"rank": 4}),
    ]
    alone = [squared_errors(MATRIX, gradient, [candidate])[0] for candidate in candidates]
    assert squared_errors(MATRIX, gradient, candidates) == pytest.approx(alone, rel=0.01)
    assert alone[2] == 0.0


# --- tables over a trace ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(tmp_path_factory.mktemp("tables") / "t", random_gradients(1, 11, 3), loss_scale=8.0)


CANDIDATES = {
    CONVOLUTION.name: [Candidate("topk", {"density": 0.1}), Candidate("qsgd", {"bits": 3}), Candidate("identity")],
    LINEAR.name: [Candidate("powersgd", {"rank": 1}), Candidate("topk", {"density": 0.2})],
}


def same(one: ErrorTable, other: ErrorTable) -> bool:
    pairs = zip(one.layers, other.layers, strict=True)
    return one.windows == other.windows and all(
        a.layer == b.layer and np.array_equal(a.squared_l2, b.squared_l2) and np.array_equal(a.l2, b.l2)
        for a, b in pairs
    )


def test_a_table_is_the_mean_over_ranks_of_what_each_makes_of_its_window(trace: Trace) -> None:
    """Accumulated by hand from the recorded steps, free of the loss scale."""
    windows = windows_of(0, 11, 4)
    assert windows == [(3, 7), (7, 11)]
    table = measure_errors(trace, CANDIDATES, windows)
    assert table.windows == ((3, 6), (7, 10))
    steps = list(trace.iterate())
    for row in table.layers:
        for place, (first, stop) in enumerate(windows):
            errors, norms = [], []
            for rank in range(3):
                sums = sum(step.gradients[rank][row.layer.name].astype(np.float64) for step in steps[first:stop])
                mean = torch.from_numpy((sums / 8 / 4).astype(np.float32))
                torch.testing.assert_close(accumulated(trace, row.layer, rank, first, stop), mean)
                errors.append(squared_errors(row.layer, mean, row.candidates, seed=rank))
                norms.append(float(mean.norm()))
            np.testing.assert_allclose(row.squared_l2[place], np.mean(errors, axis=0), rtol=1e-4)
            np.testing.assert_allclose(row.l2[place], np.mean(np.sqrt(errors), axis=0), rtol=1e-4)
            assert row.squared_norm[place] == pytest.approx(np.mean(np.square(norms)), rel=1e-5)
            assert row.norm[place] == pytest.approx(np.mean(norms), rel=1e-5)
    relative = table.relative_error([0, 1], "squared-l2")
    total = sum(row.squared_l2[:, c].sum() for row, c in zip(table.layers, (0, 1), strict=True))
    assert relative == pytest.approx((total / sum(row.squared_norm.sum() for row in table.layers)) ** 0.5)
    summed = sum(row.l2[1, c] for row, c in zip(table.layers, (0, 1), strict=True))
    share = summed / sum(row.norm[1] for row in table.layers)
    assert table.relative_error([0, 1], "l2", slice(1, 2)) == pytest.approx(share)
    assert table.relative_error([0, 1], "l2") != pytest.approx(relative, rel=1e-3)


@law(st.integers(0, 20), st.integers(1, 40), st.integers(1, 40))
def test_windows_follow_each_other_to_the_end(first: int, count: int, length: int) -> None:
    """What fills no window is left out where it is oldest."""
    stop = first + count
    if length > count:
        with pytest.raises(GradlabError, match=f"window = {length}, expected 1 to {count}"):
            windows_of(first, stop, length)
        return
    windows = windows_of(first, stop, length)
    assert [a for a, _ in windows] == list(range(stop - length * (count // length), stop, length))
    assert [b for _, b in windows] == [a + length for a, _ in windows]


@pytest.mark.thorough
def test_workers_measure_what_one_process_does(trace: Trace) -> None:
    windows = windows_of(0, 11, 5)
    seen: list[tuple[int, int]] = []
    alone = measure_errors(trace, CANDIDATES, windows, progress=lambda _, done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == [0, *sorted(done for done, _ in seen[1:])]
    assert [seen[-1][0], len(seen)] == [seen[-1][1], 3]
    assert same(alone, measure_errors(trace, CANDIDATES, windows, workers=2))


def test_large_layers_are_read_in_parts(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure_errors(trace, CANDIDATES, [(0, 11)])
    monkeypatch.setattr("gradlab.analysis.replay.error_tables._BLOCK_VALUES", 16 * 7)
    assert same(whole, measure_errors(trace, CANDIDATES, [(0, 11)]))


def test_what_cannot_be_measured_is_named(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(GradlabError, match="window = 12, expected 1 to 11"):
        windows_of(0, 11, 12)
    with pytest.raises(GradlabError, match="no window"):
        measure_errors(trace, CANDIDATES, [])
    with pytest.raises(GradlabError, match="no layer 'nosuch'"):
        measure_errors(trace, {"nosuch": []}, [(0, 2)])
    with pytest.raises(GradlabError, match="metric 'loud'"):
        measure_errors(trace, CANDIDATES, [(0, 2)]).errors("loud")
    steps = random_gradients(2, 4, 2)
    steps[2][1][LINEAR.name][0, 0] = np.nan
    with (
        record(tmp_path / "t", steps) as broken,
        pytest.raises(GradlabError, match=r"no step between iterations 2 and 2 is finite on all ranks.*--window"),
    ):
        measure_errors(broken, CANDIDATES, [(0, 2), (2, 3)])


def test_steps_that_a_loss_scaler_skips_are_left_out_of_windows(tmp_path: Path) -> None:
    steps = random_gradients(2, 4, 2)
    with record(tmp_path / "sound", [steps[0], steps[1], steps[3]]) as sound:
        expected = measure_errors(sound, CANDIDATES, [(0, 3)])
    steps[2][1][LINEAR.name][0, 0] = np.inf
    with record(tmp_path / "skipped", steps) as skipped:
        table = measure_errors(skipped, CANDIDATES, [(0, 4)])
    for one, other in zip(table.layers, expected.layers, strict=True):
        np.testing.assert_array_equal(one.squared_l2, other.squared_l2)
        assert one.squared_norm == other.squared_norm
