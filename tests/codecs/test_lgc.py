"""LGC: the tables' autoencoders, both algorithms against a plain reading of the equations, phases and guards."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from gradlab.codec import Context
from gradlab.codec.kept import state_problem
from gradlab.codec.wrapper import innermost, resize, wrappers_of
from gradlab.codecs.lgc_ring import LgcRing
from gradlab.coding.bits import packed_bytes
from gradlab.collectives import sum_in_rank_order
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer
from gradlab.learning.autoencoder import RESOLUTIONS, Architecture, Loss, gradient_of, optimized, ring_loss, server_loss
from gradlab.learning.selection import LearnedSelection, largest_of_parts
from gradlab.plan import Group, Plan, Schedule, Wrap
from support.laws import law
from support.process_pool import ProcessPool

LAYERS = (Layer("a.weight", (24, 20), "convolution"), Layer("b.weight", (30, 9), "convolution"))
SIZES = [layer.numel for layer in LAYERS]
KEEPS = (Wrap("error_feedback", {"keep": "unselected", "step_size_ratio": False}),)
QUICK: dict[str, Any] = {"optimizer": "adam", "loss": "mean", "training_steps": 3, "most_error": 1e9}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(ranks: int, step: int) -> list[dict[str, torch.Tensor]]:
    """Gradients with a part in common, of heavy tails."""
    common = {x.name: torch.randn(x.shape, generator=generator(7)) ** 3 for x in LAYERS}
    draws = generator(1000 + step)
    return [
        {name: value + torch.randn(value.shape, generator=draws) for name, value in common.items()}
        for _ in range(ranks)
    ]


def plan(codec: str, wrappers: tuple[Wrap, ...] = KEEPS, weights: torch.Tensor | None = None, **settings: Any) -> Plan:
    group = Group("lgc", tuple(x.name for x in LAYERS), codec, {"density": 0.06, **settings}, wrappers)
    learned = {} if weights is None else {"lgc": {"autoencoder": weights}}
    return Plan(LAYERS, (group,), Schedule(0), 0, learned)


# --- the autoencoders -------------------------------------------------------------------------------------------------


def modules(
    architecture: Architecture, weights: torch.Tensor, decoder: int = 0
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """PyTorch's own layers with the same weights: encoder, deconvolutions, last convolution."""
    named = architecture.separated(weights)
    last = 2 if architecture.resolution == "conv5" else 1
    encoder: list[nn.Module] = []
    for number, (inputs, outputs, size, stride) in enumerate(
        [(1, 64, 3, 2), (64, 128, 3, 2), (128, 256, 3, 2), (256, 64, 3, 2), (64, 4, 1, last)], 1
    ):
        encoder += [_loaded(nn.Conv1d(inputs, outputs, size, stride, size // 2), named, f"encoder.conv{number}")]
        encoder += [nn.LeakyReLU()] if number < 5 else []
    up: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate([(4, 4), (4, 32), (32, 64), (64, 128), (128, 32)], 1):
        stride = 1 if number == 1 and architecture.resolution == "deconv1" else 2
        layer = nn.ConvTranspose1d(inputs, outputs, 3, stride, 1, stride - 1)
        up += [_loaded(layer, named, f"decoder{decoder}.deconv{number}"), nn.LeakyReLU()]
    conv = _loaded(nn.Conv1d(32 + architecture.innovation, 1, 1), named, f"decoder{decoder}.conv")
    return nn.Sequential(*encoder), nn.Sequential(*up), conv


def _loaded(layer: nn.Module, named: dict[str, torch.Tensor], name: str) -> nn.Module:
    layer.load_state_dict({key: named[f"{name}.{key}"] for key in ("weight", "bias")})
    return layer


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_tables_one_and_two(resolution: str) -> None:
    """Shapes and numbers against PyTorch's layers; parameters as counted by hand from the tables."""
    ring, server = Architecture(resolution), Architecture(resolution, decoders=3, innovation=True)
    assert ring.numel == 216_729
    assert server.numel == 172_996 + 3 * 43_734
    for numel in (1, 16, 33, 100):
        padded = ring.padded(numel)
        assert padded % 16 == 0
        assert 0 <= padded - numel < ring.multiple
        x = torch.randn(5, padded, generator=generator(numel))
        weights = ring.initial(generator(1))
        encoder, up, conv = modules(ring, weights)
        code = ring.encode(weights, x)
        assert code.shape == (5, 4, padded // (32 if resolution == "conv5" else 16))
        assert code[0].numel() == ring.code_numel(numel)
        torch.testing.assert_close(code, encoder(x[:, None]), rtol=1e-5, atol=1e-6)
        decoded = ring.decode(weights, code)
        assert decoded.shape == x.shape
        torch.testing.assert_close(decoded, conv(up(code))[:, 0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ring.encode(weights, x[0]), code[0], rtol=1e-5, atol=1e-6)


def test_the_innovation_is_one_more_channel() -> None:
    server = Architecture(decoders=3, innovation=True)
    weights, x = server.initial(generator(0)), torch.randn(48, generator=generator(1))
    code, apart = server.encode(weights, x), torch.randn(48, generator=generator(2))
    for decoder in range(3):
        _, up, conv = modules(server, weights, decoder)
        expected = conv(torch.cat([up(code[None]), apart[None, None]], dim=1))[0, 0]
        torch.testing.assert_close(server.decode(weights, code, decoder, apart), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("resolution", "batch", "ranks"), [("deconv1", (), 5), ("conv5", (3,), 2)])
def test_decoders_of_all_ranks_are_groups_of_one(resolution: str, batch: tuple[int, ...], ranks: int) -> None:
    """As on a GPU: what rank after rank decodes, and its gradient, to 16 units of float32's last place at 1. Sums of
    the first two layers, which have few channels, have another order."""
    server = Architecture(resolution, decoders=ranks, innovation=True)
    weights, apart = (
        server.initial(generator(0)).requires_grad_(),
        torch.randn(*batch, ranks, 96, generator=generator(1)),
    )
    codes = torch.randn(*batch, 4, 96 // server.multiple, generator=generator(2))
    expected, found = server.decode_each(weights, codes, apart), server.decode_grouped(weights, codes, apart)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    (slope, same) = (torch.autograd.grad(one.square().sum(), weights)[0] for one in (found, expected))
    torch.testing.assert_close(slope, same, rtol=1e-5, atol=2e-6 * float(same.abs().max()))


def test_weights_start_as_pytorchs_do() -> None:
    torch.manual_seed(0)
    named = Architecture().separated(Architecture().initial(generator(0)))
    for name, layer in (
        ("encoder.conv2", nn.Conv1d(64, 128, 3)),
        ("decoder0.deconv4", nn.ConvTranspose1d(64, 128, 3)),
        ("decoder0.conv", nn.Conv1d(32, 1, 1)),
    ):
        bound = float(layer.weight.detach().abs().max())
        assert float(named[f"{name}.weight"].abs().max()) == pytest.approx(bound, rel=0.05)
        assert float(named[f"{name}.bias"].abs().max()) <= bound * 1.01


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_training_is_pytorchs(name: str) -> None:
    """Ten steps on eq. (11) against torch.optim on PyTorch's own layers."""
    architecture = Architecture()
    weights, state = architecture.initial(generator(3)), {}
    encoder, up, conv = modules(architecture, weights)
    every = [*encoder.parameters(), *up.parameters(), *conv.parameters()]
    optimizer = torch.optim.SGD(every, 1e-3) if name == "sgd" else torch.optim.Adam(every, 1e-3)
    for step in range(10):
        vectors = torch.randn(4, 64, generator=generator(step))
        loss, gradient = gradient_of(lambda w, v=vectors: ring_loss(architecture, w, v, Loss()), weights)  # type: ignore[misc]
        weights, state = optimized(name, 1e-3, weights, gradient, state)
        optimizer.zero_grad()
        theirs = (conv(up(encoder(vectors[:, None]).mean(0, keepdim=True)))[0, 0] - vectors.mean(0)).square().sum()
        theirs.backward()
        optimizer.step()
        assert loss == pytest.approx(float(theirs.detach()), rel=1e-4)
    expected = torch.cat([value.detach().reshape(-1) for value in every])
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def test_losses_of_the_server_are_eqs_5_to_7() -> None:
    architecture = Architecture(decoders=3, innovation=True)
    weights = architecture.initial(generator(0))
    vectors = torch.randn(3, 32, generator=generator(1))
    apart = vectors * (vectors.abs() > 1)
    code = [architecture.encode(weights, one) for one in vectors]
    decoded = [architecture.decode(weights, code[2], k, apart[k]) for k in range(3)]
    rec = sum(float((vectors[k] - decoded[k]).square().sum()) for k in range(3))
    sim = sum(float((code[k] - code[m]).square().sum()) for k in range(3) for m in range(3) if k != m)
    loss = server_loss(architecture, weights, vectors, apart, 2, Loss("sum", 0.5))
    assert float(loss) == pytest.approx(rec + 0.5 * sim, rel=1e-5)


# --- both algorithms against a plain reading --------------------------------------------------------------------------


def top(values: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:count])


class Reading:
    """Sections IV and V in numpy, node by node, with a trained autoencoder; corrected as the docstrings say."""

    def __init__(self, ranks: int, architecture: Architecture, weights: torch.Tensor, density: float = 0.06) -> None:
        self.ranks, self.architecture, self.weights = ranks, architecture, weights
        self.counts = [int(np.ceil(density * size)) for size in SIZES]
        self.starts = np.cumsum([0, *SIZES])[:-1]
        self.kept = np.zeros((ranks, sum(SIZES)))

    def positions(self, g: np.ndarray) -> np.ndarray:
        parts = zip(self.starts, SIZES, self.counts, strict=True)
        return np.concatenate([start + top(g[start : start + size], count) for start, size, count in parts])

    def padded(self, values: np.ndarray) -> torch.Tensor:
        out = np.zeros(self.architecture.padded(len(values)), np.float32)
        out[: len(values)] = values
        return torch.from_numpy(out)

    def ring(self, grads: np.ndarray, leader: int) -> np.ndarray:
        """Algorithm 2: one node's positions, codes averaged, one decoder."""
        g = grads + self.kept
        chosen = self.positions(g[leader])
        codes = [self.architecture.encode(self.weights, self.padded(one[chosen])) for one in g]
        mean = sum(codes) / len(codes)
        averaged = np.zeros(g.shape[1])
        averaged[chosen] = self.architecture.decode(self.weights, mean)[: len(chosen)].numpy()
        self.kept = g.copy()
        self.kept[:, chosen] = 0
        return averaged

    def server(self, grads: np.ndarray, sender: int) -> np.ndarray:
        """Algorithm 1: own positions, the sender's code, every node's innovation and decoder."""
        g = grads + self.kept
        chosen = [self.positions(one) for one in g]
        code = self.architecture.encode(self.weights, self.padded(g[sender][chosen[sender]]))
        averaged = np.zeros(g.shape[1])
        self.kept = g.copy()
        for k in range(self.ranks):
            values, start, apart = g[k][chosen[k]], 0, np.zeros(sum(self.counts))
            for count in self.counts:
                part = top(values[start : start + count], int(np.ceil(round(0.1 * count, 9)))) + start
                apart[part] = values[part]
                start += count
            decoded = self.architecture.decode(self.weights, code, k, self.padded(apart))
            averaged[chosen[k]] += decoded[: len(values)].numpy() / self.ranks
            self.kept[k, chosen[k]] = 0
        return averaged


@pytest.mark.parametrize(("pattern", "ranks"), [("ring", 2), ("ring", 4), ("server", 4), ("server", 24)])
def test_both_algorithms_are_a_plain_reading(pattern: str, ranks: int) -> None:
    """Lockstep with a fitted autoencoder, some iterations, means and what is accumulated."""
    architecture = Architecture() if pattern == "ring" else Architecture(decoders=ranks, innovation=True)
    weights = architecture.initial(generator(5))
    chosen = plan(f"lgc_{pattern}", weights=weights)
    codec, lockstep = innermost(chosen.build(chosen.groups[0])), LockstepPlan(chosen, ranks)
    assert isinstance(codec, LearnedSelection)
    reading = Reading(ranks, architecture, weights)
    for step in range(3 if ranks < 24 else 2):
        grads = drawn(ranks, step)
        flat = np.stack([np.concatenate([g[x.name].double().reshape(-1).numpy() for x in LAYERS]) for g in grads])
        leader = codec.leader(Context(0, ranks, step, "lgc", chosen.seed))
        expected = reading.ring(flat, leader) if pattern == "ring" else reading.server(flat, 0)
        done = lockstep.step(step, grads).exchanged["lgc"]
        averaged = np.concatenate([done[0].mean[x.name].reshape(-1).numpy() for x in LAYERS])
        np.testing.assert_allclose(averaged, expected, rtol=1e-4, atol=1e-5)
        for rank, one in enumerate(done):
            assert all(torch.equal(one.mean[x.name], done[0].mean[x.name]) for x in LAYERS)
            kept = np.concatenate(
                [lockstep.states[rank]["lgc"][f"{x.name}/residual"].reshape(-1).numpy() for x in LAYERS]
            )
            np.testing.assert_allclose(kept, reading.kept[rank], rtol=1e-5, atol=1e-5)


def test_bytes_are_what_travels() -> None:
    """Ring: codes of all, positions of one. Server: innovations and positions of all, the code of one."""
    count = sum(int(np.ceil(0.06 * size)) for size in SIZES)
    packed = packed_bytes(count, 10)  # positions below 750
    ring = LockstepPlan(plan("lgc_ring", weights=Architecture().initial(generator(0)), index_coding="packed"), 4)
    payload = sorted(ring.step(0, drawn(4, 0)).payload)
    code = 4 * Architecture().code_numel(count)
    assert payload == [code + 4, code + 4, code + 4, code + packed + 4]  # 4: are all gradients finite
    server = Architecture(decoders=4, innovation=True)
    lockstep = LockstepPlan(plan("lgc_server", weights=server.initial(generator(0)), index_coding="packed"), 4)
    apart = sum(int(np.ceil(round(0.1 * int(np.ceil(0.06 * size)), 9))) for size in SIZES)
    each = packed + 4 * apart + packed_bytes(apart, 6) + 4
    assert sorted(lockstep.step(0, drawn(4, 0)).payload) == [each, each, each, each + code]


@pytest.mark.parametrize("order", ["position", "value"])
@pytest.mark.parametrize("normalise", ["none", "layer"])
def test_what_is_coded_comes_back_to_its_place(order: str, normalise: str) -> None:
    """An autoencoder that is the identity would be lossless: order and scale are undone on every rank."""
    codec = LgcRing(LgcRing.Settings(0.06, order=order, normalise=normalise))
    seen: list[torch.Tensor] = []

    class Through(Architecture):
        def encode(self, weights: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
            seen.append(vectors)
            return vectors

        def decode(self, weights: torch.Tensor, codes: torch.Tensor, *_: Any) -> torch.Tensor:
            return codes

    codec.architecture = lambda world_size=1: Through()  # type: ignore[method-assign]
    codec.learned = {"autoencoder": torch.zeros(1)}
    lockstep = LockstepPlan(plan("lgc_ring", ()), 3)
    for run in lockstep.runs:
        run.codecs["lgc"] = codec
    grads = drawn(3, 0)
    done = lockstep.step(0, grads).exchanged["lgc"][0].mean
    for x in LAYERS:
        at = done[x.name] != 0
        assert int(at.sum()) == int(np.ceil(0.06 * x.numel))
        torch.testing.assert_close(done[x.name][at], sum_in_rank_order([g[x.name] for g in grads])[at])
    count = sum(codec.counts(SIZES))
    leaders = seen[0][:count]
    if order == "value":
        assert bool((leaders.diff() <= 0).all())
    if normalise == "layer" and order == "position":
        first = codec.counts(SIZES)[0]
        assert float(leaders[:first].square().mean()) == pytest.approx(1.0, rel=1e-4)


# --- phases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["ring", "server"])
def test_three_phases(pattern: str) -> None:
    """Dense; selected values as they are while rank 0 learns; then its weights, broadcast once, on every rank."""
    chosen = plan(f"lgc_{pattern}", **QUICK)
    lockstep = LockstepPlan(Plan(LAYERS, chosen.groups, Schedule(2)), 4)
    payloads = []
    for step in range(7):
        grads = drawn(4, step)
        result = lockstep.step(step, grads)
        payloads.append(sum(result.payload))
        if 2 <= step < 5:
            done = result.exchanged["lgc"]
            asked = sum_in_rank_order([one.compressor_input["a.weight"] for one in done])
            at = done[0].mean["a.weight"] != 0
            if pattern == "ring":
                torch.testing.assert_close(done[0].mean["a.weight"][at], asked[at])
            own = sum_in_rank_order([one.own["a.weight"] for one in done])
            torch.testing.assert_close(done[0].mean["a.weight"], own)
    weights = [states["lgc"]["a.weight/autoencoder"] for states in lockstep.states]
    assert all(torch.equal(one, weights[0]) for one in weights)
    assert set(lockstep.states[0]["lgc"]) == set(lockstep.states[1]["lgc"])
    assert payloads[4] - payloads[3] >= 4 * len(weights[0])
    assert payloads[5] < payloads[3] < payloads[0]
    assert chosen.payload_bytes(4) == pytest.approx(payloads[6] / 4, rel=0.1)


def test_an_autoencoder_that_learned_nothing_is_not_used() -> None:
    for settings in (QUICK | {"most_error": 1e-6}, QUICK | {"optimizer": "sgd", "loss": "sum", "learning_rate": 1e4}):
        lockstep = LockstepPlan(plan("lgc_ring", **settings), 2)
        for step in range(2):
            lockstep.step(step, drawn(2, step))
        with pytest.warns(UserWarning, match="selected values go on as they are"):
            lockstep.step(2, drawn(2, 2))
        done = lockstep.step(3, drawn(2, 3)).exchanged["lgc"]
        at = done[0].mean["a.weight"] != 0
        asked = sum_in_rank_order([one.compressor_input["a.weight"] for one in done])
        torch.testing.assert_close(done[0].mean["a.weight"][at], asked[at])
        assert "a.weight/autoencoder" not in lockstep.states[0]["lgc"]


@pytest.mark.parametrize("codec", ["lgc_ring", "lgc_server"])
@pytest.mark.parametrize("rate", [1e-3, 9e5])
def test_while_it_learns_all_ranks_have_the_same_entries_and_finite_ones(codec: str, rate: float) -> None:
    """So that a checkpoint of any iteration is read again, also where the autoencoder has diverged."""
    lockstep = LockstepPlan(plan(codec, **QUICK | {"training_steps": 4, "learning_rate": rate, "most_error": 0.9}), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            lockstep.step(step, drawn(3, step))
            first, *others = [state["lgc"] for state in lockstep.states]
            assert all(set(other) == set(first) for other in others)
            assert all(bool(value.isfinite().all()) for value in first.values())
            if step < 3:
                assert first["a.weight/autoencoder"].numel() > 0 == others[0]["a.weight/autoencoder"].numel()


def test_what_was_fitted_and_is_no_good_is_not_used() -> None:
    """Its error came with it: selected values travel as they are from the first iteration on, and that is said."""
    weights = Architecture().initial(generator(1))
    for error, used in ((0.95, False), (0.5, True)):
        chosen = plan("lgc_ring", weights=weights)
        learned = {"lgc": {**chosen.learned["lgc"], "error": torch.tensor([error])}}
        lockstep = LockstepPlan(replace(chosen, learned=learned), 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                done = lockstep.step(step, drawn(2, step))
        assert [("most_error" in str(one.message)) for one in caught] == ([] if used else [True])
        inputs = sum_in_rank_order([one.compressor_input["a.weight"] for one in done.exchanged["lgc"]])
        mean = done.exchanged["lgc"][0].mean["a.weight"]
        assert torch.allclose(mean[mean != 0], inputs[mean != 0]) != used
        assert chosen.payload_bytes(2) <= replace(chosen, learned=learned).payload_bytes(2)
    for wrong in (torch.tensor([float("nan")]), torch.zeros(2)):
        with pytest.raises(GradlabError, match="error: expected one finite number"):
            LockstepPlan(replace(chosen, learned={"lgc": {**chosen.learned["lgc"], "error": wrong}}), 2)


def test_a_code_that_says_nothing_is_warned_of() -> None:
    """A similarity loss that outweighs all else makes all codes one; without it they differ."""
    steady = {"optimizer": "adam", "loss": "mean", "learning_rate": 0.003, "positions": "shared", "most_error": 1e9}
    for similarity, steps, collapses in ((1e6, 180, True), (1e-6, 20, False)):
        lockstep = LockstepPlan(plan("lgc_server", training_steps=steps, similarity=similarity, **steady), 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(steps):
                lockstep.step(step, drawn(2, step))
        assert any("they say next to nothing" in str(one.message) for one in caught) == collapses
        assert set(lockstep.states[0]["lgc"]) == set(lockstep.states[1]["lgc"])


def test_learned_tensors_are_on_the_device_within_all_wrappers() -> None:
    chosen = plan("lgc_ring", (*KEEPS, Wrap("sparsity_warmup")), Architecture().initial(generator(1)))
    _, stages = wrappers_of(chosen.build(chosen.groups[0], "meta"))
    assert all(innermost(stages.at(step)).learned["autoencoder"].is_meta for step in (0, 1000))


def test_learned_before_the_second_phase_is_skipped_or_short() -> None:
    weights = Architecture().initial(generator(1))
    at_once = LockstepPlan(plan("lgc_ring", weights=weights), 2)
    tuned = LockstepPlan(plan("lgc_ring", weights=weights, **QUICK, fine_tune_steps=2), 2)
    for step in range(3):
        at_once.step(step, drawn(2, step))
        tuned.step(step, drawn(2, step))
    assert torch.equal(at_once.states[1]["lgc"]["a.weight/autoencoder"], weights)
    learned = tuned.states[1]["lgc"]["a.weight/autoencoder"]
    assert 0 < float((learned - weights).abs().max()) < 0.1


def test_feedback_against_the_decoded_average_sends_all_in_the_end() -> None:
    """keep = "difference": what is decoded and what is kept are what was asked for; "unselected" forgets."""
    for keep in ("difference", "unselected"):
        around = (Wrap("error_feedback", {"keep": keep, "step_size_ratio": False}),)
        lockstep = LockstepPlan(plan("lgc_ring", around, Architecture().initial(generator(0))), 2)
        for step in range(3):
            done = lockstep.step(step, drawn(2, step)).exchanged["lgc"]
            for rank, one in enumerate(done):
                for x in LAYERS:
                    kept = lockstep.states[rank]["lgc"][f"{x.name}/residual"]
                    at = one.mean[x.name] != 0
                    if keep == "difference":
                        torch.testing.assert_close(kept + one.own[x.name], one.compressor_input[x.name])
                    else:
                        assert not kept[at].any()
                        torch.testing.assert_close(kept[~at], one.compressor_input[x.name][~at])


def test_nothing_is_kept_as_unselected_around_what_sends_all() -> None:
    layers = (Layer("a.weight", (20, 20), "linear"),)
    for wrap in (KEEPS[0], Wrap("momentum_correction", {"keep": "unselected"})):
        with pytest.raises(GradlabError, match="keep = unselected around powersgd, which sends every element"):
            Plan(layers, (Group("a.weight", ("a.weight",), "powersgd", {}, (wrap,)),))
    with pytest.raises(GradlabError, match="keep = 'some', expected 'difference' or 'unselected'"):
        Plan(layers, (Group("a.weight", ("a.weight",), "topk", {}, (Wrap("error_feedback", {"keep": "some"}),)),))


def test_momentum_correction_keeps_the_unselected() -> None:
    """The text's accumulation: u and v are masked where something was selected, whatever was decoded there."""
    around = (Wrap("momentum_correction", {"momentum": 0.5, "keep": "unselected"}),)
    lockstep = LockstepPlan(plan("lgc_ring", around, Architecture().initial(generator(0))), 2)
    u = v = torch.zeros(LAYERS[0].shape)
    for step in range(3):
        grads = drawn(2, step)
        mean = lockstep.step(step, grads).exchanged["lgc"][0].mean["a.weight"]
        u = 0.5 * u + grads[1]["a.weight"]
        v = (v + u).masked_fill(mean != 0, 0.0)
        u = u.masked_fill(mean != 0, 0.0)
        state = lockstep.states[1]["lgc"]
        torch.testing.assert_close(state["a.weight/velocity"], u)
        torch.testing.assert_close(state["a.weight/residual"], v)


# --- awkward input ----------------------------------------------------------------------------------------------------


def test_decoders_of_another_world_size_are_refused() -> None:
    weights = Architecture(decoders=4, innovation=True).initial(generator(0))
    with pytest.raises(GradlabError, match="trained for 4 ranks, one each, and this run has 2"):
        LockstepPlan(plan("lgc_server", weights=weights), 2).step(0, drawn(2, 0))
    with pytest.raises(GradlabError, match="autoencoder of 5 weights, expected 216729"):
        plan("lgc_ring", weights=torch.zeros(5))
    with pytest.raises(GradlabError, match="autoencoder of 5 weights, expected 172996 and 43734 for each rank"):
        plan("lgc_server", weights=torch.zeros(5))
    with pytest.raises(GradlabError, match="one vector of float32 weights"):
        plan("lgc_ring", weights=torch.full((216_729,), torch.nan))
    with pytest.raises(GradlabError, match="resolution = 'deconv9'"):
        plan("lgc_ring", resolution="deconv9")


def test_another_number_of_ranks_learns_its_decoders_anew() -> None:
    """A ring's autoencoder serves any; what was learned of a server's ranks does not."""
    for codec in ("lgc_ring", "lgc_server"):
        lockstep = LockstepPlan(plan(codec, **QUICK), 4)
        for step in range(4):
            lockstep.step(step, drawn(4, step))
        stack, before = lockstep.codecs["lgc"], [states["lgc"] for states in lockstep.states]
        fewer = LockstepPlan(plan(codec, **QUICK), 2)
        fewer.states = [{"lgc": resize(stack, before, rank, 2, "split")} for rank in range(2)]
        assert ("a.weight/autoencoder" in fewer.states[1]["lgc"]) == (codec == "lgc_ring")
        assert "a.weight/residual" in fewer.states[1]["lgc"]
        for step in range(4, 8):
            fewer.step(step, drawn(2, step))
        assert "a.weight/autoencoder" in fewer.states[1]["lgc"]


@pytest.mark.parametrize("codec", ["lgc_ring", "lgc_server"])
def test_short_selections_and_ranks_of_zeros(codec: str) -> None:
    """Three values in a vector of sixteen; a rank, and then all, with nothing but zeros."""
    layers = (Layer("a.weight", (4, 12), "linear"),)
    group = Group("lgc", ("a.weight",), codec, {"density": 0.06, "normalise": "layer", **QUICK}, KEEPS)
    lockstep = LockstepPlan(plan := Plan(layers, (group,)), 3)
    for step in range(6):
        grads = [{"a.weight": torch.randn(4, 12, generator=generator(10 * step + r))} for r in range(3)]
        for rank in {0: (), 1: (1,), 2: (0, 1, 2)}.get(step % 3, ()):
            grads[rank] = {"a.weight": torch.zeros(4, 12)}
        result = lockstep.step(step, grads)
        assert result.finite
        assert bool(result.exchanged["lgc"][0].mean["a.weight"].isfinite().all())
    state = lockstep.states[0]["lgc"]
    assert state["a.weight/clock"][0] == 1
    kept = plan.build(group).kept(layers, 0, 3, "lgc")
    assert state_problem(kept, {"a.weight/clock": state["a.weight/clock"]}) == "'a.weight/autoencoder' is missing"
    assert "has the shape [0]" in str(state_problem(kept, {"a.weight/clock": torch.zeros(0)}))


@law(st.integers(0, 2**31), st.lists(st.integers(0, 20), min_size=1, max_size=5), examples=40)
def test_innovations_are_the_largest_of_each_layer(seed: int, counts: list[int]) -> None:
    values = torch.randn(sum(counts), generator=generator(seed))
    kept = [min(count, 1 + count // 10) if count else 0 for count in counts]
    positions, start = largest_of_parts(values, counts, kept), 0
    assert positions.tolist() == sorted(positions.tolist())
    for count, wanted in zip(counts, kept, strict=True):
        of_layer = [int(p) for p in positions if start <= p < start + count]
        assert len(of_layer) == wanted
        rest = [abs(float(values[p])) for p in range(start, start + count) if p not in of_layer]
        assert not of_layer or min(abs(float(values[p])) for p in of_layer) >= max(rest, default=0.0)
        start += count


def test_a_group_learns_though_its_first_layer_has_no_gradient(pool: ProcessPool) -> None:
    """What belongs to the group is kept; of that layer nothing is."""
    for clocks in pool.run("jobs.ddp_tasks:learns_without_its_first_layer", 2):
        assert clocks == [[0, 1], [1, 0], [1, 0], [1, 0]]
