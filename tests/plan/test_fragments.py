"""Fragments of a plan: consecutive, whole groups, about as large as each other, and nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Group, Plan
from gradlab.plan.shards import fragments_of


@given(st.data())
def test_fragments_are_the_plan_in_parts(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=14))
    layers = tuple(Layer(f"l{i}", (size,), "linear") for i, size in enumerate(sizes))
    grouped = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))  # 0: dense
    members = {number: tuple(f"l{i}" for i, g in enumerate(grouped) if g == number) for number in set(grouped) - {0}}
    plan = Plan(layers, tuple(Group(f"g{n}", names, "topk", {"density": 0.5}) for n, names in members.items()), seed=7)
    parts = len(members) + grouped.count(0)
    count = data.draw(st.integers(1, parts + 1))
    if count > parts:
        with pytest.raises(GradlabError, match=f"the plan has {parts} groups and dense layers"):
            fragments_of(plan, count)
        return
    fragments = fragments_of(plan, count)
    assert len(fragments) == count
    assert sorted(layer.name for one in fragments for layer in one.layers) == sorted(layer.name for layer in layers)
    assert sorted(group.name for one in fragments for group in one.groups) == sorted(g.name for g in plan.groups)
    assert all(group in plan.groups for one in fragments for group in one.groups)
    assert {one.seed for one in fragments} == {7}
    largest = max([sum(sizes[int(name[1:])] for name in names) for names in members.values()] + sizes)
    assert all(sum(layer.numel for layer in one.layers) <= sum(sizes) / count + largest for one in fragments)
    firsts = [min(layers.index(layer) for layer in one.layers) for one in fragments]
    assert firsts == sorted(firsts)
