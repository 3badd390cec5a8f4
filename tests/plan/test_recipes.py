"""Methods by name beyond the signs', codecs registered by users, and error feedback's further forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gradlab import codecs
from gradlab.analysis.forecast.dry_run import DryRuns
from gradlab.artifact import Artifact
from gradlab.codec import About, Batch, Bytes, Codec, Context, Exchanged, Tensors, Training, exchange_group, mean_only
from gradlab.codec.registry import CODECS
from gradlab.codecs.dct_topk import DCTTopK
from gradlab.codecs.sampled_threshold import SampledThreshold
from gradlab.codecs.terngrad import TernGrad
from gradlab.codecs.threshold import Threshold
from gradlab.codecs.topk import TopK
from gradlab.collectives import Coroutine, run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Plan, Wrap, method_plan
from gradlab.plan.optimizer_rules import wrapper_that
from gradlab.plan.recipes import METHODS, SIGN_METHODS
from gradlab.plan.traffic import varying_codecs
from gradlab.wrappers.error_feedback import ErrorFeedback
from gradlab.wrappers.momentum_correction import MomentumCorrection
from gradlab.wrappers.sparsity_warmup import SparsityWarmup
from support.command_line import Command

LAYERS = [Layer("w", (30, 30), "linear"), Layer("b", (30,), "bias"), Layer("x", (40, 30), "linear")]


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(SIGN_METHODS)))
def test_each_method_is_a_plan_that_runs(name: str) -> None:
    plan = method_plan(LAYERS, name.upper())
    assert {group.codec for group in plan.compressed_groups} - {"identity"} == {METHODS[name].codec} - {"identity"}
    whole, dense = METHODS[name].one_block, 0 if METHODS[name].codec == "identity" else _dense(plan)
    assert len([group for group in plan.groups if group.codec == METHODS[name].codec]) == (
        1 if whole else len(plan.groups) - dense
    )
    for group in plan.groups:
        shapes = {layer.name: layer.shape for layer in plan.members(group)}
        grads = [
            {key: torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for key, shape in shapes.items()}
            for rank in range(2)
        ]
        codec = plan.build(group)
        results = run_lockstep(
            [exchange_group(codec, g, {}, Context(rank, 2, 0, group.name)) for rank, g in enumerate(grads)]
        )
        for key in shapes:
            assert torch.equal(results[0].value.mean[key], results[1].value.mean[key])


def _dense(plan: Plan) -> int:
    return sum(group.codec == "identity" for group in plan.groups)


def test_names_are_found_whatever_their_case_and_suggested() -> None:
    assert wrapper_that(method_plan(LAYERS, "dgc"), "applies_momentum") == "momentum_correction"
    with pytest.raises(GradlabError, match="did you mean PowerSGD"):
        method_plan(LAYERS, "PowerSDG")


# --- error feedback -------------------------------------------------------------------------------------------------


def run(codec: Codec, steps: int, start: int = 0) -> Iterator[tuple[Tensors, Exchanged]]:
    state: Tensors = {}
    for step in range(start, start + steps):
        grads = {"w": torch.randn(40, generator=torch.Generator().manual_seed(step), dtype=torch.float64)}
        (result,) = run_lockstep(
            [exchange_group(codec, grads, state, Context(0, 1, step, "g", training=Training(start=start)))]
        )
        yield grads, result.value
        state = result.value.state


def test_a_carried_share_is_momentum_less_what_was_sent() -> None:
    held = torch.zeros(40, dtype=torch.float64)
    for grads, done in run(ErrorFeedback(TopK(TopK.Settings(0.1)), ErrorFeedback.Settings(carried=0.8)), 6):
        held = 0.8 * held + grads["w"] - done.own["w"]
        torch.testing.assert_close(done.state["w/residual"], held)


def test_a_reset_drops_the_residual_after_so_many_compressed_steps() -> None:
    codec = ErrorFeedback(TopK(TopK.Settings(0.1)), ErrorFeedback.Settings(reset_steps=3))
    assert ["w/residual" in done.state for _, done in run(codec, 7, start=5)] == [True, True, False] * 2 + [True]


# --- codecs of one's own --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoSettings:
    """There is nothing to set."""


class Mine(Codec):
    """Sends everything."""

    name = "mine"
    about = About("dense", "4 * n")
    Settings = NoSettings

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        return (yield from mean_only(grads))

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        return Bytes.of_means(4 * sum(layer.numel for layer in layers), world_size)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CODECS, "registered", {})


@pytest.mark.usefixtures("registered")
def test_a_registered_codec_is_known_to_plans() -> None:
    with pytest.raises(GradlabError, match="no codec 'mine'"):
        Plan.uniform(LAYERS, "mine")
    assert codecs.register(Mine) is Mine
    codecs.register(Mine)  # again is no harm
    assert "mine" in codecs.names()
    plan = Plan.uniform(LAYERS, "mine")
    assert isinstance(Plan.from_json(plan.to_json()).build(plan.groups[0]), ErrorFeedback)
    with pytest.raises(GradlabError, match="did you mean mine"):
        Plan.uniform(LAYERS, "mime")


@pytest.mark.usefixtures("registered")
def test_what_is_no_codec_is_not_registered() -> None:
    class Other(Mine):
        pass

    class Nameless(Mine):
        name = "topk"

    class Abstract(Codec):
        name = "abstract"

    codecs.register(Mine)
    for refused, message in (
        (Other, "there is a codec 'mine' already"),
        (Nameless, "there is a codec 'topk' already"),
        (Abstract, "no codec with an exchange"),
        ("topk", "no codec with an exchange"),
    ):
        with pytest.raises(GradlabError, match=message):
            codecs.register(refused)  # type: ignore[type-var]


# --- stacks of which one would not do what it is for ----------------------------------------------------------------


def test_feedback_around_bare_signs_is_refused_and_no_default() -> None:
    assert [wrap.name for wrap in Plan.uniform(LAYERS, "sign", scale="one").groups[0].wrappers] == ["two_way"]
    for name in ("error_feedback", "momentum_correction"):
        with pytest.raises(GradlabError, match=f'wrapper {name} around sign with scale = "one".* Set scale = "mean"'):
            Plan.uniform(LAYERS, "sign", scale="one", wrappers=[Wrap(name)])
        Plan.uniform(LAYERS, "sign", scale="one", wrappers=[Wrap(name, {"contraction": "none"})])


def test_feedback_around_what_is_unbiased_is_no_default() -> None:
    assert not Plan.uniform(LAYERS, "random_k", unbiased=True).groups[0].wrappers
    assert Plan.uniform(LAYERS, "random_k").groups[0].wrappers == FEEDBACK
    assert Plan.uniform(LAYERS, "block_scaled", dtype="int4").groups[0].wrappers[:1] == FEEDBACK
    assert not Plan.uniform(LAYERS, "block_scaled").groups[0].wrappers


@pytest.mark.parametrize(
    ("codec", "settings"),
    [("terngrad", {"shared_scale": True}), ("dct_topk", {"sign": True}), ("qsgd", {"ring": True})],
)
def test_what_is_exchanged_in_its_own_way_is_not_taken_two_ways(codec: str, settings: dict[str, Any]) -> None:
    with pytest.raises(GradlabError, match=f"two_way around {codec} with a form of exchange of its own"):
        Plan.uniform(LAYERS, codec, wrappers=[Wrap("two_way")], **settings)


@pytest.mark.parametrize("codec", ["sampled_threshold", "ecsq"])
def test_one_servers_answer_of_unknown_size_is_refused(codec: str) -> None:
    one = [Wrap("two_way", {"server": "rank"})]
    with pytest.raises(GradlabError, match=f"two_way around {codec} with messages whose sizes vary"):
        Plan.uniform(LAYERS, codec, wrappers=one)
    with pytest.raises(GradlabError, match="sizes vary"):
        Plan.uniform(LAYERS, "topk", index_coding="smallest", wrappers=one)
    Plan.uniform(LAYERS, codec, wrappers=[Wrap("two_way")])


@pytest.mark.parametrize(
    "codec", ["one_bit", "dct_topk", "terngrad", "sign", "topk", "natural", "block_scaled", "qsgd"]
)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_bytes_of_shards_are_forecast_as_they_are_counted(codec: str, ranks: int) -> None:
    """Shards are no layers: blocks, units and chunks are those of the layers they are cut from."""
    shapes = {"w": (64, 100), "x": (30, 30), "b": (30,)}
    layers = [Layer(name, shape) for name, shape in shapes.items()]
    plan = Plan.uniform(
        layers, codec, wrappers=[Wrap("two_way")], group_bytes=1e9, minimum_dimensions=0, minimum_numel=1
    )
    (group,) = plan.groups
    built = plan.build(group)
    grads = [
        {n: torch.randn(s, generator=torch.Generator().manual_seed(r)) for n, s in shapes.items()} for r in range(ranks)
    ]
    results = run_lockstep([exchange_group(built, g, {}, Context(r, ranks, 0)) for r, g in enumerate(grads)])
    counted = sum(result.payload_bytes for result in results) / ranks
    # Positions of a selection take what their numbers in a shard need.
    assert counted == pytest.approx(built.forecast(layers, ranks).payload, rel=0.05 if codec == "topk" else 1e-9)


def test_momentum_of_what_is_dense_in_the_gradients_space_is_not_masked() -> None:
    """A DCT's largest coefficients are a little of every element."""
    codec = MomentumCorrection(DCTTopK(DCTTopK.Settings(8, 4)))
    grads = {"w": torch.randn(16, 16, generator=torch.Generator().manual_seed(0))}
    (result,) = run_lockstep([exchange_group(codec, grads, {}, Context(0, 1, 0))])
    torch.testing.assert_close(result.value.state["w/velocity"], grads["w"])


def test_a_threshold_is_measured_again_when_a_warm_up_lowers_the_density() -> None:
    stack = SparsityWarmup(
        ErrorFeedback(Threshold(Threshold.Settings(density=0.01))),
        SparsityWarmup.Settings(steps=4, stages=2, initial_density=0.25),
    )
    sent, state = [], {}
    for step in range(7):
        grads = {"w": torch.randn(4000, generator=torch.Generator().manual_seed(step))}
        (result,) = run_lockstep([exchange_group(stack, grads, state, Context(0, 1, step))])
        state = result.value.state
        sent.append(int((result.value.own["w"] != 0).sum()))
    assert sent[0] == 1000
    assert sent[2] == 200
    assert sent[4] == 40
    assert state["w/threshold"][1] == pytest.approx(0.01)


def test_both_ways_lambda_is_what_the_first_exchange_measured() -> None:
    """It is kept, and servers answer by top-k of chunks, whose sizes all know."""
    layers = [Layer("w", (40, 100))]
    grads = [
        [{"w": torch.randn(40, 100, generator=torch.Generator().manual_seed(10 * r + t))} for r in range(3)]
        for t in (0, 1)
    ]
    level = float(torch.stack([g["w"].abs().flatten().sort(descending=True).values[39] for g in grads[0]]).mean())
    means = []
    for settings in ({}, {"threshold": level}):
        around = [Wrap("two_way", {"answer": 2.0})]
        plan = Plan.uniform(layers, "threshold", wrappers=around, minimum_numel=1, density=0.01, **settings)
        built, states = plan.build(plan.groups[0]), [{}] * 3
        for step, of_ranks in enumerate(grads):
            results = run_lockstep(
                [exchange_group(built, g, states[r], Context(r, 3, step)) for r, g in enumerate(of_ranks)]
            )
            states = [result.value.state for result in results]
        means.append(results[0].value.mean["w"])
        assert int((means[-1] != 0).sum()) == 3 * 70 + 64  # of 1024, and of the 928 that are left
    assert torch.equal(*means)


def test_a_sample_does_not_follow_the_columns_of_a_matrix() -> None:
    """One column of a hundred is ten thousand times the others: every start finds about k."""
    matrix = torch.randn(10_000, 100, generator=torch.Generator().manual_seed(0))
    matrix[:, 0] *= 1e4
    codec = SampledThreshold(SampledThreshold.Settings(0.05))
    for seed in range(20):
        chosen = codec.select(matrix.view(-1), torch.Generator().manual_seed(seed))
        assert 40_000 <= len(chosen) <= 50_000


def test_the_sign_of_what_is_not_a_number_is_not_zero() -> None:
    grads = {"w": torch.ones(8, 8)}
    grads["w"][2, 3] = torch.nan
    (result,) = run_lockstep([exchange_group(DCTTopK(DCTTopK.Settings(sign=True)), grads, {}, Context(0, 1, 0))])
    assert bool(result.value.mean["w"].isnan().any())


def test_a_shared_scale_leaves_each_ranks_own_clipping() -> None:
    """Section 3.3: a worker clips, then the largest s is shared. An outlier of a rank of small values stays clipped."""
    draws = torch.Generator().manual_seed(0)
    small, large = torch.randn(4000, generator=draws), 10 * torch.randn(4000, generator=draws)
    small[7] = 20.0
    limit = 2.5 * float(small.double().square().mean().sqrt())
    codec, seen = TernGrad(TernGrad.Settings(shared_scale=True)), []
    for step in range(400):
        contexts = [Context(rank, 2, step, "g") for rank in range(2)]
        coroutines = [exchange_group(codec, {"w": w}, {}, c) for w, c in zip((small, large), contexts, strict=True)]
        seen.append(float(run_lockstep(coroutines)[0].value.own["w"][7]))
    mean, error = sum(seen) / 400, torch.tensor(seen).std().item() / 20
    assert abs(mean - limit) < 5 * error


@pytest.mark.usefixtures("registered")
def test_incomplete_classes_are_not_registered() -> None:
    """Each would break a lookup or a plan later on."""
    for change, message in (
        ({"name": 5}, "has the name 5, expected an identifier"),
        ({"name": "a b"}, "has the name 'a b'"),
        ({"name": ""}, "has the name ''"),
        ({"Settings": int}, "Settings is no dataclass"),
        ({"about": About("mine", "n", candidates=({"bogus": 1},))}, "has no setting bogus"),
    ):
        with pytest.raises(GradlabError, match=message):
            codecs.register(type("Mine", (Mine,), {"__module__": __name__, **change}))
    assert "mine" not in codecs.names()


@pytest.mark.usefixtures("registered")
def test_a_reloaded_class_takes_the_old_ones_place() -> None:
    codecs.register(Mine)
    again = type("Mine", (Mine,), {"__module__": __name__, "__qualname__": Mine.__qualname__})
    codecs.register(again)
    assert codecs.get("mine") is again


def test_what_is_forecast_of_varying_messages_is_said_to_be_an_estimate(tmp_path: Path, gradlab: Command) -> None:
    """And it is that of a first exchange, however often the dry run is repeated."""
    plan = Plan.uniform(LAYERS, "threshold", density=0.05)
    assert varying_codecs(plan) == ("threshold",)
    assert not varying_codecs(Plan.uniform(LAYERS, "topk"))
    Artifact(plan, {}).save(tmp_path / "plan.safetensors")
    code, out, _ = gradlab("inspect", tmp_path / "plan.safetensors")
    assert code == 0
    assert "messages of threshold vary in size" in out
    words = (
        "predict",
        tmp_path / "plan.safetensors",
        "--nodes",
        "2",
        "--bandwidth",
        "1gbit",
        "--compute-seconds",
        "0.1",
    )
    code, out, _ = gradlab(*words)
    assert code == 0
    assert "Messages of threshold vary in size" in out
    runs = [DryRuns(plan, 2, repeats=repeats).group(plan.groups[0]).turns[1].requests for repeats in (1, 5)]
    sizes = [[request.tensor.numel() for request in requests] for requests in runs]
    assert sizes[0] == sizes[1]
