"""The online GradiVeQ codec: its cycle against a direct reading of the paper's equations, the vote, the complement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradlab.codec import Context, Exchanged, Tensors, exchange_group
from gradlab.codec.kept import state_problem
from gradlab.codecs.gradiveq import COMPRESSING, DENSE, SAMPLING, GradiVeQ
from gradlab.codecs.qsgd import QSGD
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer, flatten
from gradlab.wrappers.error_feedback import ErrorFeedback

SHAPE = (4, 3, 3, 3)
LAYER = Layer("w", SHAPE)
SIZE = 12  # K = F D: 9 slices


def gradient(rank: int, step: int, rank_of_signal: int = 3, noise: float = 0.01) -> torch.Tensor:
    """A gradient whose slices lie in one fixed subspace, up to noise; float64."""
    directions = torch.linalg.qr(torch.randn(SIZE, rank_of_signal, generator=torch.Generator().manual_seed(7)).double())
    draw = torch.Generator().manual_seed(1000 * step + rank)
    signal = torch.randn(9, rank_of_signal, generator=draw).double() @ directions.Q.T + 0.5
    slices = signal + noise * torch.randn(9, SIZE, generator=draw).double()
    return slices.reshape(3, 3, 3, 4).permute(3, 2, 0, 1).contiguous()


class Run:
    """Lockstep iterations of a codec on one layer, with its states."""

    def __init__(self, codec: GradiVeQ | ErrorFeedback, ranks: int = 2) -> None:
        self.codecs = [codec] * ranks
        self.states: list[Tensors] = [{} for _ in range(ranks)]
        self.iteration = 0

    def step(self, *gradients: torch.Tensor) -> list[LockstepResult[Exchanged]]:
        context = Context(0, len(gradients), self.iteration, "w", seed=5)
        results = run_lockstep(
            [
                exchange_group(codec, {"w": g}, self.states[rank], replace(context, rank=rank))
                for rank, (codec, g) in enumerate(zip(self.codecs, gradients, strict=True))
            ]
        )
        self.states = [result.value.state for result in results]
        self.iteration += 1
        return results

    @property
    def mode(self) -> int:
        clocks = [state["w/clock"] for state in self.states]
        assert all(torch.equal(clock, clocks[0]) for clock in clocks)
        return int(clocks[0][0])


def codec(**changes: object) -> GradiVeQ:
    settings = {"slice_size": SIZE, "sample_steps": 6, "compressed_steps": 3, "sample_bits": 0, "loss_threshold": 0.05}
    return GradiVeQ(GradiVeQ.Settings(**{**settings, **changes}))  # type: ignore[arg-type]


def slices_of(tensor: torch.Tensor) -> np.ndarray:
    return flatten(tensor, "gradiveq").reshape(-1, SIZE).double().numpy()


def explicit_fit(samples: list[np.ndarray], loss_threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean (M, K) of the samples, and the axes of the first slice's covariance that eq. (6) keeps."""
    stacked = np.stack(samples)
    mean = stacked.mean(0)
    values, axes = np.linalg.eigh(np.cov(stacked[:, 0].T, bias=True))
    values, axes = values[::-1], axes[:, ::-1]
    kept = next(d for d in range(1, SIZE + 1) if values[:d].sum() / values.sum() > 1 - loss_threshold)
    return mean, axes[:, :kept]


def test_the_cycle_is_the_papers() -> None:
    """Two cycles: samples pass as they are; then eqs. (3) to (5) with mu and U of the samples, sums over nodes."""
    run = Run(codec())
    for _ in range(2):
        samples = []
        for _ in range(6):
            assert run.mode == SAMPLING if run.states[0] else run.iteration == 0
            grads = [gradient(rank, run.iteration) for rank in range(2)]
            result = run.step(*grads)[0]
            torch.testing.assert_close(result.value.mean["w"], (grads[0] + grads[1]) / 2)
            samples.append(slices_of(grads[0] + grads[1]))
        mu, axes = explicit_fit(samples, 0.05)
        for _ in range(3):
            assert run.mode == COMPRESSING
            assert int(run.states[0]["w/width"]) == axes.shape[1]
            grads = [gradient(rank, run.iteration) for rank in range(2)]
            code = sum((slices_of(g) - mu / 2) @ axes for g in grads)
            for result in run.step(*grads):
                np.testing.assert_allclose(slices_of(result.value.mean["w"]) * 2, code @ axes.T + mu, atol=1e-5)
                assert result.payload_bytes == 8 * 9 * axes.shape[1]
        assert run.mode == SAMPLING


def test_a_planted_rank_is_found_and_what_is_lost_is_the_noise() -> None:
    """Signal of rank 3 plus white noise: d = 3, and the loss is the noise's energy outside of three axes."""
    noise = 0.02
    run = Run(codec(sample_steps=60, compressed_steps=0, loss_threshold=0.01), ranks=1)
    for step in range(60):
        run.step(gradient(0, step, noise=noise))
    assert int(run.states[0]["w/width"]) == 3
    lost = []
    for step in range(60, 160):
        given = gradient(0, step, noise=noise)
        (result,) = run.step(given)
        lost.append(float((given - result.value.mean["w"]).square().sum()))
    assert np.mean(lost) == pytest.approx(9 * (SIZE - 3) * noise**2, rel=0.1)


def test_bases_of_a_layer_have_the_largest_dimension() -> None:
    """Slices of rank 1, 2 and 3, three of each kind to a basis: all three send what the last one needs."""
    directions = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(7)).double()).Q

    def mixed(rank: int, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 * step + rank)
        rows = [torch.randn(m // 3 + 1, generator=draw).double() @ directions[: m // 3 + 1] for m in range(9)]
        return torch.stack(rows).reshape(3, 3, 3, 4).permute(3, 2, 0, 1).contiguous()

    run = Run(codec(reuse=3, sample_steps=30, loss_threshold=1e-6, whitening=False))
    for step in range(30):
        run.step(*(mixed(rank, step) for rank in range(2)))
    assert run.states[0]["w/width"].tolist() == 3
    grads = [mixed(rank, 99) for rank in range(2)]
    for result in run.step(*grads):
        assert result.payload_bytes == 8 * 9 * 3
        torch.testing.assert_close(result.value.mean["w"], (grads[0] + grads[1]) / 2, atol=1e-5, rtol=1e-5)


def test_samples_travel_as_qsgd() -> None:
    """Section 4: what is aggregated, and what PCA sees, are the quantized gradients; payload is QSGD's."""
    run = Run(codec(sample_bits=4))
    quantizer = QSGD(QSGD.Settings(4))
    grads = [gradient(rank, 0).float() for rank in range(2)]
    results = run.step(*grads)
    context = Context(0, 2, 0, "w", seed=5)
    expected = torch.zeros(108)
    for rank, given in enumerate(grads):
        vector = flatten(given, "gradiveq")
        payload = quantizer.compress(vector, replace(context, group="w/w", rank=rank).random.of_rank())
        quantizer.add_decompressed(expected, payload, 0.5)
    np.testing.assert_array_equal(slices_of(results[0].value.mean["w"]), expected.double().numpy().reshape(-1, SIZE))
    torch.testing.assert_close(run.states[0]["w/sample 0"], expected[:SIZE][None])
    assert results[0].payload_bytes == quantizer.forecast([LAYER], 2).payload


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 11),
        ({"sample_bits": 4, "monitor": "absolute"}, 11),
        ({"slice_size": 13}, 8),
        ({"reuse": 2}, 11),
        ({"reuse": 2, "complement": 0.4}, 11),
        ({"refresh": "decoded", "compressed_steps": 8, "complement": 0.3}, 24),
    ],
)
def test_the_forecast_is_what_is_sent(changes: dict[str, object], steps: int) -> None:
    method = codec(**changes)
    run = Run(method)
    for step in range(steps):
        forecast = method.forecast([LAYER], 2, run.states[0]).payload
        for result in run.step(*(gradient(rank, step).float() for rank in range(2))):
            assert result.payload_bytes == forecast


def test_bases_fitted_on_what_was_decoded_follow_a_drift() -> None:
    """After a sudden turn of the signal's subspace, feedback and the complement bring the new one into the bases."""
    settings: dict[str, object] = {
        "sample_steps": 20,
        "compressed_steps": 60,
        "complement": 0.5,
        "whitening": False,
    }
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(9)).double()).Q

    def turned(step: int) -> torch.Tensor:
        slices = torch.from_numpy(slices_of(gradient(0, step))) @ turn
        return slices.reshape(3, 3, 3, 4).permute(3, 2, 0, 1).contiguous()

    def held_by(basis: torch.Tensor) -> float:
        later = torch.from_numpy(np.concatenate([slices_of(turned(step)) for step in range(900, 930)]))
        return float((later @ basis[0].double()).square().sum() / later.square().sum())

    inner = codec(refresh="decoded", ratio=1.5, **settings)
    run = Run(ErrorFeedback(inner), ranks=1)
    held = []
    for step in range(20 + 6 * 60):
        run.step(gradient(0, step) if step < 20 else turned(step))
        if (step - 19) % 60 == 0:
            held.append(held_by(run.states[0]["w/basis"]))
    assert run.mode == COMPRESSING
    assert held == sorted(held)
    assert held[-1] > 0.95 > 0.5 > held[0]


@pytest.mark.parametrize(("strangers", "fires"), [(1, False), (2, True)])
@pytest.mark.parametrize("monitor", ["normalised", "absolute"])
def test_the_majority_decides(strangers: int, fires: bool, monitor: str) -> None:
    """Ranks whose gradients the basis does not span vote; two of three bring back uncompressed steps, one does not."""
    run = Run(codec(compressed_steps=0, monitor=monitor, monitor_threshold=0.5), ranks=3)
    for step in range(8):
        run.step(*(gradient(rank, step) for rank in range(3)))
    assert run.mode == COMPRESSING
    white = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).double()
    run.step(*(white if rank < strangers else gradient(rank, 8) for rank in range(3)))
    assert run.mode == (SAMPLING if fires else COMPRESSING)
    assert (run.states[0].keys() == {"w/clock"}) == fires


def test_a_fit_before_the_run_starts_compressed() -> None:
    samples = torch.stack([gradient(0, step) for step in range(40)])
    method = codec().fit([LAYER], {"w": samples})
    method.check([LAYER])
    run = Run(method, ranks=1)
    given = gradient(0, 99)
    (result,) = run.step(given)
    assert run.mode == COMPRESSING
    assert run.states[0].keys() == {"w/clock"}, "what was learned is not kept twice"
    assert float((result.value.mean["w"] - given).norm() / given.norm()) < 0.1


def test_bases_that_differ_between_ranks_become_rank_0s() -> None:
    """Machines that round differently: a rank whose axes have other signs, and one that keeps one axis fewer."""

    class Elsewhere(GradiVeQ):
        def bases(self, samples: torch.Tensor, mean: torch.Tensor | None, slices: int) -> Tensors:
            fitted = super().bases(samples, mean, slices)
            return fitted | {"basis": -fitted["basis"][:, :, :-1], "width": fitted["width"] - 1}

    run = Run(codec(loss_threshold=0.001))
    run.codecs[1] = Elsewhere(run.codecs[0].settings)
    for step in range(6):
        run.step(*(gradient(rank, step) for rank in range(2)))
    assert all(torch.equal(run.states[0][key], run.states[1][key]) for key in run.states[0])
    results = run.step(*(gradient(rank, 6) for rank in range(2)))
    assert torch.equal(results[0].value.mean["w"], results[1].value.mean["w"])


@pytest.mark.parametrize(("share", "sent"), [(0.5, True), (0, False)])
def test_feedback_helps_only_where_the_code_changes(share: float, sent: bool) -> None:
    """A constant gradient outside of the fitted axes: a fixed basis never sends it, half a random one does."""
    settings = {"compressed_steps": 0, "whitening": False, "ratio": 3.0}
    inner = codec(complement=share, **settings)
    run = Run(ErrorFeedback(inner), ranks=1)
    for step in range(6):
        run.step(gradient(0, step, noise=0.05))
    slow = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).double()
    total = torch.zeros(SHAPE).double()
    for _ in range(400):
        (result,) = run.step(slow)
        total += result.value.mean["w"]
    missing = float((total / 400 - slow).norm() / slow.norm())
    assert (missing < 0.1) == sent, missing


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"complement": 1.0}, "a number where all axes are random"),
        ({"refresh": "decoded"}, "above 0 where bases are fitted on what was decoded"),
        ({"refresh": "decoded", "complement": 0.5, "compressed_steps": 50}, "at least sample_steps then"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(GradlabError, match=match):
        GradiVeQ.Settings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"slice_size": 10, "whitening": False},
        {"ratio": 3.0, "complement": 1.0, "compressed_steps": 0},
        {"ratio": 3.0, "complement": 0.5, "refresh": "decoded", "compressed_steps": 7, "slice_size": 10},
        {"monitor": "normalised", "monitor_threshold": 0.001},
        {"reuse": 2},
    ],
    ids=str,
)
def test_layers_that_are_alike_give_together_what_each_gives_alone(settings: dict[str, object]) -> None:
    """They are coded in one go. Means, contributions, states and bytes are those of one layer after another, bit for
    bit but where fitted bases of several layers are multiplied together."""
    multiplied = settings.get("complement") != 1.0 and "reuse" not in settings

    def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
        torch.testing.assert_close(one, other, rtol=1e-11 * multiplied, atol=1e-13 * multiplied)

    names, ranks = ["a", "b", "c", "other"], range(2)
    method = codec(**settings)
    together: list[Tensors] = [{} for _ in ranks]
    alone: dict[str, list[Tensors]] = {name: [{} for _ in ranks] for name in names}

    def step(iteration: int, rank: int) -> Tensors:
        grads = {name: gradient(rank + 10 * at, iteration) for at, name in enumerate(names)}
        return {**grads, "other": grads["other"][:, :2].contiguous()}

    def run(chosen: list[str], states: list[Tensors], iteration: int) -> list[LockstepResult[Exchanged]]:
        context = Context(0, 2, iteration, "g", seed=5)
        grads = [{name: step(iteration, rank)[name] for name in chosen} for rank in ranks]
        contexts = [replace(context, rank=rank) for rank in ranks]
        rows = zip(grads, states, contexts, strict=True)
        return run_lockstep([exchange_group(method, given, state, of_rank) for given, state, of_rank in rows])

    for iteration in range(14):
        of_all = run(names, together, iteration)
        of_each = {name: run([name], alone[name], iteration) for name in names}
        together = [result.value.state for result in of_all]
        alone = {name: [result.value.state for result in results] for name, results in of_each.items()}
        for rank, result in enumerate(of_all):
            assert result.payload_bytes == sum(results[rank].payload_bytes for results in of_each.values())
            assert set(result.value.state) == {key for states in alone.values() for key in states[rank]}
            for name, results in of_each.items():
                assert_close(result.value.mean[name], results[rank].value.mean[name])
                assert_close(result.value.own[name], results[rank].value.own[name])
                for key, value in alone[name][rank].items():
                    assert_close(result.value.state[key], value)


def test_alike_layers_part_where_their_states_do() -> None:
    """One of three is sent dense, say since most ranks voted so: the two others are still coded together."""
    method, names = codec(ratio=3.0, complement=1.0, compressed_steps=0), ["a", "b", "c"]
    grads = [{name: gradient(rank + 10 * at, 0) for at, name in enumerate(names)} for rank in range(2)]
    state = {"b/clock": torch.tensor([float(DENSE), 0.0])}

    def run(chosen: list[str]) -> list[Exchanged]:
        of_chosen = {key: value for key, value in state.items() if key.split("/")[0] in chosen}
        exchanges = [
            exchange_group(method, {name: grads[rank][name] for name in chosen}, of_chosen, Context(rank, 2, 3, "g"))
            for rank in range(2)
        ]
        return [result.value for result in run_lockstep(exchanges)]

    of_all, of_each = run(names), {name: run([name]) for name in names}
    for rank, done in enumerate(of_all):
        assert done.state.keys() == {"b/clock"}
        torch.testing.assert_close(done.mean["b"], (grads[0]["b"] + grads[1]["b"]) / 2)
        for name in names:
            torch.testing.assert_close(done.mean[name], of_each[name][rank].mean[name], rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(done.own[name], of_each[name][rank].own[name], rtol=1e-11, atol=1e-13)
    assert not torch.allclose(of_all[0].mean["a"], (grads[0]["a"] + grads[1]["a"]) / 2)


@pytest.mark.parametrize(
    ("basis", "width", "settings", "said"),
    [
        (torch.eye(8)[None, :, :3] * 2, 3.0, {}, r"axes of its basis are not orthonormal: a product is off by 3"),
        (torch.zeros(1, 8, 3), 3.0, {}, r"axes of its basis are not orthonormal: a product is off by 1"),
        (torch.eye(8)[None, :, :3], 4.0, {}, r"width is 4.0, expected one whole number from 3 to 3"),
        (
            torch.eye(8)[None, :, :3],
            3.5,
            {"complement": 0.5},
            r"width is 3.5, expected one whole number from 3 to 8",
        ),
        (torch.tensor(1.0), 3.0, {}, r"got a basis \[\] and a mean"),
        (torch.eye(8, dtype=torch.float16)[None, :, :3], 3.0, {}, r"a basis of torch.float16"),
    ],
)
def test_learned_bases_that_are_none_are_refused(
    basis: torch.Tensor, width: float, settings: dict[str, float], said: str
) -> None:
    layer, learned = Layer("w", (8, 8)), {"w/basis": basis, "w/width": torch.tensor(width)}
    codec = GradiVeQ(GradiVeQ.Settings(slice_size=8, whitening=False, **settings), learned)
    with pytest.raises(GradlabError, match=said):
        codec.check([layer])


def test_what_a_state_lacks_is_named() -> None:
    """Of two samples of four: the sum, both samples and the clock are needed, whichever is taken away."""
    codec, state = GradiVeQ(GradiVeQ.Settings(slice_size=50, sample_steps=4)), dict[str, torch.Tensor]()
    for step in range(2):
        grads = {"w": torch.randn(20, 30, generator=torch.Generator().manual_seed(step))}
        (result,) = run_lockstep([exchange_group(codec, grads, state, Context(0, 1, step, "g"))])
        state = dict(result.value.state)
    assert set(state) == {"w/clock", "w/sum", "w/sample 0", "w/sample 1"}
    kept = codec.kept([Layer("w", (20, 30))], 0, 1, "g")
    assert state_problem(kept, state) is None
    for key in state:
        lacking = {other: value for other, value in state.items() if other != key}
        assert state_problem(kept, lacking) == f"{key!r} is missing"
    many = {**state, "w/clock": torch.tensor([0.0, 2.0**31])}
    assert state_problem(kept, many) == "'w/sample 2' is missing"
