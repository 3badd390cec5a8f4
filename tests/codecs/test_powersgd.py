"""PowerSGD against a direct reading of Algorithm 1 in float64, and what it must do on degenerate matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.codec import Context, Tensors, concatenate, exchange_group, separate
from gradlab.codecs.powersgd import PowerSGD, orthogonalize
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.wrappers.error_feedback import ErrorFeedback
from support.laws import law


def exchange(
    codec: PowerSGD | ErrorFeedback, grads: list[Tensors], states: list[Tensors] | None = None, iteration: int = 0
) -> list[LockstepResult]:
    ranks = len(grads)
    states = states or [{}] * ranks
    return run_lockstep(
        [exchange_group(codec, grads[r], states[r], Context(r, ranks, iteration)) for r in range(ranks)]
    )


def matrix(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(seed: int, rows: int, columns: int, rank: int) -> torch.Tensor:
    return matrix(seed, rows, rank) @ matrix(seed + 1, rank, columns)


def gram_schmidt(columns: np.ndarray) -> np.ndarray:
    """The paper's ORTHOGONALIZE."""
    result = columns.copy()
    for i in range(result.shape[1]):
        for j in range(i):
            result[:, i] -= (result[:, j] @ result[:, i]) * result[:, j]
        result[:, i] /= np.linalg.norm(result[:, i])
    return result


def algorithm_1(matrices: list[np.ndarray], q: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """(decompressed mean, what each worker's own matrix became, next Q), lines 3 to 7 with explicit all-reduces."""
    workers = len(matrices)
    p = sum(m @ q for m in matrices) / workers
    p_hat = gram_schmidt(p)
    own_q = [m.T @ p_hat for m in matrices]
    q = sum(own_q) / workers
    return p_hat @ q.T, [p_hat @ of_rank.T for of_rank in own_q], q


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_algorithm_1_with_feedback(ranks: int, rank: int) -> None:
    """Four warm-started steps from one initial Q; Householder and Gram-Schmidt signs cancel in P Q^T."""
    codec = ErrorFeedback(PowerSGD(PowerSGD.Settings(rank=rank)))
    q = matrix(9, 30, rank).numpy()
    states: list[Tensors] = [{"w/q": torch.from_numpy(q.T.copy())} for _ in range(ranks)]
    error = [np.zeros((20, 30)) for _ in range(ranks)]
    for step in range(4):
        grads = [matrix(100 * step + r, 20, 5, 6) for r in range(ranks)]
        asked = [g.numpy().reshape(20, 30) + e for g, e in zip(grads, error, strict=True)]
        mean, own, q = algorithm_1(asked, q)
        error = [a - o for a, o in zip(asked, own, strict=True)]
        results = exchange(codec, [{"w": g} for g in grads], states, step)
        states = [result.value.state for result in results]
        for r, result in enumerate(results):
            np.testing.assert_allclose(result.value.mean["w"].numpy().reshape(20, 30), mean, atol=1e-10)
            np.testing.assert_allclose(result.value.own["w"].numpy().reshape(20, 30), own[r], atol=1e-10)
            np.testing.assert_allclose(np.abs(result.value.state["w/q"].numpy()), np.abs(q.T), atol=1e-10)
            assert result.payload_bytes == 8 * rank * (20 + 30)


@law(st.integers(1, 3), st.integers(1, 3), st.integers(0, 50))
def test_a_matrix_of_low_rank_comes_back_exactly(true_rank: int, ranks: int, seed: int) -> None:
    """If the mean has rank <= r, one step from a random Q already spans it, whatever the ranks' own matrices."""
    target = low_rank(seed, 12, 15, true_rank)
    noise = [matrix(seed + 7 + r, 12, 15) for r in range(ranks)]
    shift = sum(noise) / ranks
    grads = [{"w": target + own - shift} for own in noise]
    results = exchange(PowerSGD(PowerSGD.Settings(rank=3)), grads)
    for result in results:
        torch.testing.assert_close(result.value.mean["w"], target, atol=1e-8, rtol=0)


def test_repeated_steps_find_the_best_approximation() -> None:
    """Warm start is subspace iteration: on a constant matrix it converges to the truncated SVD."""
    values = torch.tensor([9.0, 7.0, 1.0, 0.5, 0.2, 0.1], dtype=torch.float64)
    left, right = orthogonalize(matrix(1, 20, 6)), orthogonalize(matrix(2, 30, 6))
    constant = (left * values) @ right.T
    best = (left[:, :2] * values[:2]) @ right[:, :2].T
    codec, state = PowerSGD(PowerSGD.Settings(rank=2)), {}
    errors = []
    for step in range(12):
        (result,) = exchange(codec, [{"w": constant}], [state], step)
        state = result.value.state
        errors.append(float((result.value.mean["w"] - best).norm()))
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-9


def test_cold_start_forgets() -> None:
    """Without warm start a step depends on the iteration alone, not on what went before; ranks draw alike."""
    codec = PowerSGD(PowerSGD.Settings(rank=2, warm_start=False))
    grads = [{"w": matrix(r, 12, 15)} for r in range(2)]
    first = exchange(codec, grads, None, 4)
    state = [{"w/q": matrix(50, 2, 15)} for _ in range(2)]
    again = exchange(codec, grads, state, 4)
    assert torch.equal(first[0].value.mean["w"], again[0].value.mean["w"])
    assert torch.equal(first[0].value.mean["w"], first[1].value.mean["w"])
    assert not torch.equal(first[0].value.mean["w"], exchange(codec, grads, state, 5)[0].value.mean["w"])


def test_warm_start_goes_on_from_the_last_factor() -> None:
    codec = PowerSGD(PowerSGD.Settings(rank=2))
    grads = [{"w": matrix(3, 12, 15)}]
    fresh = exchange(codec, grads, None, 0)[0].value
    assert torch.equal(fresh.mean["w"], exchange(codec, grads, None, 1)[0].value.mean["w"])
    assert not torch.equal(fresh.mean["w"], exchange(codec, grads, [fresh.state], 1)[0].value.mean["w"])


@pytest.mark.parametrize("feedback", [False, True])
def test_a_step_of_zeros_does_not_blind_the_next(feedback: bool) -> None:
    """A branch that starts at zero has a zero gradient first; a Q of zeros would then hide rows for ever."""
    codec = PowerSGD(PowerSGD.Settings(rank=2))
    driven = ErrorFeedback(codec) if feedback else codec
    zeros = exchange(driven, [{"w": torch.zeros(12, 15, dtype=torch.float64)}] * 2)
    assert not zeros[0].value.mean["w"].any()
    assert all(bool(value.isfinite().all()) for value in zeros[0].value.state.values())
    late = low_rank(5, 12, 15, 2)
    late[:4] = 0.0
    results = exchange(driven, [{"w": late}] * 2, [result.value.state for result in zeros], 1)
    torch.testing.assert_close(results[0].value.mean["w"], late, atol=1e-9, rtol=0)


@law(st.integers(1, 8), st.integers(1, 8), st.integers(1, 12))
def test_rank_beyond_the_matrix_is_dense_and_exact(rows: int, columns: int, excess: int) -> None:
    """Factors no smaller than the matrix are not sent: the layer goes dense."""
    rank = min(rows, columns) - 1 + excess
    codec = PowerSGD(PowerSGD.Settings(rank=rank))
    grads = [{"w": matrix(r, rows, columns)} for r in range(2)]
    results = exchange(codec, grads)
    torch.testing.assert_close(results[0].value.mean["w"], (grads[0]["w"] + grads[1]["w"]) / 2)
    assert results[0].payload_bytes == 8 * rows * columns
    assert codec.forecast([Layer("w", (rows, columns))], 2).payload == 4 * rows * columns
    assert results[0].value.state == {}


def test_a_small_minimum_ratio_compresses_at_full_rank_exactly() -> None:
    codec = PowerSGD(PowerSGD.Settings(rank=50, minimum_ratio=0.01))
    assert codec.matrix_shape((6, 9)) == (6, 9, 6)
    (result,) = exchange(codec, [{"w": matrix(1, 6, 9)}])
    torch.testing.assert_close(result.value.mean["w"], matrix(1, 6, 9))
    assert result.payload_bytes == 8 * 6 * 15


@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (4, 0), (1, 9), (9, 1), (1, 1)])
def test_what_has_no_smaller_factors_goes_dense(shape: tuple[int, ...]) -> None:
    assert PowerSGD().matrix_shape(shape) is None
    (result,) = exchange(PowerSGD(), [{"w": torch.ones(shape)}])
    assert torch.equal(result.value.mean["w"], torch.ones(shape))


@law(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), st.integers(0, 3), st.integers(0, 9)
)
def test_orthogonalize_gives_orthonormal_columns_that_span(shape: tuple[int, int], rank: int, seed: int) -> None:
    """Also for a zero matrix and for dependent columns."""
    given_columns = matrix(seed, shape[0], rank) @ matrix(seed + 1, rank, shape[1])
    columns = orthogonalize(given_columns)
    torch.testing.assert_close(columns.T @ columns, torch.eye(shape[1], dtype=torch.float64))
    torch.testing.assert_close(columns @ (columns.T @ given_columns), given_columns)


# --- alternating ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_alternating_is_one_factor_per_step(ranks: int, rank: int) -> None:
    """P = mean(M orth(Q)), then Q = mean(M^T orth(P)), with feedback, over five steps; half of Algorithm 1's bytes."""
    codec = ErrorFeedback(PowerSGD(PowerSGD.Settings(rank=rank, alternating=True)))
    factor, side = matrix(9, 30, rank).numpy(), "q"
    states: list[Tensors] = [{"w/q": torch.from_numpy(factor.T.copy())} for _ in range(ranks)]
    error = [np.zeros((20, 30)) for _ in range(ranks)]
    for step in range(5):
        grads = [matrix(100 * step + r, 20, 5, 6) for r in range(ranks)]
        asked = [g.numpy().reshape(20, 30) + e for g, e in zip(grads, error, strict=True)]
        basis = gram_schmidt(factor)
        own = [m @ basis if side == "q" else m.T @ basis for m in asked]
        mean = sum(own) / ranks
        decoded = [p @ basis.T if side == "q" else basis @ p.T for p in (mean, *own)]
        error = [a - o for a, o in zip(asked, decoded[1:], strict=True)]
        results = exchange(codec, [{"w": g} for g in grads], states, step)
        states = [result.value.state for result in results]
        for r, result in enumerate(results):
            np.testing.assert_allclose(result.value.mean["w"].numpy().reshape(20, 30), decoded[0], atol=1e-10)
            np.testing.assert_allclose(result.value.own["w"].numpy().reshape(20, 30), decoded[1 + r], atol=1e-10)
            assert result.payload_bytes == 8 * rank * (20 if side == "q" else 30)
        factor, side = mean, "p" if side == "q" else "q"
        # The state is that of the engine, up to the signs of the basis.
        assert set(results[0].value.state) == {f"w/{side}", "w/residual"}


@law(st.integers(1, 4), st.integers(2, 9), st.integers(2, 9), st.integers(1, 3), examples=20)
def test_alternating_forecasts_are_what_each_step_sends(rank: int, rows: int, columns: int, ranks: int) -> None:
    """P's bytes, then Q's, layer by layer; a run's mean is the mean of both."""
    shapes = {"a": (4 * rows, 3 * columns), "b": (2 * columns, 9, 3), "v": (7,)}
    layers = [Layer(name, shape) for name, shape in shapes.items()]
    codec = PowerSGD(PowerSGD.Settings(rank=rank, alternating=True))
    states: list[Tensors] = [{}] * ranks
    forecasts = []
    for step in range(4):
        forecasts.append(codec.forecast(layers, ranks, states[0]).payload)
        grads = [{name: matrix(9 * step + r, *shape).float() for name, shape in shapes.items()} for r in range(ranks)]
        results = exchange(codec, grads, states, step)
        states = [result.value.state for result in results]
        assert [result.payload_bytes for result in results] == [forecasts[-1]] * ranks
    assert sum(forecasts) / 4 == codec.forecast(layers, ranks).payload


def test_alternating_steps_find_the_best_approximation() -> None:
    values = torch.tensor([9.0, 7.0, 1.0, 0.5, 0.2, 0.1], dtype=torch.float64)
    left, right = orthogonalize(matrix(1, 20, 6)), orthogonalize(matrix(2, 30, 6))
    constant = (left * values) @ right.T
    best = (left[:, :2] * values[:2]) @ right[:, :2].T
    codec, state = PowerSGD(PowerSGD.Settings(rank=2, alternating=True)), {}
    for step in range(24):
        (result,) = exchange(codec, [{"w": constant}], [state], step)
        state = result.value.state
    assert float((result.value.mean["w"] - best).norm()) < 1e-9


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_alternating_is_not_blinded_by_zeros(rank: int) -> None:
    """After a gradient of zeros, and one with a zero row or column, the next one's rows are all seen again."""
    codec, state = PowerSGD(PowerSGD.Settings(rank=rank, alternating=True)), {}
    blank = torch.zeros(12, 15, dtype=torch.float64)
    late = low_rank(5, 12, 15, rank)
    part = late.clone()
    part[:4], part[:, 3] = 0.0, 0.0
    for step, grad in enumerate((blank, blank, blank, part, blank, late, late)):
        (result,) = exchange(codec, [{"w": grad}], [state], step)
        state = result.value.state
        assert bool(result.value.mean["w"].isfinite().all())
    torch.testing.assert_close(result.value.mean["w"], late, atol=1e-8, rtol=0)


def test_alternating_needs_the_last_factor() -> None:
    with pytest.raises(GradlabError, match="warm_start = False, expected true where factors alternate"):
        PowerSGD.Settings(alternating=True, warm_start=False)


def test_layers_of_one_shape_are_treated_together_and_alike() -> None:
    """A group of five layers of two shapes and a vector gives what each layer alone gives."""
    shapes = {"a": (12, 15), "b": (12, 15), "c": (9, 20), "d": (12, 15), "v": (7,), "e": (9, 20)}
    grads = [{name: matrix(17 * r + i, *shape) for i, (name, shape) in enumerate(shapes.items())} for r in range(2)]
    codec = PowerSGD(PowerSGD.Settings(rank=2))
    together = exchange(codec, grads)
    for name in shapes:
        alone = exchange(codec, [{name: g[name]} for g in grads])
        torch.testing.assert_close(together[0].value.mean[name], alone[0].value.mean[name])
        torch.testing.assert_close(together[1].value.own[name], alone[1].value.own[name])


@law(
    st.lists(st.sampled_from([(6, 4), (4, 6), (8,), (3, 2, 2, 1), (6, 2, 2), (130, 140)]), min_size=1, max_size=7),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_stack_gives_each_layer_what_it_gets_alone(
    shapes: list[tuple[int, ...]], alternating: bool, apart: bool, mixed: bool
) -> None:
    """Layers that lie beside one another or apart, of one dtype or of two, small and large, for three steps."""
    settings = PowerSGD.Settings(rank=2, alternating=alternating)
    together, states = ErrorFeedback(PowerSGD(settings)), [Tensors(), Tensors()]
    alone = {str(at): (ErrorFeedback(PowerSGD(settings)), [Tensors(), Tensors()]) for at in range(len(shapes))}
    for iteration in range(3):
        grads = [
            {str(at): matrix(100 * iteration + 10 * rank + at, *shape) for at, shape in enumerate(shapes)}
            for rank in range(2)
        ]
        if mixed:
            grads = [{name: one.float() if int(name) % 2 else one for name, one in of.items()} for of in grads]
        if not apart and not mixed:
            grads = [separate(concatenate(one), one) for one in grads]
        results = exchange(together, grads, states, iteration)
        states = [result.value.state for result in results]
        for name, (codec, before) in alone.items():
            single = exchange(codec, [{name: one[name]} for one in grads], before, iteration)
            alone[name] = codec, [result.value.state for result in single]
            for of_all, of_one in zip(results, single, strict=True):
                for what in ("mean", "own", "compression_error"):
                    found, expected = (getattr(result.value, what)[name] for result in (of_all, of_one))
                    assert found.shape == expected.shape
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert {key for key in states[0] if key.startswith(f"{name}/")} == alone[name][1][0].keys()


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("between", [(), (7,), (9, 20)])
def test_where_a_stack_lies_and_what_is_written_in_it_changes_no_bit(rank: int, between: tuple[int, ...]) -> None:
    """An engine lends gradients' memory, a replay keeps them. Layers of one shape may have others between them."""
    shapes = [shape for _ in range(4) for shape in ((24, 31), between) if shape]
    codec, states = ErrorFeedback(PowerSGD(PowerSGD.Settings(rank=rank))), [Tensors(), Tensors(), Tensors()]
    for iteration in range(3):
        apart = {str(at): matrix(10 * iteration + at, *shape).float() for at, shape in enumerate(shapes)}
        beside = [separate(concatenate(apart).clone(), apart) for _ in range(2)]
        runs = [
            exchange_group(codec, given, state, Context(0, 1, iteration), reuse=reuse)
            for given, state, reuse in zip((apart, *beside), states, (False, False, True), strict=True)
        ]
        [first], *others = [run_lockstep([run]) for run in runs]
        states = [first.value.state, *(one.value.state for [one] in others)]
        for [other] in others:
            for name in apart:
                assert torch.equal(other.value.mean[name], first.value.mean[name])
            for key, kept in first.value.state.items():
                assert torch.equal(other.value.state[key], kept), key


@law(st.integers(1, 3), st.integers(0, 2), st.integers(0, 30))
def test_orthogonalize_is_safe_at_few_columns(rank: int, zeros: int, seed: int) -> None:
    """Rank 1, 2 and 3, with zero and repeated columns, batched: finite, orthonormal, and spanning."""
    columns = matrix(seed, 2, 8, rank)
    columns[0, :, : min(zeros, rank)] = 0.0
    if rank > 1:
        columns[1, :, 1] = columns[1, :, 0]
    basis = orthogonalize(columns)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(rank, dtype=torch.float64).expand(2, rank, rank))
    torch.testing.assert_close(basis @ (basis.mT @ columns), columns)
