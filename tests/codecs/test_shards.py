"""Quantizers that average in shards: when they do, what they compute, and what the second rounding costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.codec import Batch, Compressor, Context, Table, exchange_group, routes
from gradlab.codec.abilities import average_into, decompress, for_layers, part_of
from gradlab.codec.routes import Payload, Sharded, Shards, can_be_cut, cut, join, shards_of, shards_on, sums_in_shards
from gradlab.codecs.block_scaled import BlockScaled
from gradlab.collectives import AllToAll, run_lockstep
from gradlab.layout import Layer
from support.laws import law

CUTTABLE: list[tuple[str, dict[str, Any]]] = [
    ("sign", {}),
    ("sign", {"block_size": 16}),
    ("sign", {"scale": "one"}),
    ("one_bit", {}),
    ("terngrad", {}),
    ("qsgd", {"bits": 3, "bucket_size": 32}),
    ("qsgd", {"bits": 4}),
    ("block_scaled", {"block_size": 8}),
    ("block_scaled", {"dtype": "int4"}),
    ("block_scaled", {"dtype": "mxfp4"}),
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
    codec, vector = for_layers(compressor(*case), Table.of_shapes(shapes)), draw(numel, seed)
    bounds = codec.blocks.bounds(numel, ranks)
    assume(can_be_cut(codec, bounds))
    payload = codec.compress(vector, torch.Generator().manual_seed(seed))
    whole, parts = decompress(codec, payload, vector), cut(codec, payload, bounds)
    for (a, b), part in zip(pairwise(bounds), parts, strict=True):
        alone = part_of(codec, a, b)
        assert sum(one.nbytes for one in part) == alone.compressed_bytes(b - a)
        if b > a:
            assert torch.equal(decompress(alone, part, vector[a:b]), whole[a:b])
    assert all(torch.equal(one, other) for one, other in zip(join(codec, parts), payload, strict=True))


@law(st.sampled_from(CUTTABLE), st.integers(6, 12), seeds)
def test_small_payloads_of_many_ranks_are_added_up_in_rank_order(
    case: tuple[str, dict[str, Any]], ranks: int, seed: int
) -> None:
    """As one vector of all of them, and bit for bit what adding one after another gives."""
    shapes = list(SHAPES.values())
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    codec = for_layers(compressor(*case), Table.of_shapes(shapes))
    generator = torch.Generator().manual_seed(seed)
    payloads = [codec.compress(draw(numel, seed + rank), generator) for rank in range(ranks)]
    total = torch.zeros(numel)
    for at, payload in enumerate(payloads):
        decoded = torch.zeros(numel)
        codec.add_decompressed(decoded, payload, 0.25)
        total = decoded if at == 0 else total + decoded
    assert torch.equal(average_into(codec, torch.empty(numel), payloads, 0.25), total)


def sharded_of(
    codec: Compressor, vectors: list[torch.Tensor], shards: Shards | None = None, seed: int = 0
) -> list[Sharded]:
    """What each rank has of a vector; shards None: those of the codec."""
    cut = shards_of(codec, len(vectors[0]), len(vectors), "g") if shards is None else shards
    at = [Context(rank, len(vectors), 0, "g", seed) for rank in range(len(vectors))]
    return [Sharded(codec, Batch({"w": vector}), cut, context) for vector, context in zip(vectors, at, strict=True)]


def averages_apart(ranks: list[Sharded]) -> list[torch.Tensor]:
    """Each rank's average of the parts that it is sent, as on a process group: it sees nothing of other ranks'."""
    running = [one.average() for one in ranks]
    asked = [next(coroutine) for coroutine in running]
    averages = []
    for rank, coroutine in enumerate(running):
        answers = []
        for requests in zip(*asked, strict=True):
            assert all(isinstance(request, AllToAll) for request in requests)
            answers.append([request.tensors[rank].clone() for request in requests])
        with pytest.raises(StopIteration) as stop:
            coroutine.send(tuple(answers))
        averages.append(stop.value.value)
    return averages


def draws_of(codec: Compressor, vector: torch.Tensor, shards: Shards, generator: torch.Generator) -> list[Payload]:
    """Every shard's payload, compressed one after another."""
    return [part_of(codec, a, b).compress(vector[a:b], generator) for a, b in shards]


# Sizes that are multiples of eight, so that payloads are cut, and others, so that shards are compressed apart.
UNEVEN = st.sampled_from([(SHAPES["a"], SHAPES["b"], SHAPES["c"]), ((48, 24),), ((7, 9), (30,), (5, 11)), ((3, 3),)])


@law(st.sampled_from(CUTTABLE), UNEVEN, st.integers(1, 9), seeds)
def test_ranks_in_one_process_average_the_whole_with_the_bits_of_its_shards(
    case: tuple[str, dict[str, Any]], shapes: tuple[tuple[int, ...], ...], ranks: int, seed: int
) -> None:
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    codec, vectors = (
        for_layers(compressor(*case), Table.of_shapes(shapes)),
        [draw(numel, seed + rank) for rank in range(ranks)],
    )
    together = run_lockstep([one.average() for one in sharded_of(codec, vectors, seed=seed)])
    apart = averages_apart(sharded_of(codec, vectors, seed=seed))
    for result, average, (start, stop) in zip(together, apart, shards_of(codec, numel, ranks, "g"), strict=True):
        assert len(average) == stop - start
        assert torch.equal(result.value, average)
    together[0].value.fill_(7.0)  # each rank has memory of its own: a server adds its residual in place
    assert all(torch.equal(one.value, average) for one, average in zip(together[1:], apart[1:], strict=True))


def test_in_one_process_payloads_are_cut_once_for_all_ranks_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """N ranks' parts would be N^2. The first payload's tell how long all are."""
    cuts: list[int] = []

    def counted(codec: Compressor, payload: Payload, bounds: Sequence[int]) -> list[Payload]:
        cuts.append(len(bounds))
        return cut(codec, payload, bounds)

    monkeypatch.setattr(routes, "cut", counted)
    codec = BlockScaled(BlockScaled.Settings(block_size=16))
    for step in range(3):
        grads = [{"w": draw(16 * 24, rank).view(16, 24)} for rank in range(8)]
        run_lockstep([exchange_group(codec, grads[rank], {}, Context(rank, 8, step, "w")) for rank in range(8)])
    assert cuts == [9]


def test_ranks_and_steps_share_what_follows_from_shapes() -> None:
    codec = compressor("qsgd", {})
    assert shards_of(codec, 4096, 4) is shards_of(codec, 4096, 4)
    assert shards_of(codec, 4096, 4) is not shards_of(codec, 4096, 5)
    assert list(shards_on(codec, 1, 8, 3)) == [(0, 0), (0, 8), (8, 8)]
    assert shards_on(codec, 1, 8, 3).occupied == [1]


@law(st.sampled_from(CUTTABLE), st.integers(1, 300), st.integers(1, 60), st.text(max_size=3), examples=40)
def test_shards_make_up_the_vector_and_few_of_them_are_far_apart(
    case: tuple[str, dict[str, Any]], numel: int, ranks: int, group: str
) -> None:
    codec = compressor(*case)
    shards = shards_of(codec, numel, ranks, group)
    assert len(shards) == ranks
    assert shards.bounds == [0, *(stop for _, stop in shards)]
    assert [start for start, _ in shards] == shards.bounds[:-1]
    assert shards.bounds[-1] == numel
    assert len(shards.occupied) == min(ranks, codec.blocks.count(numel))
    apart = [b - a for a, b in pairwise([*shards.occupied, shards.occupied[0] + ranks])]
    assert max(apart) - min(apart) <= 1


def test_groups_of_one_size_have_other_servers() -> None:
    served = [shards_of(compressor("natural", {}), 24, 64, f"layer {n}").occupied for n in range(16)]
    assert len({rank for ranks in served for rank in ranks}) > 24


@law(
    st.sampled_from([*CUTTABLE, ("block_scaled", {"stochastic": True}), ("topk", {"density": 0.3})]),
    st.integers(1, 40),
    st.integers(2, 7),
    st.data(),
)
def test_where_one_rank_has_it_all_payloads_are_those_of_all_shards_in_turn(
    case: tuple[str, dict[str, Any]], numel: int, ranks: int, data: st.DataObject
) -> None:
    """Empty shards' payloads too, whether or not random numbers are drawn for them."""
    codec, root, seed = compressor(*case), data.draw(st.integers(0, ranks - 1)), data.draw(seeds)
    shards, vector = shards_on(codec, root, numel, ranks), draw(numel, seed)
    assume(not shards.whole)
    [sharded, *_] = sharded_of(codec, [vector] * ranks, shards, seed)
    alone = draws_of(codec, vector, shards, Context(0, ranks, 0, "g", seed).random.of_rank("shards"))
    for one, other in zip(sharded.sent, alone, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(one, other, strict=True))


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
        ("natural", {}, True),
        ("terngrad", {}, False),
        ("topk", {}, False),
    ],
)
def test_the_shorter_form_is_the_default_where_a_second_rounding_costs_little(
    name: str, settings: dict[str, Any], in_shards: bool
) -> None:
    codec = compressor(name, settings)
    assert [sums_in_shards(codec, ranks) for ranks in (1, 2, 3, 64)] == [False, False, in_shards, in_shards]
    if hasattr(codec.settings, "aggregation"):
        assert not sums_in_shards(compressor(name, {**settings, "aggregation": "gather"}), 64)


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
            [exchange_group(codec, grads[rank], {}, Context(rank, ranks, 0, "w")) for rank in range(ranks)]
        )
        payload = sum(result.payload_bytes for result in results[form]) / ranks
        assert payload == pytest.approx(codec.forecast(layers, ranks).payload)
    true = torch.stack([result.value.own["w"] for result in results["shards"]]).mean(0)
    mean = results["shards"][0].value.mean["w"]
    assert all(torch.equal(result.value.mean["w"], mean) for result in results["shards"])
    omega = {"block_scaled": 256 / (2 * 127) ** 2, "qsgd": 512 / (4 * 49), "natural": 1 / 8}[name]
    assert 0 < float((mean - true).square().sum()) <= omega * float(true.square().sum())
    sent = {form: max(result.wire_bytes for result in of_form) for form, of_form in results.items()}
    assert sent["shards"] == pytest.approx(2 / ranks * sent["gather"], rel=0.02)
