"""What all codecs share: the registry, settings, error feedback, half precision, random streams, error measures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.codec import (
    Codec,
    Context,
    Exchanged,
    Tensors,
    concatenate,
    exchange_group,
    mean_only,
    seeded_generator,
    separate,
)
from gradlab.codec.measures import contribution_error, relative, squared_norm
from gradlab.codec.settings import build_settings
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.codecs.identity import Identity
from gradlab.codecs.powersgd import PowerSGD
from gradlab.codecs.topk import TopK
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.wrappers.error_feedback import ErrorFeedback
from support.laws import law

SHAPES = {"conv": (4, 3, 2, 2), "matrix": (12, 9), "vector": (5,), "scalar": ()}
LAYERS = [Layer(name, shape) for name, shape in SHAPES.items()]


def draw(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def every_codec() -> list[Codec]:
    samples = {name: torch.stack([draw(9, 100 + t)[name] for t in range(8)]) for name in SHAPES}
    fitted = GradiVeQ(GradiVeQ.Settings(0.3, slice_size=10)).fit(LAYERS, samples)
    return [Identity(), TopK(TopK.Settings(0.1)), PowerSGD(PowerSGD.Settings(rank=2)), fitted]


# --- the registry ---------------------------------------------------------------------------------------------------


def test_names_are_the_files() -> None:
    assert {"gradiveq", "identity", "powersgd", "topk"} <= set(codecs.names())
    assert codecs.names() == sorted(codecs.names())
    for name in codecs.names():
        method = codecs.get(name)
        assert method.name == name
        assert issubclass(method, Codec)
        assert method.Settings.__dataclass_params__.frozen


@pytest.mark.parametrize(
    ("asked", "meant"), [("topkk", "topk"), ("TopK", "topk"), ("PowerSGD", "powersgd"), ("power_sgd", "powersgd")]
)
def test_a_misspelt_codec_is_suggested(asked: str, meant: str) -> None:
    with pytest.raises(GradlabError, match=f"no codec '{asked}'; did you mean {meant}\\?"):
        codecs.get(asked)


@pytest.mark.parametrize("asked", ["", "zzzzzz", "codecs.topk", "../topk", "__init__", "topk.py"])
def test_what_is_no_codec_is_refused(asked: str) -> None:
    with pytest.raises(GradlabError, match=rf"no codec .*\(there are: {', '.join(codecs.names())}"):
        codecs.get(asked)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "values", "message"),
    [
        (TopK, {"densty": 0.1}, "codec topk has no setting densty; it has: density"),
        (Identity, {"rank": 1}, "codec identity has no setting rank; it has: ring"),
        (TopK, {"density": "0.1"}, "topk: setting density = '0.1', expected float"),
        (TopK, {"density": True}, "topk: setting density = True, expected float"),
        (TopK, {"density": None}, "topk: setting density = None, expected float"),
        (TopK, {"density": math.nan}, "topk: setting density = nan, expected float"),
        (TopK, {"density": math.inf}, "topk: setting density = inf, expected float"),
        (TopK, {"density": 10**400}, "topk: setting density = 1000"),
        (TopK, {"density": [0.1]}, "topk: setting density = "),
        (PowerSGD, {"minimum_ratio": 10**400}, r"powersgd: setting minimum_ratio = 1000.*, expected float"),
        (PowerSGD, {"rank": 2.0}, "powersgd: setting rank = 2.0, expected int"),
        (PowerSGD, {"rank": True}, "powersgd: setting rank = True, expected int"),
        (PowerSGD, {"warm_start": 1}, "powersgd: setting warm_start = 1, expected bool"),
        (GradiVeQ, {"slice_size": 1.5}, r"gradiveq: setting slice_size = 1.5, expected int \| None"),
        (GradiVeQ, {"reuse": "x" * 1000}, "gradiveq: setting reuse = "),
        (TopK, {"density": 2}, "topk: setting density = 2, expected a share"),
    ],
)
def test_settings_that_do_not_fit_are_refused(codec: type[Codec], values: dict[str, Any], message: str) -> None:
    with pytest.raises(GradlabError, match=message) as error:
        build_settings(codec, values)
    assert "\n" not in str(error.value)


def test_settings_from_json_values() -> None:
    assert build_settings(PowerSGD, {"rank": 3}) == PowerSGD.Settings(rank=3)
    assert build_settings(GradiVeQ, {"slice_size": None, "loss_threshold": 0}) == GradiVeQ.Settings(0)
    assert build_settings(TopK, {"density": 1}) == TopK.Settings(1.0)
    assert build_settings(Identity, {}) == Identity.Settings()


def test_settings_of_another_codec_are_refused() -> None:
    with pytest.raises(GradlabError, match=r"topk takes TopK.Settings, not Settings"):
        TopK(PowerSGD.Settings())


@pytest.mark.parametrize("codec", [Identity, TopK, PowerSGD])
def test_a_codec_that_learns_nothing_refuses_learned_tensors(codec: type[Codec]) -> None:
    with pytest.raises(GradlabError, match=rf"codec {codec.name} learns nothing, but came with \['w/basis'\]"):
        codec(learned={"w/basis": torch.zeros(1)}).check(LAYERS)


# --- error feedback -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", every_codec(), ids=lambda codec: codec.name)
def test_what_was_sent_and_the_residual_are_all_gradients(codec: Codec) -> None:
    """Telescoping over six steps: sum of own + last residual == sum of gradients, on every rank."""
    driven, states = ErrorFeedback(codec), [{}, {}, {}]
    sent = [{name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in states]
    for step in range(6):
        context = Context(0, 3, step, "g")
        results = run_lockstep(
            [exchange_group(driven, draw(r, step), states[r], replace(context, rank=r)) for r in range(3)]
        )
        states = [result.value.state for result in results]
        for rank, result in enumerate(results):
            for name in SHAPES:
                sent[rank][name] += result.value.own[name]
    for rank in range(3):
        for name in SHAPES:
            given = sum(draw(rank, step)[name] for step in range(6))
            torch.testing.assert_close(sent[rank][name] + states[rank][f"{name}/residual"], given, atol=1e-11, rtol=0)


def test_the_residual_is_added_once_and_the_codecs_state_kept_apart() -> None:
    codec = PowerSGD(PowerSGD.Settings(rank=2))
    grads, state = draw(0, 0), {"matrix/residual": torch.ones(12, 9, dtype=torch.float64)}
    (with_feedback,) = run_lockstep([exchange_group(ErrorFeedback(codec), grads, state, Context(0, 1, 0))])
    (plain,) = run_lockstep([exchange_group(codec, {**grads, "matrix": grads["matrix"] + 1}, {}, Context(0, 1, 0))])
    assert torch.equal(with_feedback.value.mean["matrix"], plain.value.mean["matrix"])
    assert torch.equal(with_feedback.value.compressor_input["matrix"], grads["matrix"] + 1)
    assert torch.equal(with_feedback.value.state["matrix/q"], plain.value.state["matrix/q"])
    assert set(plain.value.state) == {"conv/q", "matrix/q"}
    assert set(with_feedback.value.state) == {"conv/q", "matrix/q"} | {f"{name}/residual" for name in SHAPES}


def test_feedback_delegates() -> None:
    topk = TopK(TopK.Settings(0.1))
    assert ErrorFeedback(topk).forecast(LAYERS, 4).payload == topk.forecast(LAYERS, 4).payload
    samples = {name: torch.stack([draw(0, t)[name] for t in range(8)]) for name in SHAPES}
    unfitted = ErrorFeedback(GradiVeQ(GradiVeQ.Settings(0.3, slice_size=10)))
    fitted = unfitted.fit(LAYERS, samples)
    fitted.check(LAYERS)
    assert isinstance(fitted, ErrorFeedback)


def test_feedback_on_feedback_is_refused() -> None:
    with pytest.raises(GradlabError, match="error_feedback stacked on itself"):
        ErrorFeedback(ErrorFeedback(TopK()))


# --- the executors' entry point -------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", every_codec(), ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_computed_with_in_float32(codec: Codec, dtype: torch.dtype) -> None:
    """The same result as from widened gradients, with only the mean rounded back."""
    driven = ErrorFeedback(codec)
    half, context = draw(0, 0, dtype), Context(0, 1, 0, "g")
    wide = {name: grad.float() for name, grad in half.items()}
    (narrow,) = run_lockstep([exchange_group(driven, half, {}, context)])
    (reference,) = run_lockstep([exchange_group(driven, wide, {}, context)])
    for name in SHAPES:
        assert narrow.value.mean[name].dtype == dtype
        assert torch.equal(narrow.value.mean[name], reference.value.mean[name].to(dtype))
        assert torch.equal(narrow.value.own[name], reference.value.own[name])
        assert torch.equal(narrow.value.compressor_input[name], wide[name])
    assert {value.dtype for value in narrow.value.state.values()} == {torch.float32}
    assert narrow.payload_bytes == reference.payload_bytes


@pytest.mark.parametrize("codec", every_codec(), ids=lambda codec: codec.name)
def test_double_gradients_stay_double(codec: Codec) -> None:
    (result,) = run_lockstep([exchange_group(codec, draw(0, 0), {}, Context(0, 1, 0))])
    for kept in (result.value.mean, result.value.own, result.value.state, result.value.compressor_input):
        assert all(value.dtype == torch.float64 for key, value in kept.items() if not key.endswith("/clock"))


def test_what_was_asked_is_the_gradient_without_feedback() -> None:
    (result,) = run_lockstep([exchange_group(TopK(), draw(0, 0), {}, Context(0, 1, 0))])
    assert all(torch.equal(result.value.compressor_input[name], grad) for name, grad in draw(0, 0).items())


def test_mean_only_is_the_mean() -> None:
    results = run_lockstep([mean_only(draw(rank, 0)) for rank in range(3)])
    for name in SHAPES:
        expected = np.mean([draw(rank, 0)[name].numpy() for rank in range(3)], axis=0)
        np.testing.assert_allclose(results[1].value.mean[name].numpy(), expected, atol=1e-15)
        assert torch.equal(results[1].value.own[name], draw(1, 0)[name])


# --- random streams -------------------------------------------------------------------------------------------------


def stream(generator: torch.Generator) -> list[float]:
    return torch.rand(4, generator=generator).tolist()


def test_shared_streams_agree_between_ranks_and_differ_otherwise() -> None:
    here = Context(0, 4, 7, "group", seed=1)
    first = stream(here.random.shared("layer"))
    assert stream(replace(here, rank=3).random.shared("layer")) == first
    changed = [replace(here, iteration=8), replace(here, group="other"), replace(here, seed=2)]
    others = [stream(context.random.shared("layer")) for context in changed]
    others += [stream(here.random.shared("another")), stream(here.random.shared()), stream(here.random.of_rank())]
    assert len({tuple(values) for values in [first, *others]}) == len(others) + 1


def test_start_streams_do_not_depend_on_the_iteration() -> None:
    here = Context(0, 4, 7, "group")
    start = stream(here.random.shared("layer", every_iteration=False))
    assert stream(replace(here, iteration=0).random.shared("layer", every_iteration=False)) == start
    assert stream(here.random.shared("layer")) != start


def test_rank_streams_are_a_ranks_own() -> None:
    contexts = [Context(rank, 4, step, group) for rank in range(3) for step in range(2) for group in ("a", "b")]
    streams = [tuple(stream(context.random.of_rank("layer"))) for context in contexts]
    assert len(set(streams)) == len(streams)
    assert streams == [tuple(stream(context.random.of_rank("layer"))) for context in contexts]


def test_streams_do_not_touch_the_global_one() -> None:
    before = torch.get_rng_state()
    stream(seeded_generator("a", 1))
    assert torch.equal(torch.get_rng_state(), before)


# --- measures -------------------------------------------------------------------------------------------------------


@law(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4))
def test_separate_inverts_concatenate(shapes: list[tuple[int, ...]]) -> None:
    grads = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
    back = separate(concatenate(grads), grads)
    assert list(back) == list(grads)
    assert all(torch.equal(back[name], grad) for name, grad in grads.items())


def test_contribution_error_is_the_squared_distance() -> None:
    asked, own = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 0.0, 1.0])
    done = Exchanged({}, {"a": own}, compressor_input={"a": asked})
    assert contribution_error(done)["a"] == pytest.approx((17.0, 25.0))
    assert relative(17.0, 25.0) == pytest.approx(math.sqrt(17 / 25))
    assert relative(0.0, 0.0) == 0.0
    assert relative(1.0, 0.0) == math.inf
    assert math.isnan(squared_norm(torch.tensor([1.0, math.nan])))
    assert squared_norm(torch.tensor([1.0, math.inf])) == math.inf
    assert squared_norm(torch.zeros(0)) == 0.0
    assert squared_norm(torch.full((4,), 2.0, dtype=torch.float16)) == 16.0
    for k in (-140, -120, -60, 0, 60, 120):  # where squares are no numbers of single precision too
        assert squared_norm(torch.full((4,), 2.0**k)) == 4 * 4.0**k
