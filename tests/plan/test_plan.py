"""Plans: what they refuse, what they forecast, and that a digest tells plans apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from gradlab import codecs
from gradlab.codec import Tensors
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.codecs.powersgd import PowerSGD
from gradlab.errors import GradlabError
from gradlab.layout import Layer, layers_of
from gradlab.plan import FEEDBACK, FINITE_FLAG_BYTES, Group, Plan, Schedule, Wrap
from gradlab.plan.optimizer_rules import layers_with_feedback
from gradlab.plan.plan import check_model, hash_tensor, learned_tensors
from gradlab.wrappers.error_feedback import ErrorFeedback
from support.laws import law

LAYERS = (
    Layer("conv", (8, 4, 3, 3), "convolution"),
    Layer("wide", (10, 40), "linear"),
    Layer("tall", (40, 10), "linear"),
    Layer("bias", (10,), "bias"),
)


def basis(seed: int = 0) -> Tensors:
    samples = torch.randn(9, 10, 40, generator=torch.Generator().manual_seed(seed))
    return GradiVeQ(GradiVeQ.Settings(0.2, slice_size=50)).fit([LAYERS[1]], {"wide": samples}).learned


def mixed_plan() -> Plan:
    groups = (
        Group("pair", ("tall", "conv"), "topk", {"density": 0.05}, wrappers=FEEDBACK),
        Group("wide", ("wide",), "gradiveq", {"slice_size": 50, "compressed_steps": 0}),
        Group("plain", ("bias",), "identity"),
    )
    return Plan(LAYERS, groups, Schedule(7), seed=3, learned={"wide": basis()})


# --- round trips ----------------------------------------------------------------------------------------------------


def test_a_plan_round_trips() -> None:
    plan = mixed_plan()
    again = Plan.from_json(plan.to_json(), learned_tensors(plan))
    assert again.digest == plan.digest
    assert (again.layers, again.groups, again.schedule, again.seed) == (
        plan.layers,
        plan.groups,
        plan.schedule,
        plan.seed,
    )
    assert all(torch.equal(again.learned["wide"][key], value) for key, value in plan.learned["wide"].items())


settings_of = {
    "identity": st.just({}),
    "topk": st.fixed_dictionaries({"density": st.floats(0.001, 1.0)}),
    "powersgd": st.fixed_dictionaries({}, optional={"rank": st.integers(1, 9), "warm_start": st.booleans()}),
}


# Wrappers that any codec takes.
AROUND = [
    (),
    FEEDBACK,
    (Wrap("error_feedback", {"decay": 0.25, "buffer": "int8"}),),
    (Wrap("momentum", {"momentum": 0.5}), Wrap("error_feedback", {"step_size_ratio": True})),
]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of codecs that learn nothing, over layers of any size, with groups of any layers."""
    shapes = draw(st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple), min_size=1, max_size=6))
    layers = tuple(Layer(f"layer{i}", shape) for i, shape in enumerate(shapes))
    chosen = draw(st.lists(st.sampled_from([layer.name for layer in layers]), unique=True))
    cuts = draw(st.lists(st.integers(0, len(chosen)), max_size=3).map(sorted))
    parts = [chosen[a:b] for a, b in zip([0, *cuts], [*cuts, len(chosen)], strict=True) if a < b]
    groups = []
    for i, part in enumerate(parts):
        codec = draw(st.sampled_from(sorted(settings_of)))
        groups.append(Group(f"group{i}", tuple(part), codec, draw(settings_of[codec]), draw(st.sampled_from(AROUND))))
    return Plan(layers, tuple(groups), Schedule(draw(st.integers(0, 99))), draw(st.integers(-9, 9)))


@law(plans())
def test_any_plan_round_trips(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest


@law(plans(), plans())
def test_equal_plans_and_only_they_share_a_digest(one: Plan, other: Plan) -> None:
    assert (one.digest == other.digest) == (one.to_json() == other.to_json())


# --- digests --------------------------------------------------------------------------------------------------------


def changed_plans() -> list[Plan]:
    """Every single change to one plan."""
    plan = mixed_plan()
    pair, wide, plain = plan.groups
    other_layer = (replace(LAYERS[0], name="conv2"), *LAYERS[1:])
    groups = [
        (replace(pair, name="couple"), wide, plain),
        (replace(pair, layers=("conv", "tall")), wide, plain),
        (replace(pair, layers=("conv",)), wide, plain),
        (replace(pair, settings={"density": 0.05000000000000001}), wide, plain),
        (replace(pair, settings={}), wide, plain),
        (replace(pair, codec="powersgd", settings={}), wide, plain),
        (replace(pair, wrappers=()), wide, plain),
        (wide, pair, plain),
        (pair, wide),
    ]
    bumped = {**basis(), "wide/mean": basis()["wide/mean"].clone()}
    bumped["wide/mean"][0, 0] += 1e-7
    double = {key: value.double() for key, value in basis().items()}
    return [
        *(replace(plan, groups=each) for each in groups),
        replace(plan, layers=other_layer, groups=plan.groups[1:]),
        replace(plan, layers=(*LAYERS, Layer("extra", (1,)))),
        replace(plan, layers=(replace(LAYERS[0], role="other"), *LAYERS[1:])),
        replace(plan, layers=LAYERS[::-1]),
        replace(plan, schedule=Schedule(8)),
        replace(plan, seed=4),
        replace(plan, learned={"wide": bumped}),
        replace(plan, learned={"wide": basis(1)}),
        replace(plan, learned={"wide": double}),
    ]


def test_any_change_changes_the_digest() -> None:
    digests = [plan.digest for plan in [mixed_plan(), *changed_plans()]]
    assert len(set(digests)) == len(digests)
    assert mixed_plan().digest == digests[0]


def test_the_order_of_settings_does_not_matter() -> None:
    one = Plan.uniform(LAYERS, "powersgd", rank=2, warm_start=False)
    other = Plan.uniform(LAYERS, "powersgd", warm_start=False, rank=2)
    assert one.digest == other.digest


def test_tensor_hashes_see_dtype_shape_and_bits() -> None:
    zeros = torch.zeros(4)
    hashes = [hash_tensor(t) for t in (zeros, zeros.int(), zeros.reshape(2, 2), zeros.half(), -zeros, zeros[:0])]
    assert len(set(hashes)) == len(hashes)
    strided = torch.arange(6.0).reshape(2, 3).T
    assert hash_tensor(strided) == hash_tensor(strided.contiguous())
    assert hash_tensor(torch.ones(3, dtype=torch.bfloat16)) == hash_tensor(torch.ones(3, dtype=torch.bfloat16))


# --- what is refused ------------------------------------------------------------------------------------------------

TOPK = Group("a", ("conv",), "topk")


def wrapped(codec: str, *names: str, **settings: Any) -> Group:
    """A group with wrappers, outermost first; the settings are the outermost one's."""
    around = [Wrap(name, settings if i == 0 else {}) for i, name in enumerate(names)]
    return Group("a", ("conv",), codec, {}, tuple(around))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((TOPK, Group("b", ("wide", "conv"), "topk")), "grouped layer conv appears twice"),
        ((Group("a", ("wide", "wide"), "topk"),), "grouped layer wide appears twice"),
        ((TOPK, Group("a", ("wide",), "topk")), "group a appears twice"),
        ((Group("a", ("conv", "nope", "never"), "topk"),), "group a names layers the model lacks: nope, never"),
        ((Group("a", (), "topk"),), "group a has no layers"),
        ((Group("a::b", ("conv",), "topk"),), "group name 'a::b'"),
        ((Group("a", ("conv",), "tpok"),), "no codec 'tpok'; did you mean topk"),
        ((Group("a", ("conv",), "topk", {"density": 2.0}),), "topk: setting density = 2.0"),
        ((Group("a", ("conv",), "topk", {"rank": 2}),), "codec topk has no setting rank"),
        ((wrapped("topk", "error_fedback"),), "no wrapper 'error_fedback'; did you mean error_feedback"),
        ((wrapped("topk", "error_feedback", decay=1.0),), "error_feedback: setting decay = 1.0"),
        ((wrapped("topk", "error_feedback", beta=1.0),), "wrapper error_feedback has no setting beta"),
        ((wrapped("topk", "error_feedback", "error_feedback"),), "error_feedback stacked on itself"),
        ((wrapped("powersgd", "momentum_correction", masking=True),), "all momentum would be lost"),
    ],
)
def test_groups_that_make_no_plan_are_refused(groups: tuple[Group, ...], message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        Plan(LAYERS, groups)


def test_layers_of_one_name_are_refused() -> None:
    with pytest.raises(GradlabError, match="layer conv appears twice"):
        Plan((LAYERS[0], LAYERS[0]))


@pytest.mark.parametrize(
    ("learned", "message"),
    [
        ({"strange": {"wide/basis": torch.zeros(1)}}, "learned tensors for groups it does not have: strange"),
        ({"a": {"conv/basis": torch.zeros(1)}}, "codec topk learns nothing"),
    ],
)
def test_learned_tensors_for_strange_groups_are_refused(learned: dict[str, Tensors], message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        Plan(LAYERS, (TOPK,), learned=learned)


def test_learned_tensors_must_fit_and_be_finite() -> None:
    group = (Group("wide", ("wide",), "gradiveq"),)
    with pytest.raises(GradlabError, match="belong to no layer of the group"):
        Plan(LAYERS, (Group("wide", ("tall",), "gradiveq"),), learned={"wide": basis()})
    broken = {**basis(), "wide/mean": basis()["wide/mean"] * torch.nan}
    with pytest.raises(GradlabError, match="non-finite"):
        Plan(LAYERS, group, learned={"wide": broken})


@pytest.mark.parametrize("steps", [-1, 1.0, True, None, "3"])
def test_warmup_steps_are_whole_numbers(steps: Any) -> None:
    with pytest.raises(GradlabError, match=r"schedule: warmup_steps = .*, expected a whole number from 0"):
        Schedule(steps)


@pytest.mark.parametrize("seed", [1.0, True, None, "3"])
def test_seeds_are_whole_numbers(seed: Any) -> None:
    with pytest.raises(GradlabError, match=r"plan: seed = .*, expected a whole number"):
        Plan(LAYERS, seed=seed)


GROUP_JSON = TOPK.to_json()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {key: value for key, value in GROUP_JSON.items() if key != "codec"},
        {**GROUP_JSON, "layers": "conv"},
        {**GROUP_JSON, "layers": [1]},
        {**GROUP_JSON, "settings": []},
        {**GROUP_JSON, "wrappers": 1},
        {**GROUP_JSON, "wrappers": ["error_feedback"]},
        {**GROUP_JSON, "wrappers": [{"name": "error_feedback"}]},
        {**{key: value for key, value in GROUP_JSON.items() if key != "wrappers"}, "error_feedback": 1},
        {**GROUP_JSON, "name": 1},
        {**GROUP_JSON, "codec": None},
        {**GROUP_JSON, "name": ["x" * 10_000]},
    ],
)
def test_what_is_no_group_is_refused(value: Any) -> None:
    with pytest.raises(GradlabError, match="not a group of a plan") as error:
        Group.from_json(value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": {}}, "layers and groups must be lists"),
        ({"groups": None}, "layers and groups must be lists"),
        ({"layers": []}, "fingerprint does not match"),
        ({"fingerprint": "0" * 64}, "fingerprint does not match"),
        ({"fingerprint": None}, "fingerprint does not match"),
        ({"groups": [3]}, "not a group"),
        ({"schedule": None}, "not a schedule"),
        ({"schedule": {"warmup_steps": -2}}, "warmup_steps = -2"),
        ({"schedule": {"warm_up": 2}}, "not a schedule"),
        ({"seed": 1.5}, "seed = 1.5"),
    ],
)
def test_json_that_is_no_plan_is_refused(change: dict[str, Any], message: str) -> None:
    plan = mixed_plan()
    with pytest.raises(GradlabError, match=message):
        Plan.from_json({**plan.to_json(), **change}, learned_tensors(plan))


@pytest.mark.parametrize("value", [None, [], {}, "plan"])
def test_what_is_no_plan_at_all_is_refused(value: Any) -> None:
    with pytest.raises(GradlabError, match="not a plan"):
        Plan.from_json(value)


@pytest.mark.parametrize("key", ["wide::wide/other", "stray", "::", "other::wide/mean"])
def test_tensors_that_belong_nowhere_are_refused(key: str) -> None:
    plan = mixed_plan()
    with pytest.raises(GradlabError, match=r"learned tensors"):
        Plan.from_json(plan.to_json(), {**learned_tensors(plan), key: torch.zeros(1)})


# --- what a plan says -----------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.embedding = nn.Embedding(16, 16)
        self.head = nn.Linear(16, 10)
        self.edge = nn.Linear(15, 17)
        self.vector = nn.Parameter(torch.zeros(5000))


FROM_5_RANKS = Wrap("two_way", {"from_ranks": 5, "answer": 4.0})


def test_uniform_takes_the_large_layers_of_two_or_more_dimensions() -> None:
    model = Small()
    plan = Plan.uniform(model, "topk")
    assert plan.layers == layers_of(model)
    assert [group.name for group in plan.groups] == ["conv.weight", "embedding.weight"]
    assert all(group.layers == (group.name,) for group in plan.groups)
    assert all(group.wrappers == (*FEEDBACK, FROM_5_RANKS) for group in plan.groups)
    assert (plan.schedule, plan.seed) == (Schedule(0), 0)
    fewer = Plan.uniform(model, "topk", minimum_numel=255, density=0.5, error_feedback=False, warmup_steps=3, seed=8)
    assert [group.name for group in fewer.groups] == ["conv.weight", "embedding.weight", "edge.weight"]
    forgetful = Wrap("two_way", {**FROM_5_RANKS.settings, "error_feedback": False})
    assert all(group.wrappers == (forgetful,) and group.settings == {"density": 0.5} for group in fewer.groups)
    assert (fewer.schedule, fewer.seed) == (Schedule(3), 8)


@pytest.mark.parametrize("codec", codecs.names())
def test_of_pseudo_gradients_no_error_is_kept_unless_asked_for(codec: str) -> None:
    layers = [Layer("wide", (64, 3, 8, 8), "convolution"), Layer("tall", (256, 64), "linear")]
    plan = Plan.uniform(layers, codec, exchanges="pseudo-gradients")
    assert layers_with_feedback(plan) == ()
    kept = Plan.uniform(layers, codec, exchanges="pseudo-gradients", error_feedback=True)
    assert kept == Plan.uniform(layers, codec, error_feedback=True)
    assert layers_with_feedback(kept) == tuple(name for group in kept.compressed_groups for name in group.layers)


@pytest.mark.parametrize("codec", ["identity", "topk", "powersgd"])
def test_uniform_takes_the_codecs_own_defaults(codec: str) -> None:
    plan = Plan.uniform(LAYERS, codec)
    assert {bool(group.wrappers) for group in plan.groups} == {codecs.get(codec)().about.defaults.error_feedback}
    assert [group.name for group in plan.groups] == ["conv", "wide", "tall"]


def test_uniform_refuses_what_no_plan_could_hold() -> None:
    with pytest.raises(GradlabError, match="no codec 'top-k'; did you mean topk"):
        Plan.uniform(LAYERS, "top-k")
    with pytest.raises(GradlabError, match="codec topk has no setting rank"):
        Plan.uniform(LAYERS, "topk", rank=3)
    with pytest.raises(GradlabError, match="exchanges = 'steps', expected one of gradients, pseudo-gradients"):
        Plan.uniform(LAYERS, "topk", exchanges="steps")


def test_the_schedule_begins_after_warm_up() -> None:
    assert [Schedule(2).compresses(step) for step in range(4)] == [False, False, True, True]
    assert Schedule().compresses(0)


def test_members_and_codecs_of_a_group() -> None:
    plan = mixed_plan()
    pair, wide, plain = plan.groups
    assert plan.members(pair) == (LAYERS[2], LAYERS[0])
    assert isinstance(plan.build(pair), ErrorFeedback)
    assert isinstance(plan.build(wide), GradiVeQ)
    assert plan.compressed_groups == (pair, wide)
    assert plan.dense_layers == (LAYERS[3],)
    assert plan.members(plain) == (LAYERS[3],)


def test_the_forecast_adds_up() -> None:
    """Dense layers, each group's own forecast, and the one float32 on which all ranks agree; dense alone needs none."""
    plan = mixed_plan()
    dense = 4 * (288 + 400 + 400 + 10)
    width = plan.learned["wide"]["wide/basis"].shape[2]
    kept = 4 * 35 + -(-35 // 8) * 10 + 4 * 8 * width + 4 * 10
    assert plan.payload_bytes(4) == kept + FINITE_FLAG_BYTES
    assert plan.payload_bytes(4, compressing=False) == dense
    assert Plan(LAYERS).payload_bytes(4) == dense
    assert Plan.uniform(LAYERS, "identity").payload_bytes(4) == dense
    ranked = Plan.uniform(LAYERS, "powersgd", rank=2)
    factors = sum(PowerSGD(PowerSGD.Settings(2)).forecast([layer], 4).payload for layer in LAYERS[:3])
    assert ranked.payload_bytes(4) == factors + 4 * 10 + FINITE_FLAG_BYTES


def test_another_model_is_refused_layer_by_layer() -> None:
    plan = mixed_plan()
    check_model(plan, LAYERS)
    with pytest.raises(GradlabError, match=r"another model \(1 differences\):\n  ~ wide: expected shape \[10, 40\]"):
        check_model(plan, (LAYERS[0], Layer("wide", (10, 41)), *LAYERS[2:]))
    many = tuple(Layer(f"new{i}", (1,)) for i in range(30))
    with pytest.raises(GradlabError, match=r"34 differences(.|\n)*\.\.\. and 14 more"):
        check_model(plan, many)
