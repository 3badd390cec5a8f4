"""What a recording says of its optimizer, and the one rule by which fits and training refuse a plan under it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gradlab.analysis.fit.trained_with import optimizer_of_training, require_trainable
from gradlab.ddp.optimizers import (
    HeldLayers,
    OptimizerSettings,
    all_optimizers,
    bare_optimizer,
    describe_optimizer,
)
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Group, Plan, Wrap, method_plan
from gradlab.plan.optimizer_rules import conflict_of

LAYERS = [Layer("w", (30, 30), "linear")]


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2, 2))


def settings_of(optimizer: torch.optim.Optimizer) -> OptimizerSettings:
    settings = describe_optimizer(optimizer)
    assert settings is not None
    return settings


ADAMW = settings_of(torch.optim.AdamW([parameter()], weight_decay=0.01))
SGDM = settings_of(torch.optim.SGD([parameter()], lr=0.1, momentum=0.9, weight_decay=5e-4))
MUON = settings_of(torch.optim.Muon([parameter()], weight_decay=0.1))
SGD = settings_of(torch.optim.SGD([parameter()], lr=0.1))


def test_a_recording_keeps_the_class_and_the_settings_of_every_group() -> None:
    """As the Trainer sets AdamW up: decay for matrices, none for biases and norms. The rate is recorded by step."""
    decayed, others = {"params": [parameter()], "weight_decay": 0.1}, {"params": [parameter()], "weight_decay": 0.0}
    again = {"params": [parameter()], "weight_decay": 0.1}
    settings = settings_of(torch.optim.AdamW([decayed, others, again], lr=1e-3, betas=(0.9, 0.95), fused=False))
    assert settings.name == "AdamW"
    assert [group["weight_decay"] for group in settings.groups] == [0.1, 0.0]
    assert all(group["betas"] == [0.9, 0.95] for group in settings.groups)
    assert not any({"params", "lr", "fused"} & set(group) for group in settings.groups)
    assert str(settings) == "AdamW (betas = (0.9, 0.95), weight_decay = 0.1)"
    read = OptimizerSettings.from_metadata(json.loads(json.dumps({"optimizer": settings.to_json()})))
    assert read == settings


def test_a_recording_says_which_of_several_optimizers_trains_which_layers() -> None:
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": torch.nn.Linear(4, 2)})
    body = torch.optim.SGD(model["body"].parameters(), lr=0.1, momentum=0.9)
    head = torch.optim.AdamW(model["head"].parameters(), lr=torch.tensor(0.5), weight_decay=0.0)
    other = torch.optim.RMSprop([parameter()])  # of another model, as a GAN's
    held = HeldLayers([head, body, other], {p: name for name, p in model.named_parameters()})
    settings = held.settings()
    assert settings is not None
    assert {part.name: part.layers for part in settings.parts} == {
        "AdamW": ("head.weight", "head.bias"),
        "SGD": ("body.weight", "body.bias"),
    }
    assert str(settings) == "AdamW (betas = (0.9, 0.999)) of 2 layers, SGD (momentum = 0.9) of 2 layers"
    written = json.loads(json.dumps({"optimizer": settings.to_json()}))
    assert OptimizerSettings.from_metadata(written) == settings
    assert written["optimizer"]["name"] == "AdamW and SGD"
    assert held.first_rate() == 0.1
    assert held.rates() == {"head.weight": 0.5, "head.bias": 0.5, "body.weight": 0.1, "body.bias": 0.1}
    layers = [Layer("body.weight", (4, 4)), Layer("head.weight", (2, 4))]
    momentum = [Wrap("local_momentum")]
    for name, remedy in (("body.weight", "set the optimizer's to 0"), ("head.weight", "train with a plan without")):
        conflict = conflict_of(Plan(tuple(layers), (Group(name, (name,), "topk", {}, tuple(momentum)),)), settings)
        assert conflict is not None
        assert conflict.remedy.startswith(remedy)


@pytest.mark.parametrize("said", [None, "adam", {"name": 3}, {"name": "AdamW"}, {"name": "AdamW", "groups": [1]}])
def test_words_of_the_users_are_not_taken_for_a_description(said: Any) -> None:
    assert OptimizerSettings.from_metadata({"optimizer": said}) is None
    assert OptimizerSettings.from_metadata({}) is None


def test_a_frameworks_wrapper_is_taken_off() -> None:
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    inner = torch.optim.SGD([parameter()], lr=0.1)
    outer = Wrapped(Wrapped(inner))
    outer.param_groups = inner.param_groups
    assert bare_optimizer(outer) is inner
    assert HeldLayers(outer).plain_sgd()
    assert settings_of(outer) == SGD
    other = torch.optim.AdamW([parameter()])
    assert all_optimizers(None) == all_optimizers([]) == ()
    assert all_optimizers(outer) == (inner,)
    for several in ([outer, other, inner], (inner, other), iter([outer, other]), {"a": inner, "b": other}):
        assert all_optimizers(several) == (inner, other)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("sgd", "optimizer is str"),
        (torch.nn.Sequential(torch.nn.Linear(2, 2)), "optimizer is Sequential"),
        (3, "optimizer is int"),
        ([torch.optim.SGD([parameter()], lr=0.1), None], r"optimizer\[1\] is NoneType"),
        (iter([parameter()]), r"optimizer\[0\] is Parameter"),
    ],
)
def test_what_is_no_optimizer_is_refused_by_name(given: object, named: str) -> None:
    with pytest.raises(GradlabError, match=f"^{named}, expected a torch optimizer, or a list of them$"):
        all_optimizers(given)


@pytest.mark.parametrize(
    ("plan", "optimizer", "by_setting", "remedy"),
    [
        (method_plan(LAYERS, "dist-EF-blockSGDM"), ADAMW, False, "train with a plan without momentum: AdamW keeps"),
        (method_plan(LAYERS, "dist-EF-blockSGDM"), SGDM, True, "set the optimizer's to 0"),
        (method_plan(LAYERS, "dist-EF-blockSGDM"), SGD, None, ""),
        (method_plan(LAYERS, "dist-EF-blockSGD"), ADAMW, None, ""),
        (method_plan(LAYERS, "signSGD", weight_decay=0.1), ADAMW, False, "leave it to AdamW"),
        (method_plan(LAYERS, "signSGD", weight_decay=0.1), SGDM, True, "set the optimizer's to 0"),
        (method_plan(LAYERS, "dist-EF-blockSGDM"), MUON, False, "train with a plan without momentum: Muon keeps"),
        (method_plan(LAYERS, "dist-EF-blockSGD"), MUON, None, ""),
        (method_plan(LAYERS, "signSGD", weight_decay=0.1), MUON, False, "leave it to Muon"),
        (method_plan(LAYERS, "DeMo"), MUON, True, "set the optimizer's to 0"),
        (method_plan(LAYERS, "DeMo"), ADAMW, None, ""),
        (Plan.uniform(LAYERS, "powersgd"), ADAMW, None, ""),
    ],
)
def test_conflicts(plan: Plan, optimizer: OptimizerSettings, by_setting: bool | None, remedy: str) -> None:
    conflict = conflict_of(plan, optimizer)
    assert (None if conflict is None else conflict.by_setting) == by_setting
    assert conflict is None or conflict.remedy.startswith(remedy)


def test_a_command_refuses_what_no_setting_can_change_and_says_what_to_set_otherwise() -> None:
    with pytest.raises(GradlabError, match="use another method, or -s trained_with=SGD if training will use that"):
        require_trainable(ADAMW, "local_momentum", remedy="use another method")
    note = require_trainable(SGDM, "local_momentum")
    assert note is not None
    assert note.startswith("to train with it, set the optimizer's to 0: the plan applies momentum (local_momentum)")
    assert require_trainable(ADAMW, None) is require_trainable(None, "local_momentum") is None


class Recorded:
    """A trace, as far as it says what the run was trained with."""

    metadata = {"optimizer": ADAMW.to_json()}  # noqa: RUF012


def test_the_optimizer_of_training_is_the_one_given_or_the_recorded_one() -> None:
    trace: Any = Recorded()
    assert optimizer_of_training(trace, None) == ADAMW
    assert optimizer_of_training(trace, "sgd") == SGD
    assert optimizer_of_training(trace, "SGD:momentum=0.9,weight_decay=0.0005") == SGDM
    given = optimizer_of_training(trace, "Adam:betas=[0.5, 0.9]")
    assert given is not None
    assert given.momentum == "betas = (0.5, 0.9)"
    both = optimizer_of_training(trace, "Muon:weight_decay=1e-1+adamw:lr=1e+0")
    assert str(both) == "Muon and AdamW (momentum = 0.95, weight_decay = 0.1)"
    assert both is not None
    assert both.adaptive
    for text, message in (
        ("AdamX", "trained_with=AdamX: no optimizer of torch.optim"),
        ("SGD:momentums=1", "trained_with=SGD:momentums=1: "),
        ("SGD:momentum=-1", "Invalid momentum value"),
    ):
        with pytest.raises(GradlabError, match=message):
            optimizer_of_training(trace, text)


@pytest.mark.parametrize("name", ["dist-EF-blockSGD", "dist-EF-SGD", "MEM-SGD"])
@pytest.mark.parametrize("ratio", [True, None])
def test_residuals_of_a_method_follow_the_rate_as_asked(name: str, ratio: bool | None) -> None:
    (group,) = method_plan(LAYERS, name, step_size_ratio=ratio).groups
    assert {wrap.settings["step_size_ratio"] for wrap in group.wrappers} == {ratio}


def test_methods_that_keep_their_residuals_are_not_asked() -> None:
    for ratio in (True, None):
        (group,) = method_plan(LAYERS, "PowerSGD", step_size_ratio=ratio).groups
        assert group.wrappers == (Wrap("error_feedback", {"step_size_ratio": False}),)
