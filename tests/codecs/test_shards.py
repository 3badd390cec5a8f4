"""Quantizers that average in shards: when they do, what they compute, and what the second rounding costs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.codec import Compressor, Context
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from support.laws import law

CUTTABLE: list[tuple[str, dict[str, Any]]] = [
    ("sign", {}),
    ("sign", {"block_size": 16}),
    ("sign", {"scale": "one"}),
    ("one_bit", {}),
    ("terngrad", {}),
    ("terngrad", {"block_size": 24}),
    ("qsgd", {"bits": 3, "bucket_size": 32}),
    ("qsgd", {"bits": 4}),
    ("block_scaled", {"block_size": 8}),
    ("block_scaled", {"dtype": "int4"}),
    ("natural", {}),
]
SHAPES = {"a": (16, 24), "b": (40,), "c": (64, 8)}
seeds = st.integers(0, 10_000)


def compressor(name: str, settings: dict[str, Any]) -> Compressor:
    codec = codecs.make(name, **settings)
    assert isinstance(codec, Compressor)
    return codec


def draw(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@law(st.sampled_from(CUTTABLE), st.integers(1, 7), st.booleans(), seeds)
def test_a_payload_cut_at_shards_decodes_to_the_parts_of_the_whole(
    case: tuple[str, dict[str, Any]], ranks: int, grouped: bool, seed: int
) -> None:
    shapes = list(SHAPES.values()) if grouped else [(48, 24)]
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    codec, vector = compressor(*case).for_layers(shapes), draw(numel, seed)
    bounds = codec.bounds(numel, ranks)
    assume(codec.can_be_cut(bounds))
    payload = codec.compress(vector, torch.Generator().manual_seed(seed))
    whole, parts = codec.decompress(payload, vector), codec.cut(payload, bounds)
    for (a, b), part in zip(pairwise(bounds), parts, strict=True):
        alone = codec.part(a, b)
        assert sum(one.nbytes for one in part) == alone.compressed_bytes(b - a)
        if b > a:
            assert torch.equal(alone.decompress(part, vector[a:b]), whole[a:b])
    assert all(torch.equal(one, other) for one, other in zip(codec.join(parts), payload, strict=True))


@law(st.sampled_from(CUTTABLE), st.integers(6, 12), seeds)
def test_small_payloads_of_many_ranks_are_added_up_in_rank_order(
    case: tuple[str, dict[str, Any]], ranks: int, seed: int
) -> None:
    """As one vector of all of them, and bit for bit what adding one after another gives."""
    shapes = list(SHAPES.values())
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    codec = compressor(*case).for_layers(shapes)
    generator = torch.Generator().manual_seed(seed)
    payloads = [codec.compress(draw(numel, seed + rank), generator) for rank in range(ranks)]
    total = torch.zeros(numel)
    for at, payload in enumerate(payloads):
        decoded = torch.zeros(numel)
        codec.add_decompressed(decoded, payload, 0.25)
        total = decoded if at == 0 else total + decoded
    assert torch.equal(codec.average_into(torch.empty(numel), payloads, 0.25), total)


@pytest.mark.parametrize(
    ("name", "settings", "in_shards"),
    [
        ("block_scaled", {}, True),
        ("block_scaled", {"dtype": "float8_e4m3fn"}, True),
        ("block_scaled", {"dtype": "int4"}, False),  # rounded to the nearest, small means would be lost for good
        ("block_scaled", {"dtype": "int4", "stochastic": True}, True),
        ("block_scaled", {"dtype": "int4", "scale": 100.0}, False),
        ("qsgd", {"bits": 4}, True),
        ("qsgd", {"bits": 3}, False),
        ("qsgd", {"bits": 4, "norm": "l2"}, False),
        ("qsgd", {"bits": 4, "contraction": "measured"}, False),
        ("natural", {}, True),
        ("terngrad", {}, False),
        ("topk", {}, False),
    ],
)
def test_the_shorter_form_is_the_default_where_a_second_rounding_costs_little(
    name: str, settings: dict[str, Any], in_shards: bool
) -> None:
    codec = compressor(name, settings)
    assert [codec.sums_in_shards(ranks) for ranks in (1, 2, 3, 64)] == [False, False, in_shards, in_shards]
    if hasattr(codec.settings, "aggregation"):
        assert not compressor(name, {**settings, "aggregation": "gather"}).sums_in_shards(64)


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize(("name", "settings"), [("block_scaled", {}), ("qsgd", {"bits": 4}), ("natural", {})])
def test_the_mean_is_the_mean_of_contributions_rounded_once_more(
    name: str, settings: dict[str, Any], ranks: int
) -> None:
    """Within the codec's bound of it, and fewer bytes travel than in a gather; payloads are as forecast."""
    layers = [Layer("w", (512, 24))]
    grads = [{"w": draw(512 * 24, rank).view(512, 24)} for rank in range(ranks)]
    results = {}
    for form in ("shards", "gather"):
        codec = compressor(name, {**settings, "aggregation": form})
        results[form] = run_lockstep(
            [codec.exchange(grads[rank], {}, Context(rank, ranks, 0, "w")) for rank in range(ranks)]
        )
        payload = sum(result.payload_bytes for result in results[form]) / ranks
        assert payload == pytest.approx(codec.payload_bytes(layers, ranks))
    true = torch.stack([result.value.own["w"] for result in results["shards"]]).mean(0)
    mean = results["shards"][0].value.mean["w"]
    assert all(torch.equal(result.value.mean["w"], mean) for result in results["shards"])
    omega = {"block_scaled": 256 / (2 * 127) ** 2, "qsgd": 512 / (4 * 49), "natural": 1 / 8}[name]
    assert 0 < float((mean - true).square().sum()) <= omega * float(true.square().sum())
    sent = {form: max(result.wire_bytes for result in of_form) for form, of_form in results.items()}
    assert sent["shards"] == pytest.approx(2 / ranks * sent["gather"], rel=0.02)


def test_a_contraction_is_not_applied_twice() -> None:
    with pytest.raises(GradlabError, match="aggregation"):
        codecs.make("qsgd", contraction="bound", aggregation="shards")
