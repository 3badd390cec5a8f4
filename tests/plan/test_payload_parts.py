"""What a plan's bytes are, against the dtypes of what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from gradlab.codec import Exchanged, Tensors
from gradlab.collectives import AllToAll, Coroutine, run_lockstep
from gradlab.collectives.requests import payload_bytes
from gradlab.executor.step import PlanRun
from gradlab.layout import Layer
from gradlab.learning.autoencoder import Architecture
from gradlab.plan import Group, Plan, Schedule, Wrap, lgc_plan, payload_parts
from gradlab.plan.lgc_recipe import VECTORS
from support.laws import law

LAYERS = (
    Layer("stem.weight", (16, 16), "convolution"),
    Layer("stem.bias", (16,), "bias"),
    Layer("mid.weight", (40, 20), "linear"),
    Layer("mid.bias", (40,), "bias"),
    Layer("nothing", (0,), "other"),
    Layer("head.weight", (10, 30), "linear"),
)
RANKS = 3


def drawn(seed: int) -> list[Tensors]:
    generator = torch.Generator().manual_seed(seed)
    return [{x.name: torch.randn(x.shape, generator=generator) for x in LAYERS} for _ in range(RANKS)]


def counted(plan: Plan) -> dict[str, float]:
    """Bytes of one step's requests by kind of number, mean over ranks; without layers of no group."""
    sent = {"integers": 0.0, "reals": 0.0}

    def watched(rank: int, exchange: Coroutine[Exchanged]) -> Coroutine[Exchanged]:
        answer = None
        while True:
            try:
                asked = exchange.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            for request in asked if isinstance(asked, tuple) else (asked,):
                tensor = request.tensors[0] if isinstance(request, AllToAll) else request.tensor
                kind = "reals" if tensor.is_floating_point() else "integers"
                sent[kind] += payload_bytes(request, rank) / RANKS
            answer = yield asked

    grads = drawn(0)
    steps = []
    for rank in range(RANKS):
        run = PlanRun(plan, rank, RANKS)
        steps.append(run.begin())
        steps[-1].add(grads[rank])
    for group in plan.compressed_groups:
        run_lockstep([watched(rank, step.exchange(group.name)) for rank, step in enumerate(steps)])
    return sent


def uniform(codec: str, *around: Wrap, **settings: Any) -> Plan:
    groups = [Group(x.name, (x.name,), codec, settings, around) for x in LAYERS[2:]]
    return Plan(LAYERS, tuple(groups))


@law(
    st.sampled_from(["ring", "server"]),
    st.sampled_from(VECTORS),
    st.sampled_from(["raw", "packed", "bitmap", "fixed"]),
    st.floats(0.01, 0.3),
    st.sampled_from(["none", "layer"]),
    st.booleans(),
    examples=10,
)
def test_parts_of_lgc_are_what_travels(
    pattern: str, vectors: str, coding: str, density: float, normalise: str, shared: bool
) -> None:
    """Positions are the integers; codes and values the real numbers; what is in no group is dense."""
    architecture = Architecture() if pattern == "ring" else Architecture(decoders=RANKS, innovation=True)
    settings: dict[str, Any] = {"density": density, "index_coding": coding, "normalise": normalise}
    if pattern == "server":
        settings["positions"] = "shared" if shared else "own"
    weights = architecture.initial(torch.Generator().manual_seed(0))
    plan = lgc_plan(LAYERS, pattern, vectors=vectors, warmup_steps=0, autoencoder=weights, **settings)
    parts, sent = payload_parts(plan, RANKS), counted(plan)
    assert parts.positions == pytest.approx(sent["integers"])
    assert parts.code + parts.values == pytest.approx(sent["reals"])
    [group] = [group for group in plan.groups if group.codec.startswith("lgc")]
    sizes = [layer.numel for layer in plan.members(group)]
    selected = sum(plan.build(group).codec.counts(sizes))  # type: ignore[attr-defined]
    code = 4 * architecture.code_numel(selected)
    assert parts.code == pytest.approx(code if pattern == "ring" else code / RANKS)
    dense = sum(4 * x.numel for x in LAYERS if not any(x.name in group.layers for group in plan.groups))
    assert parts.dense == dense + 4
    assert dense == 4 * 256 + (4 * 56 if vectors == "dense" else 0)
    assert parts.total == pytest.approx(plan.payload_bytes(RANKS))


@pytest.mark.parametrize(
    "plan",
    [
        uniform("topk", density=0.1),
        uniform("topk", Wrap("error_feedback"), density=0.1, index_coding="raw"),
        uniform("chunk_topk", Wrap("two_way"), chunk=16, count=2, bits=None),
        uniform("clt_k", density=0.1),
        uniform("dct_topk", Wrap("error_feedback")),
        uniform("random_k"),
        uniform("powersgd"),
    ],
    ids=lambda plan: "-".join([plan.groups[0].codec, *(wrap.name for wrap in plan.groups[0].wrappers)]),
)
def test_parts_of_other_codecs_are_what_travels(plan: Plan) -> None:
    parts, sent = payload_parts(plan, RANKS), counted(plan)
    assert parts.code == 0
    assert parts.positions == pytest.approx(sent["integers"])
    assert parts.values == pytest.approx(sent["reals"])
    assert parts.dense == 4 * (256 + 16) + 4
    assert parts.total == pytest.approx(plan.payload_bytes(RANKS))


def test_layers_beside_momentum_are_dense() -> None:
    """Groups of identity that hold the momentum of what is not compressed."""
    plan = lgc_plan(LAYERS, momentum=0.9, density=0.1)
    assert payload_parts(plan, RANKS).dense == pytest.approx(4 * (256 + 16 + 40) + 4)
    assert payload_parts(Plan(LAYERS, (), Schedule(0)), RANKS).total == 4 * sum(x.numel for x in LAYERS)
