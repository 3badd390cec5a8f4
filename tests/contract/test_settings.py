"""Settings by field, codecs as values, and what a plan of many groups costs."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gradlab import codecs, wrappers
from gradlab.analysis.fit.uniform import parse_wrapper
from gradlab.artifact import Artifact
from gradlab.catalog import setting_rows
from gradlab.codec import Codec, Gradients
from gradlab.codec.registry import CODECS, listed
from gradlab.codec.settings import Setting, build_settings, fields_of
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Group, Plan, Wrap
from gradlab.setting_texts import parse_settings
from gradlab.wrappers.error_feedback import ErrorFeedback
from support.command_line import Command
from support.contract import SETTINGS, cases, codec_of

LAYER = Layer("w", (30, 20), "linear")

# --- types of settings, in a user's own module ----------------------------------------------------------------------

SOURCE = """
from dataclasses import dataclass
from typing import Literal, Optional
from gradlab.codec import About, Bytes, Codec, mean_only, register, setting

class Typed(Codec):
    name = "typed"
    about = About("dense", "4 * n")

    @dataclass(frozen=True)
    class Settings:
        union: int | None = None
        optional: Optional[float] = setting(None, above=0, unit="share", most=1, help="sent")
        word: Literal["max", "l2", 3] = "max"
        sizes: tuple[int, ...] = (1, 2)
        pair: tuple[int, str] = (1, "a")
        either: int | str = setting(4, choices=(4, "all"))

    def exchange(self, grads, state, context):
        return (yield from mean_only(grads))

    def forecast(self, layers, world_size, state=None):
        return Bytes.of_means(4 * sum(layer.numel for layer in layers), world_size)

register(Typed)
"""
GIVEN = {"union": 3, "optional": 0.5, "word": "l2", "sizes": [4, 5, 6], "pair": [2, "b"], "either": "all"}
BUILT = {**GIVEN, "sizes": (4, 5, 6), "pair": (2, "b")}


@pytest.fixture(params=["", "from __future__ import annotations\n"], ids=["types", "texts"])
def typed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Codec]]:
    """A registered codec whose settings have types that JSON has no word for."""
    monkeypatch.setattr(CODECS, "registered", {})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "typed_by_a_user.py").write_text(request.param + SOURCE)
    importlib.invalidate_caches()
    yield importlib.import_module("typed_by_a_user").Typed
    del sys.modules["typed_by_a_user"]


def test_types_of_a_users_settings_are_read_from_json(typed: type[Codec]) -> None:
    assert vars(build_settings(typed, GIVEN)) == BUILT
    assert codecs.make("typed", word=3, union=None).settings.word == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"union": 1.5}, r"typed: setting union = 1.5, expected int \| None"),
        ({"optional": "x"}, r"setting optional = 'x', expected float \| None"),
        ({"optional": 2}, r"setting optional = 2, expected a share in \(0, 1\], or None"),
        ({"word": "l1"}, r"setting word = 'l1', expected one of max, l2, 3"),
        ({"word": True}, r"setting word = True, expected one of"),
        ({"sizes": [1, "2"]}, r"setting sizes = \[1, '2'\], expected a list of int"),
        ({"sizes": 1}, r"setting sizes = 1, expected a list of int"),
        ({"pair": [1, "a", 2]}, r"setting pair = \[1, 'a', 2\], expected a list of int, str"),
        ({"either": 5}, r"setting either = 5, expected 4 or 'all'"),
    ],
)
def test_values_of_another_type_are_refused(typed: type[Codec], values: dict[str, Any], message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        build_settings(typed, values)


def test_a_users_settings_come_from_the_command_line(typed: type[Codec]) -> None:
    texts = ["union=3", "optional=0.5", "word=l2", "sizes=[4,5,6]", 'pair=[2,"b"]', "either=all"]
    assert vars(build_settings(typed, parse_settings(texts))) == BUILT


def test_a_users_settings_survive_plans_and_artifacts(typed: type[Codec], tmp_path: Path) -> None:
    plan = Plan.uniform([LAYER], "typed", **BUILT)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    Artifact(plan, {}).save(tmp_path / "typed.safetensors")
    loaded = Artifact.load(tmp_path / "typed.safetensors").plan
    assert loaded == plan
    assert loaded.digest == plan.digest
    assert loaded.build(loaded.groups[0]) == plan.build(plan.groups[0])
    assert Group("g", ("w",), "typed", {"sizes": (4, 5)}) == Group("g", ("w",), "typed", {"sizes": [4, 5]})


def test_a_wrappers_list_keeps_its_commas() -> None:
    assert parse_wrapper("error_feedback:decay=0.5,buffer=int8") == Wrap(
        "error_feedback", {"decay": 0.5, "buffer": "int8"}
    )
    with pytest.raises(GradlabError, match=r"decay = \[0.1, 0.2\], expected float"):
        parse_wrapper("error_feedback:decay=[0.1,0.2],buffer=int8")


def test_a_type_that_json_has_not_is_named() -> None:
    @dataclass(frozen=True)
    class Complex:
        phase: complex = 1j

    class Rotated(codecs.get("natural")):  # type: ignore[misc]
        name = "rotated"
        Settings = Complex

    with pytest.raises(GradlabError, match="rotated: setting phase is of type complex, which no JSON value is"):
        build_settings(Rotated, {"phase": 1})


# --- ranges ---------------------------------------------------------------------------------------------------------

METHODS = [*(codecs.get(name) for name in codecs.names()), *(wrappers.get(name) for name in wrappers.names())]


@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_each_setting_says_what_it_does_and_refuses_what_is_out_of_range(method: type[Codec]) -> None:
    for row in setting_rows(method):
        assert row.help, (method.name, row.name)
        assert row.values
    for field in fields_of(method.Settings):
        for value in ({"no": "value"}, *beyond(field.about)):
            with pytest.raises(GradlabError, match=f"^{method.name}: setting .* = .*, expected "):
                build_settings(method, {field.name: value})


def beyond(about: Setting) -> list[Any]:
    """Values that lie just outside of a setting's range."""
    ends = [about.above, about.below]
    ends += [None if about.least is None else about.least - 1, None if about.most is None else 2 * about.most + 1]
    values = [*(end for end in ends if end is not None), *(["no such word"] if about.choices else [])]
    return [value for value in values if value not in about.also]


def test_a_range_is_checked_wherever_a_codec_is_made() -> None:
    topk = codecs.get("topk")
    for make in (lambda: topk(topk.Settings(1.5)), lambda: codecs.make("topk", density=1.5)):
        with pytest.raises(
            GradlabError, match=r"topk: setting density = 1.5, expected a share of elements in \(0, 1\]"
        ):
            make()
    with pytest.raises(GradlabError, match="topk: setting density = None, expected a share"):
        topk(topk.Settings(None))
    with pytest.raises(GradlabError, match="gradiveq: setting sample_bits = 1, expected bits, 2 to 8, or 0"):
        codecs.make("gradiveq", sample_bits=1)
    assert codecs.make("gradiveq", sample_bits=0).settings.sample_bits == 0


def test_commands_show_ranges_and_meanings(gradlab: Command) -> None:
    code, out, _ = gradlab("methods", "powersgd")
    assert code == 0
    assert "rank = 4: at least 1" in out
    assert "columns of P and Q (r)" in out


# --- codecs as values -----------------------------------------------------------------------------------------------


def test_a_codec_shows_its_first_setting_and_what_is_no_default() -> None:
    assert repr(codecs.make("topk", density=0.01)) == "TopK(density=0.01)"
    assert repr(codecs.make("qsgd", bits=4, norm="l2")) == "QSGD(bits=4, norm='l2')"
    assert repr(ErrorFeedback(codecs.make("topk"), ErrorFeedback.Settings(decay=0.1))) == (
        "ErrorFeedback(TopK(density=0.01), decay=0.1)"
    )


@pytest.mark.parametrize("case", cases())
def test_equal_codecs_are_equal_and_others_are_not(case: str) -> None:
    values = SETTINGS.get(case, {})
    one, two = codecs.make(codec_of(case), **values), codecs.make(codec_of(case), **values)
    assert one == two
    assert hash(one) == hash(two)
    assert one != codecs.make("identity" if codec_of(case) != "identity" else "topk")
    assert ErrorFeedback(one) == ErrorFeedback(two) != one


def test_learned_tensors_and_wrappers_make_a_difference() -> None:
    method, samples = codecs.get("gradiveq"), torch.randn(6, 30, 20, generator=torch.Generator().manual_seed(0))
    bare = codecs.make("gradiveq", slice_size=20)
    fitted = [bare.fit([LAYER], {"w": batch}) for batch in (samples, samples, samples.flip(1))]
    assert fitted[0] == fitted[1]
    assert hash(fitted[0]) == hash(fitted[1])
    assert len({bare, *fitted}) == 3
    assert method(bare.settings, fitted[0].learned) == fitted[0]
    topk = codecs.make("topk")
    assert ErrorFeedback(topk) != ErrorFeedback(topk, ErrorFeedback.Settings(decay=0.1))


def test_gradients_are_applied_as_they_come() -> None:
    codec, w, b = codecs.make("topk", density=0.5), torch.tensor([3.0, 1.0]), torch.tensor([0.0, 4.0])
    assert codec.apply(w).decoded.tolist() == [3.0, 0.0]
    assert codec.apply(w).relative_error == pytest.approx(10**-0.5)
    assert codec.apply([w, b]).decoded.tolist() == [1.5, 2.0]
    done = codec.apply([{"w": w, "b": b}, {"w": b, "b": w}])
    assert {name: tensor.tolist() for name, tensor in done.decoded.items()} == {"w": [1.5, 2.0], "b": [1.5, 2.0]}
    assert done.dense_bytes == 16
    assert done.payload_bytes == codec.forecast([Layer("w", (2,)), Layer("b", (2,))], 2).payload
    assert done.ratio == 16 / done.payload_bytes
    assert done.ratio_to_16_bits == 8 / done.payload_bytes
    assert codecs.make("identity").apply(torch.zeros(3)).relative_error == 0.0


@pytest.mark.parametrize("gradients", [[], 5, {"w": 5}, [torch.ones(2), torch.ones(3)]])
def test_what_is_no_gradient_is_not_applied(gradients: Gradients) -> None:
    with pytest.raises(GradlabError, match=r"codec\.apply: "):
        codecs.make("topk").apply(gradients)


# --- what a plan of many groups costs -------------------------------------------------------------------------------


def test_a_plan_builds_groups_alike_once_however_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = [], Plan.build

    def counted(self: Plan, group: Group) -> Codec:
        built.append(group.name)
        return build(self, group)

    monkeypatch.setattr(Plan, "build", counted)
    layers = [Layer(f"w{n}", (30, 20), "linear") for n in range(50)]
    plan = Plan.uniform(layers, "topk", density=0.05, group_bytes=0)
    for ranks in (2, 3, 4):
        plan.payload_bytes(ranks)
    assert built == ["w0"]


def test_a_plan_gives_out_codecs_of_its_callers_own() -> None:
    plan = Plan.uniform([LAYER], "topk", density=0.05)
    one, two = (plan.build(plan.groups[0]) for _ in range(2))
    assert one == two
    assert one is not two


def test_a_folder_of_methods_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, look = [], pkgutil.iter_modules
    monkeypatch.setattr(pkgutil, "iter_modules", lambda path: looked.append(path) or look(path))
    listed.cache_clear()
    for _ in range(20):
        codecs.get("topk")
        codecs.names()
        wrappers.get("error_feedback")
    assert len(looked) == 2


def test_what_a_plan_remembers_does_not_travel() -> None:
    plan = Plan.uniform([LAYER], "topk", density=0.05)
    forecast = plan.payload_bytes(2)
    again = copy.deepcopy(plan)
    assert set(vars(again)) == {"layers", "groups", "schedule", "seed", "learned", "refresh"}
    assert again == plan
    assert again.payload_bytes(2) == forecast
