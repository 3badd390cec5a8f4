"""The benchmarks' rows against the recipes: a title that bears a method's name says what differs from its recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import pytest

from gradlab.analysis.forecast.candidates import candidates
from gradlab.layout import Layer
from gradlab.plan import Plan, method_plan, named_plan
from gradlab.plan.recipes import METHODS
from support.benchmark_modules import BENCHMARKS, benchmark_modules

MODULES = ("accuracy", "compared", "lgc", "methods", "node_steps", "text_chars")
LAYERS = (
    Layer("conv", (16, 8, 3, 3), "convolution"),
    Layer("norm", (16,), "normalization"),
    Layer("w", (40, 30), "linear"),
    Layer("b", (40,), "bias"),
)
Row = TypeVar("Row")
Settings = dict[str, dict[str, Any]]  # by wrapper; of the codec under ""
# What a title may say beside the method's name, and what that sets.
PHRASES: tuple[tuple[str, Callable[[re.Match[str]], Settings]], ...] = (
    (r"rank (\d+)", lambda m: {"": {"rank": int(m[1])}}),
    (r"(\d+) bits", lambda m: {"": {"bits": int(m[1])}}),
    (r"([\d.]+) %", lambda m: {"": {"density": round(float(m[1]) / 100, 6)}}),
    (r"(\d+) of (\d+)", lambda m: {"": {"count": int(m[1]), "chunk": int(m[2])}}),
    (r"max norm", lambda m: {"": {"norm": "max"}}),
    (r"buckets of (\d+)", lambda m: {"": {"bucket_size": int(m[1])}}),
    (r"L2 norm", lambda m: {"": {"norm": "l2"}}),
    (r"alternating", lambda m: {"": {"alternating": True}}),
    (r"no resets", lambda m: {"error_feedback": {"reset_steps": 0}}),
    (r"(\d+) steps of ramp", lambda m: {"sparsity_warmup": {"steps": int(m[1])}}),
)
NAMES = "|".join(re.escape(name) for name in sorted(METHODS, key=len, reverse=True))
BARE = re.compile(rf"(?<![\w-])({NAMES})(?![\w-])")


def recipe_of(title: str) -> tuple[str, Settings]:
    """Read a title that bears a method's name: the method, and the settings that it says differ."""
    found = BARE.search(title)
    assert found is not None, title
    rest, said = title[: found.start()] + title[found.end() :], {}
    for phrase, means in PHRASES:
        if match := re.search(phrase, rest):
            for where, settings in means(match).items():
                said.setdefault(where, {}).update(settings)
            rest = rest.replace(match[0], "", 1)
    assert not rest.strip(" ,"), f"{title!r}: nothing is known of {rest.strip(' ,')!r}"
    return found[1], said


def named(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Rows whose titles bear a published method's name."""
    return {title: row for title, row in rows.items() if BARE.search(title)}


def check(title: str, plan: Plan, layers: Sequence[Layer] = LAYERS, **common: Any) -> None:
    """Hold a row's plan against the recipe that its title names; common: what all rows of a benchmark share."""
    name, said = recipe_of(title)
    expected = method_plan(layers, name, wrapper_settings=without(said, ""), **common, **said.get("", {}))
    assert resolved(plan) == resolved(expected), title


def without(settings: Settings, key: str) -> Settings:
    return {name: value for name, value in settings.items() if name != key}


def resolved(plan: Plan) -> list[Any]:
    """What a plan's groups are, with every setting, whether it was given or is a default."""
    return [(group.name, group.layers, plan.build(group)) for group in plan.groups] + [plan.schedule, plan.seed]


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Mapping[str, ModuleType]]:
    with benchmark_modules(*MODULES) as modules:
        yield modules


def test_rows_of_published_methods_are_their_recipes(benchmarks: Mapping[str, ModuleType]) -> None:
    methods = benchmarks["methods"]
    rows = named(methods.METHODS)
    assert len(rows) == 14
    for title, row in rows.items():
        if not row.by_layer:
            check(title, row.plan(LAYERS, 0, **methods.SCOPE), **methods.SCOPE)
    rows = named(benchmarks["text_chars"].METHODS)
    assert len(rows) == 21
    for title, row in rows.items():
        if not row.by_layer:
            check(title, row.plan(LAYERS, 0))
    rows = named(benchmarks["accuracy"].methods(0))
    assert len(rows) == 2
    for title, row in rows.items():
        check(title, row.plan(LAYERS))


def test_rows_by_layer_have_the_settings_in_their_titles(benchmarks: Mapping[str, ModuleType]) -> None:
    rows = {
        title: row
        for module in ("text_chars", "methods")
        for title, row in named(benchmarks[module].METHODS).items()
        if row.by_layer
    }
    assert list(rows) == ["L-GreCo, PowerSGD rank 4", "L-GreCo, PowerSGD rank 2"]
    for title, row in rows.items():
        name, said = recipe_of(title.removeprefix("L-GreCo, "))
        assert (METHODS[name].codec, {"": dict(row.settings)}) == (row.codec, said)


def test_ways_of_codecs_have_recipes_under_their_names(benchmarks: Mapping[str, ModuleType]) -> None:
    rows = named({title: way[:2] for title, way in benchmarks["node_steps"].CODECS.items()})
    assert rows
    for title, (codec, settings) in rows.items():
        check(title, named_plan(LAYERS, codec, **settings))


def test_candidates_of_a_search_are_the_recipes() -> None:
    rows = named({one.name: one.plan for family in candidates(LAYERS).values() for one in family.candidates})
    assert len(rows) > 10
    for title, plan in rows.items():
        check(title, plan)


def test_a_row_of_another_norm_or_a_setting_untold_is_found() -> None:
    check("QSGD 4 bits, max norm", method_plan(LAYERS, "QSGD, max norm", bits=4))
    for title, plan in (
        ("QSGD 4 bits", Plan.uniform(LAYERS, "qsgd", bits=4)),
        ("QSGD, max norm", method_plan(LAYERS, "QSGD", bits=4)),
        ("PowerSGD", method_plan(LAYERS, "PowerSGD", rank=2)),
        ("DGC 2.6 %", method_plan(LAYERS, "DGC", density=0.026, wrapper_settings={"sparsity_warmup": {"steps": 9}})),
        ("LoCo, tuned", method_plan(LAYERS, "LoCo")),
    ):
        with pytest.raises(AssertionError):
            check(title, plan)


def test_stored_rows_have_titles_that_the_benchmarks_know(benchmarks: Mapping[str, ModuleType]) -> None:
    for file, known in (
        ("methods-training", {*benchmarks["methods"].METHODS}),
        ("methods-replay", {*benchmarks["methods"].METHODS}),
        ("fashion-training", {*benchmarks["methods"].METHODS}),
        ("fashion-replay", {*benchmarks["methods"].METHODS}),
        ("text-chars", {*benchmarks["text_chars"].METHODS}),
        ("accuracy-16", {*benchmarks["accuracy"].methods(0), *benchmarks["accuracy"].OF_AXES}),
        ("accuracy-128", {*benchmarks["accuracy"].methods(0), *benchmarks["accuracy"].OF_AXES}),
        ("lgc-training", {*benchmarks["lgc"].METHODS}),
    ):
        rows = [json.loads(line) for line in (BENCHMARKS / "results" / f"{file}.jsonl").read_text().splitlines()]
        assert {row["method"] for row in rows if "method" in row} <= known, file


@pytest.mark.parametrize("file", ["methods-replay", "fashion-replay"])
def test_stored_replays_have_their_rows_settings(file: str, benchmarks: Mapping[str, ModuleType]) -> None:
    """A replay under a published method's name is the one that the campaign would look for, and not make again."""
    methods = benchmarks["methods"].METHODS
    rows = [json.loads(line) for line in (BENCHMARKS / "results" / f"{file}.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["settings"] == methods[row["method"]].codec_settings, row["method"]
