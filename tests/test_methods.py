"""Methods by name beyond the signs', codecs registered by users, and error feedback's further forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradlab import codecs
from gradlab.codec import Codec, Context, Exchanged, Tensors, mean_only
from gradlab.codecs.topk import TopK
from gradlab.collectives import Coroutine, run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.methods import METHODS, SIGN_METHODS, method_plan
from gradlab.plan import Plan
from gradlab.wrappers.error_feedback import ErrorFeedback

LAYERS = [Layer("w", (30, 30), "linear"), Layer("b", (30,), "bias"), Layer("x", (40, 30), "linear")]


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(SIGN_METHODS)))
def test_each_method_is_a_plan_that_runs(name: str) -> None:
    plan = method_plan(LAYERS, name.upper())
    assert {group.codec for group in plan.compressed_groups} - {"identity"} == {METHODS[name].codec}
    whole = METHODS[name].one_block
    assert len([group for group in plan.groups if group.codec == METHODS[name].codec]) == (
        1 if whole else len(plan.groups) - _dense(plan)
    )
    for group in plan.groups:
        shapes = {layer.name: layer.shape for layer in plan.members(group)}
        grads = [
            {key: torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for key, shape in shapes.items()}
            for rank in range(2)
        ]
        codec = plan.build(group)
        results = run_lockstep([codec.exchange(g, {}, Context(rank, 2, 0, group.name)) for rank, g in enumerate(grads)])
        for key in shapes:
            assert torch.equal(results[0].value.mean[key], results[1].value.mean[key])


def _dense(plan: Plan) -> int:
    return sum(group.codec == "identity" for group in plan.groups)


def test_names_are_found_whatever_their_case_and_suggested() -> None:
    assert method_plan(LAYERS, "dgc").applies_momentum == "momentum_correction"
    with pytest.raises(GradlabError, match="did you mean PowerSGD"):
        method_plan(LAYERS, "PowerSDG")


# --- error feedback -------------------------------------------------------------------------------------------------


def run(codec: Codec, steps: int, start: int = 0) -> Iterator[tuple[Tensors, Exchanged]]:
    state: Tensors = {}
    for step in range(start, start + steps):
        grads = {"w": torch.randn(40, generator=torch.Generator().manual_seed(step), dtype=torch.float64)}
        (result,) = run_lockstep([codec.exchange(grads, state, Context(0, 1, step, "g", start=start))])
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


@pytest.mark.parametrize(
    ("settings", "said"), [({"carried": 0.0}, "carried = 0.0"), ({"reset_steps": -1}, "reset_steps = -1")]
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(GradlabError, match=said):
        ErrorFeedback.Settings(**settings)


# --- codecs of one's own --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoSettings:
    """There is nothing to set."""


class Mine(Codec):
    """Sends everything."""

    name = "mine"
    family = "dense"
    formula = "4 * n"
    Settings = NoSettings

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        return (yield from mean_only(grads))

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        return 4 * sum(layer.numel for layer in layers)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_registered", {})


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
    for refused, said in (
        (Other, "there is a codec 'mine' already"),
        (Nameless, "there is a codec 'topk' already"),
        (Abstract, "no codec with an exchange"),
        ("topk", "no codec with an exchange"),
    ):
        with pytest.raises(GradlabError, match=said):
            codecs.register(refused)  # type: ignore[type-var]
