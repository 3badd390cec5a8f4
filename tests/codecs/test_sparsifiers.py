"""Global top-k, random-k, both thresholds, CLT-k and the DCT's top-k, each against an explicit simulation in numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st
from scipy import fft, stats

from gradlab.codec import Codec, Compressor, Context, Tensors, exchange_group
from gradlab.codec.sparsifier import at_least, count_of, largest
from gradlab.codecs.clt_k import CLTK
from gradlab.codecs.dct_topk import DCTTopK, alike_chunks, cosines, restore, tiles, transform
from gradlab.codecs.random_k import RandomK, distinct
from gradlab.codecs.sampled_threshold import SampledThreshold
from gradlab.codecs.threshold import Threshold
from gradlab.codecs.topk import TopK
from gradlab.coding.positions import CODINGS
from gradlab.collectives import run_lockstep
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.wrappers.error_feedback import ErrorFeedback
from support.laws import law

SHAPES = {"a": (9, 12), "b": (40,), "c": (), "d": (0, 3), "e": (6, 2, 3, 3)}
LAYERS = [Layer(name, shape) for name, shape in SHAPES.items()]
NUMEL = sum(layer.numel for layer in LAYERS)
seeds = st.integers(0, 10_000)


def draw(rank: int, step: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def flat(tensors: Any) -> np.ndarray:
    return np.concatenate([tensors[name].numpy().reshape(-1) for name in SHAPES])


def exchange(codec: Codec, grads: Sequence[Tensors], states: Sequence[Tensors] | None = None, step: int = 0) -> Any:
    ranks = len(grads)
    states = states or [{}] * ranks
    return run_lockstep(
        [exchange_group(codec, grads[r], states[r], Context(r, ranks, step, "g")) for r in range(ranks)]
    )


def kept(vector: np.ndarray, positions: Any) -> np.ndarray:
    result = np.zeros_like(vector)
    result[positions] = vector[positions]
    return result


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- global top-k ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["fixed", "smallest", "raw", "packed", "bitmap", "deflate"])
def test_global_top_k_is_one_argsort_over_the_model(coding: str) -> None:
    plan = Plan.uniform(
        LAYERS, "topk", density=0.1, index_coding=coding, group_bytes=math.inf, minimum_dimensions=0, minimum_numel=0
    )
    (group,) = plan.groups
    assert group.layers == tuple(SHAPES)
    grads = [draw(rank) for rank in range(3)]
    results = exchange(plan.build(group), grads)
    count = math.ceil(0.1 * NUMEL)
    sent = [kept(flat(g), np.argsort(-np.abs(flat(g)), kind="stable")[:count]) for g in grads]
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(flat(result.value.own), sent[rank])
        np.testing.assert_allclose(flat(result.value.mean), np.mean(sent, 0), rtol=1e-12)


# --- random-k -------------------------------------------------------------------------------------------------------


@law(st.integers(0, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), seeds)
def test_positions_are_distinct(sizes: tuple[int, int], seed: int) -> None:
    numel, count = sizes
    positions = distinct(numel, count, generator(seed))
    assert len(positions) == count
    assert torch.equal(positions, positions.unique())
    assert not count or 0 <= int(positions[0]) <= int(positions[-1]) < numel


@pytest.mark.parametrize(("numel", "count"), [(5, 2), (6, 5)])
def test_every_set_of_positions_is_as_likely(numel: int, count: int) -> None:
    """A chi-squared test at one in a million, on draws that are the same in each run."""
    draws = [tuple(distinct(numel, count, generator(seed)).tolist()) for seed in range(4000)]
    counts = [draws.count(one) for one in set(draws)]
    assert len(counts) == math.comb(numel, count)
    assert stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.7, 1.0])
def test_random_k_sends_the_same_positions_everywhere(density: float, unbiased: bool) -> None:
    codec, count = RandomK(RandomK.Settings(density, unbiased)), count_of(density, NUMEL)
    grads = [draw(rank) for rank in range(3)]
    for step in range(3):
        results = exchange(codec, grads, step=step)
        positions = distinct(NUMEL, count, Context(0, 3, step, "g").random.shared()).numpy()
        factor = NUMEL / count if unbiased else 1.0
        for rank, result in enumerate(results):
            np.testing.assert_allclose(flat(result.value.own), factor * kept(flat(grads[rank]), positions))
            assert result.payload_bytes == 8 * count  # float64, and no positions
        mean = np.mean([flat(g) for g in grads], 0)
        np.testing.assert_allclose(flat(results[0].value.mean), factor * kept(mean, positions), atol=1e-12)


# --- thresholds -----------------------------------------------------------------------------------------------------


def test_a_hard_threshold_with_feedback_is_the_explicit_simulation() -> None:
    codec, states = ErrorFeedback(Threshold(Threshold.Settings(1.5))), [{}, {}]
    residual = np.zeros((2, NUMEL))
    for step in range(5):
        grads = [draw(rank, step) for rank in range(2)]
        results = exchange(codec, grads, states, step)
        states = [result.value.state for result in results]
        asked = np.stack([flat(g) for g in grads]) + residual
        sent = np.where(np.abs(asked) >= 1.5, asked, 0.0)
        residual = asked - sent
        np.testing.assert_allclose(flat(results[0].value.mean), sent.mean(0), atol=1e-12)
        assert (np.abs(residual) < 1.5).all()  # the absolute compressor's bound


def test_a_measured_threshold_is_kept() -> None:
    """The mean over ranks of the first iteration's k-th largest magnitudes, then the same for good; not from zeros."""
    codec, grads = Threshold(Threshold.Settings(density=0.1)), [draw(rank) for rank in range(3)]
    nothing = [{name: torch.zeros_like(value) for name, value in g.items()} for g in grads]
    results = exchange(codec, nothing)
    assert not flat(results[0].value.mean).any()
    assert results[0].value.state == {}
    results = exchange(codec, grads, [result.value.state for result in results], 1)
    kth = [np.sort(np.abs(flat(g)))[-count_of(0.1, NUMEL)] for g in grads]
    assert float(results[0].value.state["a/threshold"][0]) == pytest.approx(np.mean(kth))
    later = [draw(rank, 7) for rank in range(3)]
    state = [result.value.state for result in results]
    results = exchange(codec, later, state, 2)
    for g, result in zip(later, results, strict=True):
        expected = np.where(np.abs(flat(g)) >= np.mean(kth), flat(g), 0.0)
        np.testing.assert_array_equal(flat(result.value.own), expected)
        assert torch.equal(result.value.state["a/threshold"], state[0]["a/threshold"])


def test_ranks_may_send_nothing_at_all() -> None:
    """One rank, or all of them, below the threshold."""
    codec = Threshold(Threshold.Settings(50.0))
    grads = [draw(rank) for rank in range(3)]
    assert not flat(exchange(codec, grads)[0].value.mean).any()
    grads[1]["b"][3] = 90.0
    results = exchange(codec, grads)
    assert float(results[2].value.mean["b"][3]) == pytest.approx(30.0)
    assert [result.payload_bytes for result in results] == [0, 8 + 4, 0]  # a float64 and its position


@example(1071, 1.0, 7, 1071)  # too few, after ten times
@law(st.integers(1, 40_000), st.sampled_from([0.002, 0.01, 0.1, 1.0]), st.sampled_from([1, 3, 7]), seeds, examples=60)
def test_a_sampled_threshold_sends_the_largest_there_are(numel: int, density: float, power: int, seed: int) -> None:
    """At most k, all as large as anything left behind; and at least `enough` of k, or else the threshold was lowered
    ten times, and nothing that reaches it stays behind."""
    codec = SampledThreshold(SampledThreshold.Settings(density))
    vector = torch.randn(numel, generator=generator(seed), dtype=torch.float64) ** power
    positions = codec.select(vector, generator(seed + 1))
    count = count_of(density, numel)
    assert len(positions) <= count
    assert len(positions.unique()) == len(positions)
    left = torch.ones(numel, dtype=torch.bool).index_fill_(0, positions, False)
    if len(positions) and left.any():
        assert vector[positions].abs().min() >= vector[left].abs().max()
    if len(positions) < 0.8 * count:
        wanted = max(math.ceil(0.01 * numel), math.ceil(16 / density))
        drawn = vector[torch.randint(numel, (wanted,), generator=generator(seed + 1))].abs()
        first = drawn.sort(descending=True).values[math.ceil(density * wanted) - 1]
        assert 2 * wanted <= numel
        assert vector[left].abs().max() < first * 0.8**10 * (1 + 1e-9)


@pytest.mark.parametrize("codec", [Threshold(), SampledThreshold(), TopK()])
def test_what_is_not_a_number_is_sent(codec: Compressor) -> None:
    vector = torch.randn(5000, generator=generator())
    vector[77] = torch.nan
    chosen = codec.select(vector, generator())  # type: ignore[attr-defined]
    assert 77 in chosen


@pytest.mark.parametrize(
    "codec", [Threshold(), SampledThreshold(SampledThreshold.Settings(0.1)), TopK(TopK.Settings(0.1))]
)
@pytest.mark.parametrize("numel", [0, 1, 2, 1000])
def test_equal_magnitudes_and_tiny_layers(codec: Compressor, numel: int) -> None:
    """Everything ties: top-k sends k of them, thresholds as many as they may; nothing breaks on no element or one."""
    grads = [{"w": torch.full((numel,), value)} for value in (0.5, -0.5)]
    results = exchange_named(codec, grads)
    own = results[0].value.own["w"]
    assert set(own.tolist()) <= {0.0, 0.5}
    if numel:
        assert own.any()
    if not isinstance(codec, Threshold):
        assert int((own != 0).sum()) == count_of(0.1, numel)
    zeros = [{"w": torch.zeros(numel)}] * 2
    assert not exchange_named(codec, zeros)[0].value.mean["w"].any()


def exchange_named(codec: Codec, grads: Sequence[Tensors], step: int = 0) -> Any:
    return run_lockstep([exchange_group(codec, g, {}, Context(r, len(grads), step, "g")) for r, g in enumerate(grads)])


@law(st.integers(0, 70_000), st.floats(0.0001, 1.0), seeds, examples=60)
def test_the_largest_are_found_exactly(numel: int, density: float, seed: int) -> None:
    vector = torch.randn(numel, generator=generator(seed)) ** 3
    count = count_of(density, numel)
    positions = largest(vector, count)
    assert len(positions.unique()) == count
    expected = np.sort(np.abs(vector.numpy()))[numel - count :]
    np.testing.assert_array_equal(np.sort(vector[positions].abs().numpy()), expected)


# --- CLT-k ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [2**18 - 1, 2**18, 2**18 + 1, 3 * 2**18 + 5])
def test_positions_in_a_large_layer_are_those_of_the_whole(numel: int) -> None:
    """Where a magnitude reaches the threshold, and where NaN stands, ascending, however the layer is cut."""
    vector = torch.randn(numel, generator=generator(numel))
    vector[numel // 3], vector[-1] = torch.nan, 4.0
    expected = np.flatnonzero(~(vector.abs().numpy() < 3.0))
    assert expected[-1] == numel - 1
    np.testing.assert_array_equal(at_least(vector, 3.0).numpy(), expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_clt_k_with_feedback_is_scalecoms_algorithm(ranks: int, decay: float) -> None:
    """Algorithm 1: the leader's largest of gradient + memory, everyone's values there, memory by eq. (5)."""
    codec = ErrorFeedback(CLTK(CLTK.Settings(0.1)), ErrorFeedback.Settings(decay=decay))
    count = count_of(0.1, NUMEL)
    states: list[Tensors] = [{}] * ranks
    memory, beta = np.zeros((ranks, NUMEL)), 1 - decay
    for step in range(6):
        grads = [draw(rank, step) for rank in range(ranks)]
        results = exchange(codec, grads, states, step)
        states = [result.value.state for result in results]
        asked = memory + np.stack([flat(g) for g in grads])
        chosen = np.argsort(-np.abs(asked[step % ranks]), kind="stable")[:count]
        sent = np.stack([kept(row, chosen) for row in asked])
        memory = (1 - beta) * memory + beta * (asked - sent)
        for rank, result in enumerate(results):
            np.testing.assert_allclose(flat(result.value.own), sent[rank], atol=1e-12)
            np.testing.assert_allclose(flat(result.value.mean), sent.mean(0), atol=1e-12)


@pytest.mark.parametrize("coding", ["fixed", "raw", "packed", "bitmap"])
def test_clt_k_followers_send_values_alone(coding: str) -> None:
    codec, count = CLTK(CLTK.Settings(0.1, index_coding=coding)), count_of(0.1, NUMEL)
    payload = [result.payload_bytes for result in exchange(codec, [draw(rank) for rank in range(3)], step=1)]
    assert payload[0] == payload[2] == 8 * count
    positions = {"raw": 4 * count, "packed": -(-count // 8) * 9, "bitmap": -(-NUMEL // 8)}
    assert payload[1] == 8 * count + (min(positions.values()) if coding == "fixed" else positions[coding])


def test_clt_k_values_in_eight_bits() -> None:
    grads = [draw(rank) for rank in range(3)]
    results = exchange(CLTK(CLTK.Settings(0.2, values="int8")), grads)
    exact = exchange(CLTK(CLTK.Settings(0.2)), grads)
    for rank in range(3):
        assert ((flat(results[rank].value.own) != 0) <= (flat(exact[rank].value.own) != 0)).all()
        largest_value = np.abs(flat(exact[rank].value.own)).max()
        assert np.abs(flat(results[rank].value.own) - flat(exact[rank].value.own)).max() <= largest_value / 253
    owns = np.mean([flat(result.value.own) for result in results], 0)
    np.testing.assert_allclose(flat(results[0].value.mean), owns, atol=1e-12)


@law(st.integers(0, 200), st.sampled_from([0.01, 0.07, 0.3, 1.0]), seeds)
def test_chunks_give_their_largest(numel: int, density: float, seed: int) -> None:
    vector = torch.randn(numel, generator=generator(seed), dtype=torch.float64)
    (result,) = exchange_named(CLTK(CLTK.Settings(density, selection="chunks")), [{"w": vector}])
    size = math.ceil(1 / density)
    expected = np.zeros(numel)
    for start in range(0, numel, size):
        best = start + int(vector[start : start + size].abs().argmax())
        expected[best] = vector[best]
    np.testing.assert_array_equal(result.value.own["w"].numpy(), expected)


def test_every_rank_leads_in_turn_or_at_random() -> None:
    rotating, chance = CLTK(), CLTK(CLTK.Settings(leader="random"))
    assert [rotating.leader(Context(1, 4, step)) for step in range(6)] == [0, 1, 2, 3, 0, 1]
    leaders = [[chance.leader(Context(rank, 4, step)) for rank in range(4)] for step in range(60)]
    assert all(len(set(row)) == 1 for row in leaders)
    assert {row[0] for row in leaders} == {0, 1, 2, 3}


# --- DCT ------------------------------------------------------------------------------------------------------------


@law(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), seeds)
def test_the_transform_is_scipys(rows: int, columns: int, chunk: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=generator(seed), dtype=torch.float64)
    y, h, x, w = tile = tiles((rows, columns), chunk)
    assert (y * h, x * w) == (rows, columns)
    assert max(h, w) <= chunk
    [alike] = alike_chunks([tile])
    coefficients = transform(alike.chunks_of(matrix.view(-1)))
    blocks = matrix.numpy().reshape(y, h, x, w).transpose(0, 2, 1, 3).reshape(-1, h, w)
    np.testing.assert_allclose(
        coefficients.numpy(), fft.dctn(blocks, axes=(1, 2), norm="ortho").reshape(-1, h * w), atol=1e-12
    )
    restored = torch.empty(rows * columns, dtype=torch.float64)
    alike.put(restore(coefficients, h, w), restored)
    torch.testing.assert_close(restored, matrix.view(-1))


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_cosines_are_orthonormal(size: int) -> None:
    like = torch.empty(0, dtype=torch.float64)
    torch.testing.assert_close(cosines(size, like) @ cosines(size, like).T, torch.eye(size, dtype=torch.float64))


def dct_topk(grads: Sequence[np.ndarray], shape: tuple[int, ...], chunk: int, count: int) -> Any:
    """Chunk by chunk: each rank's largest coefficients, and who sent which. (ranks, chunks, h, w), and the same."""
    y, h, x, w = tiles(shape, chunk)
    coefficients = []
    for grad in grads:
        blocks = grad.reshape(y, h, x, w).transpose(0, 2, 1, 3).reshape(y * x, h, w)
        transformed = fft.dctn(blocks, axes=(1, 2), norm="ortho").reshape(y * x, -1)
        order = np.argsort(-np.abs(transformed), 1, kind="stable")[:, :count]
        sent = np.zeros_like(transformed)
        np.put_along_axis(sent, order, np.take_along_axis(transformed, order, 1), 1)
        coefficients.append(sent)
    return np.stack(coefficients)


def back(coefficients: np.ndarray, shape: tuple[int, ...], chunk: int) -> np.ndarray:
    y, h, x, w = tiles(shape, chunk)
    blocks = fft.idctn(coefficients.reshape(y * x, h, w), axes=(1, 2), norm="ortho")
    return blocks.reshape(y, x, h, w).transpose(0, 2, 1, 3).reshape(-1)


def test_demo_is_algorithm_1() -> None:
    """m = beta m + g; q = the largest coefficients of m; m = m - q; applied: the sign of the senders' mean."""
    shape, chunk, count, beta, ranks = (10, 12), 6, 3, 0.9, 3
    settings = DCTTopK.Settings(chunk, count, average="senders", sign=True)
    codec = ErrorFeedback(DCTTopK(settings), ErrorFeedback.Settings(carried=beta))
    states: list[Tensors] = [{}] * ranks
    momentum = np.zeros((ranks, 120))
    for step in range(5):
        grads = [
            {"w": torch.randn(shape, generator=generator(10 * step + r), dtype=torch.float64)} for r in range(ranks)
        ]
        results = run_lockstep(
            [exchange_group(codec, g, states[r], Context(r, ranks, step, "g")) for r, g in enumerate(grads)]
        )
        states = [result.value.state for result in results]
        momentum = beta * momentum + np.stack([g["w"].numpy().reshape(-1) for g in grads])
        sent = dct_topk(momentum, shape, chunk, count)
        momentum = momentum - np.stack([back(one, shape, chunk) for one in sent])
        senders = (sent != 0).sum(0).clip(1)
        applied = np.sign(back(sent.sum(0) / senders, shape, chunk))
        np.testing.assert_array_equal(results[0].value.mean["w"].numpy().reshape(-1), applied)
        held = np.stack([state["w/residual"].numpy().reshape(-1) for state in states])
        np.testing.assert_allclose(held, momentum, atol=1e-10)


def test_dct_top_k_averages_over_all_ranks_unless_told_otherwise() -> None:
    grads = [draw(rank) for rank in range(3)]
    results = exchange(DCTTopK(DCTTopK.Settings(6, 4)), grads)
    owns = np.mean([flat(result.value.own) for result in results], 0)
    np.testing.assert_allclose(flat(results[0].value.mean), owns, atol=1e-12)


def test_all_coefficients_are_the_gradient_and_need_no_places() -> None:
    (result,) = exchange(DCTTopK(DCTTopK.Settings(8, 64)), [draw(0)])
    np.testing.assert_allclose(flat(result.value.own), flat(draw(0)), atol=1e-12)
    assert result.payload_bytes == 8 * NUMEL


@law(st.integers(1, 5), st.integers(0, 70), st.floats(0.01, 1.0), st.sampled_from(CODINGS), seeds, examples=60)
def test_rows_together_are_each_row(rows: int, numel: int, density: float, coding: str, seed: int) -> None:
    """Several parts of a vector are compressed and added in a few calls as each by itself, to the byte and bit."""
    codec = TopK(TopK.Settings(density, coding))
    vector, total = torch.randn(2, rows * numel, generator=generator(seed))
    parts, wanted = vector.view(rows, numel), total.clone()
    together, apart = codec.compress_rows(parts), [codec.compress(part, generator()) for part in parts]
    for row, (payload, other) in enumerate(zip(together, apart, strict=True)):
        assert [part.nbytes for part in payload] == [part.nbytes for part in other]
        codec.add_decompressed(wanted[row * numel : (row + 1) * numel], other, -0.5)
    codec.add_rows(total, [row * numel for row in range(rows)], numel, together, -0.5)
    assert torch.equal(total, wanted)
