"""LGC's autoencoder fitted on a trace: what is selected, what it is worth beside simpler codes, and the command."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradlab.analysis.fit.lgc.fit import Fitting, fit_lgc, learn
from gradlab.analysis.fit.lgc.learners import Inputs, RingLearner, learner_of
from gradlab.analysis.fit.lgc.selections import Selections, codes_without_learning, collect_selections
from gradlab.artifact import Artifact
from gradlab.codec import Context
from gradlab.codec.wrapper import innermost
from gradlab.codecs.lgc_ring import LgcRing
from gradlab.coding.bits import packed_bytes
from gradlab.collectives import all_gather_wire_bytes, broadcast_wire_bytes
from gradlab.datasets import get
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer, layers_of
from gradlab.learning.autoencoder import Architecture, Loss, server_loss
from gradlab.learning.selection import padded
from gradlab.plan import lgc_plan
from gradlab.plan.lgc_recipe import GROUP, graph_order
from gradlab.plan.optimizer_rules import wrapper_that
from gradlab.trace import Trace
from support.command_line import Command
from support.recorded import record

LAYERS = (
    Layer("stem.weight", (16, 16), "convolution"),
    Layer("mid.weight", (40, 20), "linear"),
    Layer("deep.weight", (30, 30), "linear"),
    Layer("deep.bias", (30,), "bias"),
    Layer("head.weight", (10, 30), "linear"),
)
RANKS, STEPS = 3, 24
SETTINGS: dict[str, Any] = {"density": 0.05, "order": "value", "normalise": "layer"}
QUICK = Fitting(epochs=3, batch=4)
RING = RingLearner(LgcRing(), [800, 900])
SERVERS: dict[str, dict[str, Any]] = {
    "own": {"density": 0.05},
    "shared": {"density": 0.05, "positions": "shared", "normalise": "layer"},
}


def planted(steps: int = STEPS, ranks: int = RANKS, noise: float = 0.1) -> list[list[dict[str, np.ndarray]]]:
    """A heavy-tailed part that all ranks share in a step, and noise of their own."""
    rng = np.random.default_rng(0)
    gradients = []
    for _ in range(steps):
        common = {x.name: rng.standard_normal(x.shape) ** 3 for x in LAYERS}
        gradients.append(
            [
                {n: (c + noise * rng.standard_normal(c.shape)).astype(np.float32) for n, c in common.items()}
                for _ in range(ranks)
            ]
        )
    return gradients


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(tmp_path_factory.mktemp("lgc") / "t", planted(), LAYERS)


@pytest.fixture(scope="module")
def selections(trace: Trace) -> Selections:
    return collect_selections(trace, lgc_plan(LAYERS, **SETTINGS))


def test_selections_are_what_the_codec_codes(trace: Trace, selections: Selections) -> None:
    """Decoding the average of their codes is what lockstep gives in the third phase, accumulation and all."""
    weights = Architecture().initial(torch.Generator().manual_seed(0))
    lockstep = LockstepPlan(lgc_plan(LAYERS, autoencoder=weights, warmup_steps=0, **SETTINGS), RANKS)
    for place, step in enumerate(trace.iterate(0, 3, [x.name for x in LAYERS])):
        grads = [{n: torch.from_numpy(v) for n, v in rank.items()} for rank in step.gradients]
        done = lockstep.step(step.index, grads).exchanged[GROUP][0]
        here = selections.part(place, place + 1)
        inputs = padded(here.values[0] / here.scales[0], Architecture())
        expected = Architecture().decode(weights, Architecture().encode(weights, inputs).mean(0))
        expected = expected[: here.count] * here.scales[0, 0]
        selected = torch.cat([value.reshape(-1) for value in done.mean.values()])
        assert sorted(selected[selected != 0].tolist()) == pytest.approx(sorted(expected.tolist()), rel=1e-4, abs=1e-6)
    assert selections.values.shape == (STEPS, RANKS, 40 + 45)
    codec = innermost(lockstep.codecs[GROUP])
    assert isinstance(codec, LgcRing)
    assert selections.leaders.tolist() == [codec.leader(Context(0, RANKS, step, GROUP)) for step in range(STEPS)]
    normalised = selections.led / selections.scales[:, 0]
    assert bool((normalised.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("positions", SERVERS)
def test_a_servers_selections_and_decoders_are_the_codecs(positions: str, tmp_path: Path) -> None:
    """What each rank's values become in the first iteration that is coded, summed at its positions, is the average."""
    settings, trace = SERVERS[positions], record(tmp_path / "t", planted(1, noise=3.0), LAYERS)
    learner = learner_of("server", settings, [800, 900], RANKS)
    weights = learner.architecture.initial(torch.Generator().manual_seed(0))
    plan = lgc_plan(LAYERS, "server", autoencoder=weights, warmup_steps=0, **settings)
    [step] = trace.iterate(0, 1, [x.name for x in LAYERS])
    grads = [{n: torch.from_numpy(v) for n, v in rank.items()} for rank in step.gradients]
    done = LockstepPlan(plan, RANKS).step(step.index, grads).exchanged[GROUP][0]
    averaged = torch.cat([value.reshape(-1) for value in done.mean.values()])
    one = collect_selections(trace, lgc_plan(LAYERS, "server", **settings)).part(0, 1)
    decoded = learner.averages(weights, one)
    expected, true = torch.zeros(1700), torch.zeros(1700)
    for rank in range(RANKS):
        expected[one.positions[0, rank]] += decoded[0, rank] / RANKS
        true[one.positions[0, rank]] += one.values[0, rank] / RANKS
    torch.testing.assert_close(averaged, expected, rtol=1e-4, atol=1e-5)
    error, energy = one.errors(decoded)
    assert float(error) == pytest.approx(float((expected - true).square().sum()), rel=1e-4)
    assert float(energy) == pytest.approx(float(true.square().sum()), rel=1e-4)
    own = len({tuple(row.tolist()) for row in one.positions[0]})
    assert own == (RANKS if positions == "own" else 1)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_servers_loss_of_several_iterations_is_their_mean(reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    architecture = Architecture(decoders=3, innovation=True)
    weights, loss = architecture.initial(generator), Loss(reduction, 0.3)
    vectors, apart = (torch.randn(4, 3, 32, generator=generator) for _ in range(2))
    common = torch.tensor([2, 0, 1, 1])
    together = server_loss(architecture, weights, vectors, apart, common, loss)
    alone = [
        server_loss(architecture, weights, v, a, int(c), loss) for v, a, c in zip(vectors, apart, common, strict=False)
    ]
    assert float(together) == pytest.approx(float(torch.stack(alone).mean()), rel=1e-5)


@pytest.mark.parametrize("pattern", ["ring", "server"])
def test_what_was_fitted_is_tuned_online_where_that_is_asked_for(pattern: str) -> None:
    """For so many iterations values travel as they are and the weights move; then codes do."""
    layer = Layer("b", (1,), "linear")
    ranks = 2
    learner = learner_of(pattern, {"density": 0.05}, [800, 900, layer.numel], ranks)
    fitted = learner.architecture.initial(torch.Generator().manual_seed(0))
    tuned = {"fine_tune_steps": 2, "optimizer": "adam", "loss": "mean", "most_error": 1e9, "density": 0.05}
    plan = lgc_plan(LAYERS, pattern, autoencoder=fitted, warmup_steps=0, **tuned)
    lockstep, seen = LockstepPlan(plan, ranks), []
    for step, gradients in enumerate(planted(3, ranks)):
        lockstep.step(step, [{n: torch.from_numpy(v) for n, v in rank.items()} for rank in gradients])
        seen.append([{k.rsplit("/", 1)[1]: v for k, v in state[GROUP].items()} for state in lockstep.states])
    assert [[int(mode) for mode in one["clock"]] for one in (rank[1] for rank in seen)] == [[0, 1], [1, 0], [1, 0]]
    moved = seen[0][0]["autoencoder"] - fitted
    assert 0 < float(moved.abs().max()) < 3e-3
    assert torch.equal(seen[1][0]["autoencoder"], seen[1][1]["autoencoder"])
    assert not torch.equal(seen[1][0]["autoencoder"], seen[0][0]["autoencoder"])


def test_learning_is_repeated_and_stops_where_it_was_best(selections: Selections) -> None:
    first, last = selections.part(0, 16), selections.part(16, 20)
    runs = [learn(RING, first, last, QUICK, seed=5) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert not torch.equal(runs[0][0], learn(RING, first, last, QUICK, seed=6)[0])
    small = replace(first, values=2.0**-20 * first.values, scales=2.0**-20 * first.scales)
    assert torch.allclose(learn(RING, small, last, QUICK, seed=5)[0], runs[0][0], rtol=1e-3, atol=1e-5)
    raw = replace(first, values=1e-6 * first.values, scales=torch.ones_like(first.scales))
    raw = raw.part(0, 8)
    weights, curve = learn(RING, raw, raw, Fitting(epochs=25, batch=2), seed=5)
    inputs = padded(raw.values, Architecture())
    decoded = Architecture().decode(weights, Architecture().encode(weights, inputs).mean(1))
    true = inputs.mean(1)
    error = float((decoded - true).square().sum() / true.square().sum())
    assert error == pytest.approx(min(row.stop for row in curve), rel=1e-2)
    assert error < 0.5 < curve[0].stop


def test_codes_without_learning_are_what_they_say(selections: Selections) -> None:
    held, true = selections.part(16, STEPS), selections.values[16:].mean(1)
    codes = {code.name.split(",")[0].split(" (")[0]: code for code in codes_without_learning(
        selections.part(0, 16), selections, RANKS, 24)}  # fmt: skip
    count = true.shape[1]
    errors = {
        name: float((code.decoded(held).mean(1) - true).square().sum() / true.square().sum())
        for name, code in codes.items()
    }
    assert errors["zeros"] == 1.0
    assert errors["int8"] < 1e-3 < errors["int4"] < 0.1
    led = held.led.numpy()
    for row, mean, leader in zip(
        codes["largest quarter"].decoded(held).mean(1).numpy(), true.numpy(), led, strict=True
    ):
        kept = np.argsort(-np.abs(leader))[: -(-count // 4)]
        assert set(np.flatnonzero(row)) == set(kept)
        np.testing.assert_array_equal(row[kept], mean[kept])
    for name in ("block means of 4", "sorted block means of 4"):
        for row, mean, leader in zip(codes[name].decoded(held).mean(1).numpy(), true.numpy(), led, strict=True):
            order = np.argsort(leader, kind="stable") if name.startswith("sorted") else np.arange(count)
            parts = np.split(mean[order], range(4, count, 4))
            expected = np.concatenate([np.full(len(part), part.mean()) for part in parts])
            np.testing.assert_allclose(row[order], expected, rtol=1e-4, atol=1e-5)
    again = codes["PCA"].decoded(held).mean(1)
    assert torch.linalg.matrix_rank(again.double(), tol=1e-4) <= 15
    assert codes["largest quarter"].payload_bytes == 4 * 22 + packed_bytes(count, 1) / RANKS
    assert codes["sorted block means of 4"].payload_bytes == 4 * 22 + packed_bytes(count, 7) / RANKS
    assert codes["int8"].payload_bytes == count + 4


def test_codes_at_own_positions_are_each_ranks(trace: Trace) -> None:
    """Largest and sorted by a rank's own values, which it tells; all of it gathered."""
    selections = collect_selections(trace, lgc_plan(LAYERS, "server", **SERVERS["own"]))
    held = selections.part(16, STEPS)
    codes = {code.name: code for code in codes_without_learning(selections.part(0, 16), selections, RANKS, 24)}
    quarter = codes["largest quarter"]
    for decoded, true in zip(quarter.decoded(held).flatten(0, 1), held.values.flatten(0, 1), strict=True):
        kept = true.abs().topk(22).indices
        assert torch.equal(decoded[kept], true[kept])
        assert int((decoded != 0).sum()) == 22
    assert quarter.payload_bytes == 4 * 22 + packed_bytes(85, 1)
    assert quarter.wire_bytes == (RANKS - 1) * quarter.payload_bytes
    errors = {name: float(torch.stack(held.errors(code.decoded(held))).sum(1)[0]) for name, code in codes.items()}
    assert errors["int8, scale per 256"] < errors["int4, scale per 256"] < errors["sorted block means of 4"]


def test_a_server_is_fitted_too(trace: Trace) -> None:
    fit = fit_lgc(trace, "server", settings=SERVERS["own"], fitting=QUICK)
    assert fit.provenance["pattern"] == "server"
    assert [group.codec for group in fit.plan.groups] == ["lgc_server", "topk"]
    assert 0 < fit.provenance["codes"][0]["error"] < 1.5
    assert len(fit.plan.learned[GROUP]["autoencoder"]) == Architecture(decoders=RANKS, innovation=True).numel


def test_the_fit_says_what_it_is_worth(trace: Trace, tmp_path: Path) -> None:
    fit = fit_lgc(trace, settings=SETTINGS, fitting=QUICK, seed=1)
    provenance = fit.provenance
    assert provenance["iterations"] == {"learned": 14, "stopped_by": 4, "held_out": 6}
    assert provenance["codes"][0]["name"] == "autoencoder"
    assert provenance["codes"][1]["error"] == 1.0
    assert provenance["better"] is not None  # three epochs do not beat four bits
    assert [group.codec for group in fit.plan.groups] == ["lgc_ring", "clt_k"]
    assert fit.plan.groups[0].layers == ("mid.weight", "deep.weight")
    assert [layer.name for layer in fit.plan.dense_layers] == ["stem.weight", "deep.bias"]
    path = fit.artifact().save(tmp_path / "lgc.safetensors")
    again = Artifact.load(path)
    assert again.plan.digest == fit.plan.digest
    assert again.provenance == provenance
    assert "most_error" not in provenance
    assert fit.measured.better is not None
    assert fit.measured.better.name == provenance["better"]
    grads = [{n: torch.from_numpy(v) for n, v in r.items()} for r in planted(1)[0]]
    error = float(again.plan.learned[GROUP]["error"])
    assert error == pytest.approx(provenance["codes"][0]["error"])
    assert error > 0.9
    with pytest.warns(UserWarning, match="above most_error = 0.9: selected values go on as they are"):
        result = LockstepPlan(again.plan, RANKS).step(0, grads)
    assert result.exchanged[GROUP][0].mean["mid.weight"].isfinite().all()


def test_what_cannot_be_fitted_is_named(trace: Trace, tmp_path: Path) -> None:
    short = record(tmp_path / "short", planted(8), LAYERS)
    with pytest.raises(GradlabError, match="8 finite iterations, expected at least 20"):
        fit_lgc(short, settings=SETTINGS, fitting=QUICK)
    alone = record(tmp_path / "alone", planted(2, 1), LAYERS)
    with pytest.raises(GradlabError, match="one rank's gradients"):
        fit_lgc(alone, settings=SETTINGS, fitting=QUICK)
    with pytest.raises(GradlabError, match="2 layers of two dimensions"):
        lgc_plan(LAYERS[:2])
    with pytest.raises(GradlabError, match="1 layers of two dimensions"):
        lgc_plan(LAYERS[:1])
    with pytest.raises(GradlabError, match="no layer 'nosuch'"):
        lgc_plan(LAYERS, last="nosuch")
    with pytest.raises(GradlabError, match="pattern 'star'"):
        lgc_plan(LAYERS, "star")
    with pytest.raises(GradlabError, match="epochs = 0"):
        Fitting(epochs=0)
    chosen = lgc_plan(LAYERS, "server", first="mid.weight", last="deep.weight", momentum=0.9)
    assert chosen.groups[0].layers == ("stem.weight", "head.weight")
    assert chosen.groups[1].codec == "topk"
    assert wrapper_that(chosen, "applies_momentum")
    assert {group.layers[0] for group in chosen.groups[2:]} == {"mid.weight", "deep.bias"}


@pytest.mark.parametrize("pattern", ["ring", "server"])
def test_vectors_go_where_the_recipe_says(pattern: str) -> None:
    """Dense by default; with the autoencoder's, at least one value of each; or sparse, as the last layer."""
    learner = learner_of(pattern, {"density": 0.02}, [800, 900], RANKS)
    known: dict[str, Any] = {"autoencoder": learner.architecture.initial(torch.Generator().manual_seed(0))}
    known |= {"density": 0.02, "warmup_steps": 0}
    dense, coded, sparse = (
        lgc_plan(LAYERS, pattern, vectors=vectors, **known) for vectors in ("dense", "autoencoder", "sparse")
    )
    assert dense.digest == lgc_plan(LAYERS, pattern, **known).digest
    assert [layer.name for layer in dense.dense_layers] == ["stem.weight", "deep.bias"]
    assert coded.groups[0].layers == ("mid.weight", "deep.weight", "deep.bias")
    assert sparse.groups[2].layers == ("deep.bias",)
    assert sparse.groups[1:] == (*dense.groups[1:], replace(dense.groups[1], name="vectors", layers=("deep.bias",)))
    grads = [{n: torch.from_numpy(v) for n, v in r.items()} for r in planted(1)[0]]
    for plan in (coded, sparse):
        assert [layer.name for layer in plan.dense_layers] == ["stem.weight"]
        assert plan.payload_bytes(RANKS) < dense.payload_bytes(RANKS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # three epochs do not make an autoencoder
            done = LockstepPlan(plan, RANKS).step(0, grads).exchanged
        [mean] = [ranks[0].mean["deep.bias"] for ranks in done.values() if "deep.bias" in ranks[0].mean]
        assert 1 <= int(mean.count_nonzero()) <= RANKS  # of 30: each rank's largest, or the leader's
    with pytest.raises(GradlabError, match="vectors = 'some', expected one of dense, autoencoder, sparse"):
        lgc_plan(LAYERS, pattern, vectors="some")


def test_first_and_last_are_those_of_the_graph() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.middle, self.stem = nn.Linear(20, 15), nn.Linear(20, 20), nn.Linear(16, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.middle(self.stem(x)))

    assert [name for name in graph_order(Backwards()) if "weight" in name] == [
        "stem.weight",
        "middle.weight",
        "head.weight",
    ]
    assert lgc_plan(Backwards()).groups[0].layers == ("middle.weight",)

    class Branching(Backwards):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    assert graph_order(Branching())[0] == "head.weight"

    class Unused(Backwards):
        def __init__(self) -> None:
            super().__init__()
            self.auxiliary = nn.Linear(30, 30)

    groups = lgc_plan(Unused()).groups
    assert set(groups[0].layers) == {"middle.weight", "auxiliary.weight"}
    assert groups[1].layers == ("head.weight",)


def test_a_fit_that_diverges_keeps_what_it_had_or_says_so(selections: Selections) -> None:
    first, last = selections.part(0, 16), selections.part(16, 20)

    class Lost(RingLearner):
        """Whose errors are no numbers any more in the third epoch."""

        def error(self, weights: torch.Tensor, inputs: Inputs) -> float:
            asked.append(0)
            return super().error(weights, inputs) if len(asked) <= 4 else math.nan

    asked: list[int] = []
    weights, curve = learn(Lost(LgcRing(), [800, 900]), first, last, Fitting(epochs=5), seed=1)
    assert len(curve) == 2
    assert torch.equal(weights, learn(RING, first, last, Fitting(epochs=2), seed=1)[0])
    tiny = [replace(part, values=1e-30 * part.values, scales=torch.ones_like(part.scales)) for part in (first, last)]
    assert len(learn(RING, *tiny, Fitting(epochs=1), seed=1)[1]) == 1  # squares are below what float32 holds
    with pytest.raises(GradlabError, match="all selected values of the iterations to learn from are zero"):
        learn(RING, replace(first, values=torch.zeros_like(first.values)), last, QUICK)
    with pytest.raises(GradlabError, match=r"diverged in its first epoch at learning rate 0\.5: try a smaller one"):
        learn(RING, first, last, Fitting(epochs=40, batch=1, learning_rate=0.5), seed=1)


def test_an_order_and_scales_are_paid_for(selections: Selections) -> None:
    """The leader's order takes whole positions, its scales four bytes a layer."""
    sizes = {}
    for order in ("position", "value"):
        for normalise in ("none", "layer"):
            settings = {"density": 0.05, "order": order, "normalise": normalise}
            sizes[order, normalise] = learner_of("ring", settings, [800, 900], RANKS).sizes(selections)[0]
    plain = sizes["position", "none"]
    assert plain == 4 * Architecture().code_numel(85)
    assert sizes["position", "layer"] == pytest.approx(plain + 8 / RANKS)
    assert sizes["value", "none"] > plain
    server = learner_of("server", {"density": 0.05}, [800, 900], RANKS)
    payload, wire = server.sizes(replace(selections, shared=False))
    code = 4 * Architecture().code_numel(85)
    own = payload - code / RANKS
    assert wire == broadcast_wire_bytes(code, 0, 0, RANKS) + all_gather_wire_bytes(int(own), RANKS)


def test_the_command(gradlab: Command, trace: Trace, tmp_path: Path) -> None:
    out, figure = tmp_path / "lgc.safetensors", tmp_path / "lgc.svg"
    words = ["fit", "lgc", trace.path, "--density", 0.05, "-s", "epochs=2", "--out", out]
    code, output, err = gradlab(*words, "--figure", figure)
    assert code == 0, err
    assert output.startswith("Do not use the autoencoder")
    assert "int4, scale per 256" in output
    assert figure.read_text().startswith("<?xml")
    code, output, err = gradlab(
        *words, "--overwrite", "--json", "--feedback", "-s", "momentum=0.9", "-s", "vectors=autoencoder"
    )
    assert code == 0, err
    assert json.loads(output)["selected"] == 87  # two more, of 30 biases
    for wrong, expected in (
        (["-s", "order=sideways"], "order = 'sideways'"),
        (["--pattern", "star"], "pattern = 'star', expected"),
        (["--set", "first=[1]"], "first = [1], expected str"),
        (["-s", "codes=2"], "fit lgc: no setting codes; known: "),
        (["--figure", tmp_path / "other.svg", "--out", tmp_path / "other.svg"], "expected two names"),
        (["--out", tmp_path, "--overwrite"], "is no regular file"),
        (["--out", figure / "x.safetensors"], "is no folder"),
        (["--pattern", "server", "-s", "order=value"], "order"),
        (["--density", 0], "density = 0"),
        (["-s", "last=nosuch"], "no layer 'nosuch'"),
        (["-s", "vectors=some"], "vectors = 'some'"),
        (["-s", "epochs=0"], "epochs = 0"),
    ):
        code, output, err = gradlab("fit", "lgc", trace.path, "--out", tmp_path / "other.safetensors", *wrong)
        assert (code, output) == (2, ""), wrong
        assert expected in err, (wrong, err)
        assert err.count("\n") == 1, err


def test_a_servers_artifact_is_refused_before_other_ranks_start(gradlab: Command, tmp_path: Path) -> None:
    layers = layers_of(get("digits").model(0))
    weights = Architecture(decoders=4, innovation=True).initial(torch.Generator().manual_seed(0))
    path = Artifact(lgc_plan(layers, "server", density=0.05, autoencoder=weights)).save(tmp_path / "s.safetensors")
    code, output, err = gradlab("train", "digits", "--steps", 2, "--compress", path)
    assert (code, output) == (2, "")
    assert "decoders were trained for 4 ranks, one each, and this run has 2" in err
    assert err.count("\n") == 1
