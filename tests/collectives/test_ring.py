"""Rings: Algorithm 1 against plain sums, its bytes, and real ranks against one process, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from gradlab.analysis.forecast.dry_run import DryRuns
from gradlab.analysis.forecast.link import transfers
from gradlab.codec import Context, exchange_group
from gradlab.codec.abilities import decompress
from gradlab.codec.settings import build_settings
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.codecs.qsgd import QSGD
from gradlab.collectives import Ring, run_lockstep
from gradlab.collectives.ring import SummedRing, ring_wire_bytes, segment_bounds
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from support.contract import codec_of, lockstep, plan_for
from support.laws import law
from support.prescribed import SHAPES, gradients
from support.process_pool import ProcessPool

CASES = ("identity, ring", "qsgd, ring", "gradiveq, ring")


def ring_of(vector: torch.Tensor, ranks: int) -> SummedRing:
    bounds = segment_bounds(len(vector), ranks)
    return SummedRing(bounds, lambda a, b: vector[a:b], lambda a, b, summed: summed, 1, vector.dtype)


@law(st.integers(0, 50), st.integers(1, 7), st.integers(0, 2**31))
def test_a_ring_gives_every_rank_the_mean(count: int, ranks: int, seed: int) -> None:
    vectors = torch.randn(ranks, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def ask(vector: torch.Tensor):
        return (yield Ring(ring_of(vector, ranks)))

    results = run_lockstep([ask(vector) for vector in vectors])
    for result in results:
        torch.testing.assert_close(torch.cat(result.value), vectors.mean(0))
        assert result.payload_bytes == 8 * count
    # What all ranks send together: every segment makes 2 (N - 1) hops.
    assert sum(result.wire_bytes for result in results) == 2 * (ranks - 1) * 8 * count


@law(st.integers(0, 100), st.integers(1, 9), st.integers(0, 20))
def test_segments_cover_everything_once(count: int, segments: int, turn: int) -> None:
    bounds = segment_bounds(count, segments, turn)
    assert [i for first, last in bounds for i in range(first, last)] == list(range(count))
    assert max(b - a for a, b in bounds) - min(b - a for a, b in bounds) <= 1


@law(st.integers(0, 100), st.integers(1, 9))
def test_vectors_of_all_turns_have_equal_segments_together(count: int, segments: int) -> None:
    turned = [segment_bounds(count, segments, turn) for turn in range(segments)]
    assert {sum(bounds[i][1] - bounds[i][0] for bounds in turned) for i in range(segments)} == {count}


@pytest.mark.parametrize("rank", range(3))
def test_what_a_rank_sends(rank: int) -> None:
    """Algorithm 1 by hand for 3 nodes: node 0 sends segments 0 and 2, then 1 and 0."""
    sizes = [1, 10, 100]
    sent = [(0, 2, 1, 0), (1, 0, 2, 1), (2, 1, 0, 2)][rank]
    assert ring_wire_bytes(sizes, rank) == sum(sizes[i] for i in sent)


def test_a_ring_of_another_size_is_refused() -> None:
    def ask():
        yield Ring(ring_of(torch.zeros(4), 3))

    with pytest.raises(GradlabError, match="Ring of 3 segments at world size 2"):
        run_lockstep([ask(), ask()])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_requantizes_at_every_hop(ranks: int, bits: int) -> None:
    """By hand: decompress, add, compress; unbiased, and the error grows with the hops."""
    codec = QSGD(QSGD.Settings(bits, bucket_size=16, ring=True))
    layer = {"w": torch.randn(50, generator=torch.Generator().manual_seed(1))}
    context = Context(0, ranks, 3, "w", seed=9)
    results = run_lockstep([exchange_group(codec, layer, {}, replace(context, rank=r)) for r in range(ranks)])
    bounds = segment_bounds(7, ranks)
    expected = []
    for segment, (first, last) in enumerate(bounds):
        part, total = layer["w"][8 * first : min(50, 8 * last)], torch.zeros(0)
        for hop in range(ranks):
            here = replace(context, rank=(segment + hop) % ranks)
            total = part + total if hop else part
            payload = codec.compress(total, here.random.of_rank("segment", segment))
            total = decompress(codec, payload, part)
        expected.append(total / ranks)
    for result in results:
        torch.testing.assert_close(result.value.mean["w"], torch.cat(expected), rtol=1e-6, atol=1e-7)
        assert result.payload_bytes == sum(codec.compressed_bytes(min(50, 8 * b) - 8 * a) for a, b in bounds)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reuse": 2},
        {"monitor": "absolute"},
        {"reuse": 1},
        {"reuse": 2, "ratio": None, "loss_threshold": 0.5},
        {"complement": 0.5},
        {"slice_size": 50},  # two slices: fewer than ranks
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradiveq_by_ring_is_gradiveq(settings: dict[str, object], ranks: int) -> None:
    """Algorithm 1 changes the order of a sum, and nothing else: means, own parts, states, bytes."""
    shared = {"slice_size": 12, "sample_steps": 3, "ratio": 3, "whitening": True, **settings}
    layer = Layer("w", (4, 3, 3, 3))
    draw = torch.Generator().manual_seed(3)
    samples = {"w": torch.randn(20, *layer.shape, generator=draw)}
    grads = [{"w": torch.randn(*layer.shape, generator=draw)} for _ in range(ranks)]
    results = []
    for ring in (False, True):
        codec = GradiVeQ(build_settings(GradiVeQ, {**shared, "ring": ring})).fit([layer], samples)
        context = Context(0, ranks, 0, "w")
        parts = [exchange_group(codec, g, {}, replace(context, rank=r)) for r, g in enumerate(grads)]
        results.append(run_lockstep(parts))
    close = {"rtol": 1e-5, "atol": 1e-6}
    for plain, ring in zip(*results, strict=True):
        torch.testing.assert_close(ring.value.mean["w"], plain.value.mean["w"], **close)
        torch.testing.assert_close(ring.value.own["w"], plain.value.own["w"], **close)
        assert ring.value.state.keys() == plain.value.state.keys()
        assert ring.payload_bytes == plain.payload_bytes


def test_engine_equals_lockstep(pool: ProcessPool) -> None:
    """Under real DDP on several buckets; a ring's sums have one order, so that no deterministic mode is needed for it.

    (GradiVeQ also asks for means, of tails and votes.)
    """
    ranks, alone = 4, [case for case in CASES if codec_of(case) != "gradiveq"]
    arguments = {"cases": alone, "grouping": "model", "deterministic": False, "dtype": "float32"}
    results = pool.run("support.contract:engine_against_lockstep", ranks, **arguments)
    for result in results:
        for case in alone:
            found = result["cases"][case]
            assert (found["bitwise"], found["state_bitwise"], found["ranks_agree"]) == (True, True, True), case
    payload = [sum(step) / ranks for step in zip(*(result["payload"] for result in results), strict=True)]
    assert payload == results[0]["forecast"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_prediction_counts_what_a_ring_sends(case: str, ranks: int) -> None:
    """A dry run on one rank, with messages made up, asks for the bytes that real ranks send."""
    plan = plan_for(case, "layer", feedback=False, steady=True)
    sent = lockstep(plan, ranks, 1, lambda rank, step: gradients(SHAPES, rank, step))[0]
    for group in plan.groups:
        for rank in range(ranks):
            turns = DryRuns(plan, ranks, rank, repeats=1).group(group).turns
            predicted = [transfer for turn in turns for transfer in transfers(turn.requests, rank, ranks)]
            assert sum(transfer.wire_bytes for transfer in predicted) == sent[group.name][rank].wire_bytes
            assert {transfer.rounds for transfer in predicted} <= {0, 2 * (ranks - 1)}
