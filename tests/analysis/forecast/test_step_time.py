"""Predicted step times: bytes are those that real executors count, times obey their laws, and bad input is one line."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.calibration import Observation, calibrate_link, read_observations
from gradlab.analysis.forecast.dry_run import DryRuns, _dry_run, _part_of, _times, dry_run, scan_seconds_per_byte
from gradlab.analysis.forecast.link import (
    Link,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    parse_bandwidth,
    parse_seconds,
    request_bytes,
    transfers,
)
from gradlab.analysis.forecast.network import CodecTime, Profile, profile_of
from gradlab.analysis.forecast.simulator import SHARDS, Bucket, Exchange, Node, Turn, Within, simulate
from gradlab.analysis.forecast.step_time import (
    FLAT,
    FSDP,
    HIERARCHICAL,
    HSDP,
    Gathers,
    Job,
    assign_buckets,
    break_even,
    compare,
    cut_for_shards,
    make_job,
    ready_seconds,
    traffic_inside,
)
from gradlab.artifact import Artifact
from gradlab.codec import Batch, exchange_group
from gradlab.codec.kept import running_state
from gradlab.codec.wrapper import innermost
from gradlab.collectives import (
    AllToAll,
    Broadcast,
    Gather,
    Mean,
    Request,
    all_gather_wire_bytes,
    all_reduce_wire_bytes,
    run_lockstep,
    wire_bytes,
)
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Plan, Wrap
from gradlab.segments import segments
from support.command_line import Command
from support.contract import plan_for, sizes_vary
from support.laws import law, thorough
from support.process_pool import ProcessPool

# Of those whose messages vary with the gradient, a run on random numbers tells an estimate.
COMPRESSORS = [name for name in codecs.names() if name != "identity" and not sizes_vary(name)]
KINDS = ["cast", "clt_k", "gradiveq", "powersgd", "qsgd", "random_k", "sign", "topk"]  # of exchanges
LAYERS = (
    Layer("stem.weight", (16, 3, 3, 3), "convolution"),
    Layer("body.weight", (64, 16, 3, 3), "convolution"),
    Layer("body.bias", (64,), "bias"),
    Layer("head.weight", (100, 1024), "linear"),
)


# --- units -----------------------------------------------------------------------------------------------------------


def test_units_as_the_field_writes_them() -> None:
    bandwidths = {
        "200mbit": 2e8,
        "1gbit": 1e9,
        "25 Gbit/s": 2.5e10,
        "2.5gbps": 2.5e9,
        "9600bit": 9600.0,
        "64kbit": 64e3,
    }
    for text, expected in {**bandwidths, "1tbit": 1e12, "unlimited": math.inf}.items():
        assert parse_bandwidth(text) == expected
    durations = {"50us": 5e-5, "1.5ms": 1.5e-3, "0.36s": 0.36, "2": 2.0, "1e-3": 1e-3, "7ns": 7e-9}
    for text, expected in durations.items():
        assert parse_seconds(text) == pytest.approx(expected)


def test_other_units_are_refused_by_name() -> None:
    for text in ("1 furlong", "", "gbit", "-1gbit", "0mbit", "1GiB", "1e9", "1gbit,2gbit", "nanbit"):
        with pytest.raises(GradlabError, match="expected bits per second above 0, such as 200mbit"):
            parse_bandwidth(text)
    for text in ("-1ms", "fast", "1day", "", "1e999s"):
        with pytest.raises(GradlabError, match="duration"):
            parse_seconds(text)


@law(st.lists(st.integers(0, 1000), min_size=1, max_size=5), st.integers(1, 9))
def test_each_varying_gather_tells_a_length(lengths: list[int], world_size: int) -> None:
    """Together they take two collectives, and no fewer bytes than each alone."""
    requests: list[Request] = [Gather(torch.empty(length), varying=True) for length in lengths]
    alone = sum(wire_bytes(request, 0, world_size) for request in requests)
    assert sum(transfer.wire_bytes for transfer in transfers(requests, 0, world_size)) == alone


REFUSED: list[tuple[Callable[[], object], str]] = [
    # A link cannot be faster than light.
    *(
        (partial(Link, 1e9, **{setting: value}), setting)
        for setting in ("latency_seconds", "header_share", "host_seconds_per_byte", "collective_seconds")
        for value in (-1.0, math.nan, math.inf)
    ),
    (lambda: Link(8.0, gather_factor=0.0), "gather_factor = 0, expected a number above 0"),
    (lambda: simulate([], -1.0, Link(1e9), 2), "compute time = -1"),
    (lambda: simulate([], math.nan, Link(1e9), 2), "compute time = nan"),
    (lambda: simulate([], 1.0, Link(1e9), 0), "nodes = 0"),
    (lambda: simulate([], 1.0, Link(1e9), 2, speed=2.0), "speed of computing beside codecs = 2"),
    (lambda: Network([Link(1e9)], [0]), "nodes = 0"),
    (lambda: Network([Link(1e9)], [10**6]), "nodes"),
    (lambda: Network([Link(1e9)], [2], cores=0.0), "cores"),
    (lambda: Network([Link(1e9)], []), "nothing"),
    (
        lambda: forecast(Plan.uniform(LAYERS, "identity"), Network([Link(1e9)], [2], Profile(1.0, "as given"))),
        "compresses nothing",
    ),
    (lambda: calibrate_link(Link(1e9), []), "no all-reduce to calibrate a link by"),
    (lambda: calibrate_link(Link(1e9), [Observation(2, 1, 1e9, 1.0, "all-gather")]), "no all-reduce to calibrate"),
    (lambda: calibrate_link(Link(1e9), [Observation(2, 1, 1e9, 1e-320)]), "out of all proportion"),
    (lambda: Observation(2, 1, 1e9, 1.0, "broadcast"), "collective = 'broadcast', expected all-reduce or all-gather"),
]


def test_what_cannot_be_is_refused() -> None:
    for call, message in REFUSED:
        with pytest.raises(GradlabError, match=message):
            call()


# --- collectives -----------------------------------------------------------------------------------------------------


@law(st.integers(0, 10**9), st.integers(1, 4096))
def test_transfers_send_what_the_byte_rules_say(nbytes: int, world_size: int) -> None:
    assert all_reduce(nbytes, world_size).wire_bytes == all_reduce_wire_bytes(nbytes, world_size)
    assert all_gather(nbytes, world_size).wire_bytes == all_gather_wire_bytes(nbytes, world_size)
    # Over all ranks of a tree everybody but the root receives it once.
    if world_size <= 64:
        sent = [broadcast(nbytes, rank, 0, world_size) for rank in range(world_size)]
        assert sum(transfer.wire_bytes for transfer in sent) == (world_size - 1) * nbytes
        assert max(transfer.wire_bytes for transfer in sent) == sent[0].path_bytes


def test_a_server_that_all_send_to_is_the_busiest_link() -> None:
    """Seven ranks send 1000 bytes to rank 0: each sends 1000, but rank 0's link carries 7000."""
    transfer = all_to_all([1000, 0, 0, 0, 0, 0, 0, 0], rank=3)
    assert (transfer.wire_bytes, transfer.path_bytes, transfer.rounds) == (1000, 7000, 1)
    assert all_to_all([10], rank=0) == Transfer(0, 0, 0, gathered=True)


@law(st.lists(st.integers(0, 9), min_size=1, max_size=12), examples=60)
def test_parts_of_any_sizes_against_a_list_of_all_messages(sizes: list[int]) -> None:
    ranks = range(len(sizes))
    nothing = [0 for _ in ranks]
    for form, nbytes in (((sizes, nothing), lambda _, j: sizes[j]), ((nothing, sizes), lambda i, _: sizes[i])):
        sent = [sum(nbytes(i, j) for j in ranks if i != j) for i in ranks]
        received = [sum(nbytes(i, j) for i in ranks if i != j) for j in ranks]
        described = [all_to_all(form[0], rank, form[1]) for rank in ranks]
        assert [one.wire_bytes for one in described] == sent
        assert {one.path_bytes for one in described} == {max(*sent, *received)}


@law(st.integers(2, 4096), st.sampled_from((1e-6, 5e-5, 1e-3)))
def test_messages_of_an_all_to_all_leave_one_after_another(ranks: int, latency: float) -> None:
    """All but the first cost their sender 50 us each, or a latency if that is less, so that an all-to-all of nothing
    but latency takes no longer than the ring that it replaces."""
    link, empty = Link(1e12, latency, header_share=0.0), all_to_all([0] * ranks, rank=0)
    assert link.busy_seconds(empty) == 0
    transfer = all_to_all([1] * ranks, rank=0)
    assert transfer.queued == all_to_all([0] * ranks, 0, [1] * ranks).queued == ranks - 2
    seconds = link.busy_seconds(transfer) - transfer.path_bytes * link.seconds_per_byte
    assert seconds == pytest.approx((ranks - 2) * min(latency, 50e-6), abs=1e-12)
    assert seconds + link.delay_seconds(transfer) <= link.delay_seconds(all_gather(1, ranks)) + 1e-12


def test_requests_of_a_kind_travel_as_one() -> None:
    half = torch.empty(6, dtype=torch.float16)
    requests: list[Request] = [Mean(torch.empty(5)), Gather(half), Mean(torch.empty(7)), Mean(half), Gather(half)]
    requests += [Broadcast(half, 1), AllToAll((half, half, half)), Gather(half, varying=True)]
    joined = transfers(requests, rank=0, world_size=3)
    assert joined[:3] == [all_reduce(48, 3), all_gather(24, 3), all_reduce(12, 3)]
    assert joined[3:5] == [broadcast(12, 0, 1, 3), all_to_all([12, 12, 12], 0)]
    assert joined[5].wire_bytes == wire_bytes(requests[-1], 0, 3, [12, 12, 12])
    assert transfers([Mean(torch.empty(0))], 0, 3) == []


def test_the_slower_of_link_and_processors_sets_the_pace() -> None:
    for rate, expected in ((8e6, 1e-6), (8e8, 2e-7), (math.inf, 2e-7)):
        link = Link(rate, header_share=0.0, host_seconds_per_byte=2e-7, collective_seconds=0.5)
        assert link.busy_seconds(Transfer(0, 1000, 5)) == pytest.approx(0.5 + 1000 * expected)


# --- what codecs ask for ---------------------------------------------------------------------------------------------


def require_same_bytes(plan: Plan, world_size: int) -> None:
    """One coroutine with fabricated answers asks, byte for byte, for what each of N real ones in lockstep sends."""
    total = 0
    for rank in range(world_size):
        runs = DryRuns(plan, world_size, rank, repeats=1)
        for group in plan.compressed_groups:
            context = runs.context(group.name)
            generator = torch.Generator().manual_seed(plan.seed)
            grads = {layer.name: 1e-3 * torch.randn(layer.shape, generator=generator) for layer in plan.members(group)}
            codec = plan.build(group)
            state = running_state(innermost(codec), plan.members(group), world_size)
            coroutines = [
                exchange_group(codec, Batch.of(grads, plan.members(group)), state, replace(context, rank=r))
                for r in range(world_size)
            ]
            counted = run_lockstep(coroutines)[rank].wire_bytes
            asked = [request for turn in runs.group(group).turns for request in turn.requests]
            assert sum(wire_bytes(request, rank, world_size) for request in asked) == counted
            total += counted
    assert total > 0


@pytest.mark.parametrize(
    ("codec", "grouping"),
    [  # of KINDS, the engine itself is asked below
        (thorough if codec in KINDS else pytest.param)(codec, grouping)
        for codec, grouping in zip(COMPRESSORS, itertools.cycle(["layer", "model"]))
    ],
)
def test_dry_run_asks_for_what_lockstep_counts(codec: str, grouping: str) -> None:
    require_same_bytes(plan_for(codec, grouping, feedback=True, steady=True), 3)


@pytest.mark.parametrize("codec", [*(name for name in COMPRESSORS if not codecs.get(name).about.learns), "dion"])
def test_a_part_stands_for_a_large_group(codec: str) -> None:
    shapes = {"w": (4096, 75), "v": (4096, 66), "b": (70,)}
    layers = [Layer(name, shape, "linear") for name, shape in shapes.items()]
    how: Any = {"codec": "identity", "wrappers": [Wrap("dion")]} if codec == "dion" else {"codec": codec}
    plan = Plan.uniform(layers, **how)
    for group in plan.compressed_groups:
        layers, context = plan.members(group), DryRuns(plan, 3).context(group.name)
        whole, part = (dry_run(plan.build(group), layers, context, repeats=2, most=most) for most in (2**25, 2**18))
        assert part.gradient_bytes == pytest.approx(whole.gradient_bytes, rel=1e-6)
        sent = [
            [sum(transfer.wire_bytes for transfer in transfers(turn.requests, 0, 3)) for turn in one.turns]
            for one in (whole, part)
        ]
        assert sent[1] == pytest.approx(sent[0], rel=0.06, abs=32)


@example(6145, 1, 0.9999)
@law(st.integers(1, 20_000), st.integers(1, 600), st.floats(1e-4, 0.9999))
def test_a_part_of_a_layer_is_no_larger_than_the_layer(rows: int, columns: int, share: float) -> None:
    layer = Layer("w", (rows, columns), "linear")
    [part] = _part_of([layer], max(1, int(share * layer.numel)))
    assert 1 <= part.shape[0] <= rows
    assert part.shape[1:] == layer.shape[1:]


@pytest.mark.parametrize("codec", COMPRESSORS)
@pytest.mark.parametrize("shape", [(30, 30), (1, 80)])
def test_dry_run_stands_for_ranks_whose_shards_differ(codec: str, shape: tuple[int, int]) -> None:
    """A rank's own message is no answer of a longer shard's."""
    plan = Plan.uniform([Layer("w", shape, "linear")], codec, minimum_numel=1)
    sent = [wire_bytes(r, 0, 37) for t in DryRuns(plan, 37, repeats=1).group(plan.groups[0]).turns for r in t.requests]
    assert sum(sent) > 0


@pytest.mark.parametrize(
    ("wrapper", "world_size"),
    [(Wrap("two_way"), 3), (Wrap("two_way", {"server": "rank"}), 2), (Wrap("momentum_correction"), 3)],
)
def test_dry_run_sees_through_wrappers(wrapper: Wrap, world_size: int) -> None:
    """AllToAll and Broadcast too, where ranks play different parts."""
    wrappers = [wrapper]
    require_same_bytes(Plan.uniform(LAYERS, "chunk_topk", wrappers=wrappers), world_size)


@pytest.mark.parametrize(
    ("codec", "ranks", "grouping", "bucket_cap_mb"),
    [
        (codec, 2 + number % 2, *[("layer", None), ("layer", 0.01), ("model", 0.01)][number % 3])
        for number, codec in enumerate(KINDS)
    ],
)
def test_simulated_bytes_are_those_of_the_engine(
    pool: ProcessPool, codec: str, grouping: str, bucket_cap_mb: float | None, ranks: int
) -> None:
    """Fused, over DDP's own buckets, with the dense layers and the flag: to the byte, on every rank."""
    counted = pool.run(
        "jobs.predict_task:counted_wire_bytes", ranks, codec=codec, grouping=grouping, bucket_cap_mb=bucket_cap_mb
    )
    plan = plan_for(codec, grouping, feedback=True, steady=True)
    simulated = []
    for rank in range(ranks):
        job = make_job(plan, DryRuns(plan, ranks, rank, repeats=1), 1.0, bucket_cap_mb=bucket_cap_mb)
        simulated.append(simulate(job.buckets, 1.0, Link(1e9), ranks, rank=rank).wire_bytes)
    sent = [rank[-1] for rank in counted]
    if codec == "clt_k":  # another rank leads in another iteration
        simulated, sent = sorted(simulated), sorted(sent)
    assert simulated == sent


@pytest.mark.parametrize(("ranks", "bits"), [(3, 0.25), (16, 4.0), thorough(64, 0.25)])
def test_one_rank_stands_for_others_whose_shards_differ_by_an_element(ranks: int, bits: float) -> None:
    """Its message is decoded as every other's."""
    layers = [Layer("a", (31, 33), "linear"), Layer("b", (17, 19), "linear")]
    plan = Plan.uniform(layers, "ecsq", bits=bits, wrappers=[*FEEDBACK, Wrap("two_way")], minimum_numel=0)
    done = DryRuns(plan, ranks, repeats=1).group(plan.groups[0])
    assert sum(request.tensor.nbytes for request in done.turns[-2].requests if isinstance(request, Gather)) > 0


def test_dry_run_at_many_nodes_takes_one_coroutine() -> None:
    plan = Plan.uniform(LAYERS, "topk", density=0.01, wrappers=FEEDBACK)
    few, many = (
        make_job(plan, DryRuns(plan, count, repeats=1), 1.0).buckets[0].exchanges[-1].turns[0].requests
        for count in (2, 512)
    )
    assert [request.tensor.shape for request in few] == [request.tensor.shape for request in many]  # type: ignore[union-attr]
    assert all_gather(800, 512).wire_bytes == 511 * 800


def test_every_gradient_is_looked_at_before_and_after() -> None:
    """As the engine does, for values that are not finite; plain DDP looks at none."""
    plan = Plan.uniform(LAYERS, "topk", density=0.01)
    job = make_job(plan, DryRuns(plan, 4, repeats=1), 1.0, scan_seconds=1e-9)
    nbytes = 4 * sum(layer.numel for layer in LAYERS)
    assert sum(bucket.scan_seconds for bucket in job.buckets) == pytest.approx(2e-9 * nbytes)
    assert sum(bucket.scan_seconds for bucket in job.dense_buckets) == 0.0


def test_alike_groups_are_run_once() -> None:
    """40 layers of one shape take one dry run: their exchanges share their turns."""
    layers = tuple(Layer(f"block{i}.weight", (32, 32), "linear") for i in range(40))
    plan = Plan.uniform(layers, "powersgd", rank=2, group_bytes=0)
    runs = DryRuns(plan, 4, repeats=1)
    exchanges = [runs.group(group) for group in plan.compressed_groups]
    assert len({id(exchange.turns) for exchange in exchanges}) == 1
    assert [exchange.name for exchange in exchanges] == [layer.name for layer in layers]


def test_a_part_of_many_layers_has_one_of_each_shape() -> None:
    """Single rows of 400 layers would be 204,800 values. The message is that of all layers, within 5 %."""
    layers = tuple(Layer(f"blocks.{i}.w", (64, 512) if i % 2 else (32, 512), "linear") for i in range(400))
    assert [one.shape for one in _part_of(layers, 2**15, by_shape=True)] == [(21, 512), (43, 512)]
    assert len(_part_of(layers, 2**15)) == len(layers)
    plan = Plan.uniform(layers, "ecsq", bits=0.5, group_bytes=2**30)
    (group,) = plan.compressed_groups
    context = DryRuns(plan, 4).context(group.name)
    whole, part = (dry_run(plan.build(group), layers, context, repeats=1, most=most) for most in (2**25, 2**16))
    sizes = [sum(request_bytes(one) for turn in run.turns for one in turn.requests) for run in (whole, part)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


@pytest.mark.parametrize(("codec", "columns"), [("block_scaled", 1536), ("one_bit", 1024)])
def test_unlike_layers_with_equal_parts_are_run_once(codec: str, columns: int) -> None:
    """A part stands for both of two layers, one of more values. To a codec that sees shapes they need equal rows."""
    layers = tuple(Layer(f"w{rows}", (rows, wide), "linear") for rows, wide in ((2**13, 1024), (2**14, columns)))
    plan = Plan.uniform(layers, codec, group_bytes=0)
    runs = DryRuns(plan, 4, repeats=1)
    small, large = (runs.group(group) for group in plan.compressed_groups)
    assert large.codec_seconds == pytest.approx(columns / 512 * small.codec_seconds)


@pytest.mark.parametrize(("rows", "run"), [(2**15, [(2048, 4096)]), (2**17, [(2**22,), (2**21,)])])
def test_groups_of_very_large_models_are_run_on_parts(rows: int, run: list[tuple[int, ...]]) -> None:
    layers = (Layer("w", (2048, 4096), "linear"), Layer("head", (rows, 2**15), "linear"))
    plan = Plan.uniform(layers, "block_scaled", group_bytes=0)
    with mock.patch("gradlab.analysis.forecast.dry_run._dry_run", wraps=_dry_run) as ran:
        DryRuns(plan, 2, repeats=2).group(plan.compressed_groups[0])
    assert [call.args[1][0].shape for call in ran.call_args_list] == run


@pytest.mark.parametrize("codec", ["block_scaled", "powersgd"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_layers_that_cannot_be_cut_stand_for_themselves(codec: str, repeats: int) -> None:
    """A single row, and layers too small for it: no part of them is smaller."""
    layers = [Layer("row", (1, 2**13), "linear"), *(Layer(f"w{n}", (32, 32), "linear") for n in range(8))]
    plan = Plan.uniform(layers, codec, minimum_numel=1)
    for group in plan.compressed_groups:
        members, context = plan.members(group), DryRuns(plan, 3).context(group.name)
        done = dry_run(plan.build(group), members, context, repeats=repeats, most=512)
        assert done.gradient_bytes == 4 * sum(layer.numel for layer in members)


@law(st.floats(0, 1), st.floats(0, 1), st.floats(1, 1000))
def test_seconds_of_a_large_group_are_on_a_line_through_those_of_two_parts(
    fixed: float, each: float, times: float
) -> None:
    """Fixed costs of an exchange count once. Noise makes it no slower than the values are more."""

    def of(values: float, noise: float = 0.0) -> Exchange:
        seconds = fixed + each * values + noise
        return Exchange("group", round(4000 * values), (Turn(seconds, (), seconds),), seconds)

    found = _times(of(1.0), of(0.25), times, grows=True)
    expected = fixed + each * times
    assert (found.codec_seconds, found.turns[0].copy_seconds) == pytest.approx((expected, expected))
    assert found.apply_seconds == pytest.approx(expected)
    assert found.gradient_bytes == pytest.approx(4000 * times, abs=1)
    assert _times(of(1.0), of(0.25, -9.0), times, grows=True).codec_seconds == pytest.approx(times * (fixed + each))
    assert _times(of(1.0), of(0.25, 9.0), times, grows=True).codec_seconds == pytest.approx(fixed + each)


def test_dry_run_times_every_turn() -> None:
    plan = Plan.uniform(LAYERS, "powersgd", rank=2)
    group = plan.compressed_groups[0]
    timed = dry_run(plan.build(group), plan.members(group), DryRuns(plan, 4).context(group.name), repeats=2)
    assert len(timed.turns) == 3
    assert all(turn.seconds > 0 for turn in timed.turns)
    assert timed.apply_seconds > 0
    assert scan_seconds_per_byte() > 0


# --- buckets ---------------------------------------------------------------------------------------------------------


# Some of them reach a limit exactly: 2^18 elements are 1 MiB.
sizes_of_layers = st.integers(1, 400_000) | st.sampled_from([2**16, 2**17, 2**18])


@law(st.lists(sizes_of_layers, min_size=1, max_size=40), st.sampled_from([None, 0.1, 0.5, 1.0, 25.0]))
@example([5, 2**18], None)
@example([5, 2**17], 0.5)
def test_buckets_are_those_of_ddp(sizes: list[int], cap: float | None) -> None:
    """Against torch's own assignment, in the order in which backward meets layers."""
    layers = [Layer(f"p{i}", (size,)) for i, size in enumerate(sizes)]
    tensors = [torch.empty(size) for size in reversed(sizes)]
    limits = [2**20, 25 * 2**20] if cap is None else [int(cap * 2**20)]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    buckets = assign_buckets(layers, cap)
    assert [[len(sizes) - 1 - i for i in bucket] for bucket in expected] == [
        [int(layer.name[1:]) for layer in bucket] for bucket in buckets
    ]


def test_backward_hands_over_buckets_in_order_and_ends_with_the_last() -> None:
    moments = ready_seconds([[layer] for layer in reversed(LAYERS)], 3.0)
    assert moments == pytest.approx([1.0 + 2 / 3, 1.0 + 2 / 3, 1.0 + 4 / 3, 3.0])
    assert ready_seconds([[Layer("bias", (3,))]], 3.0) == [3.0]


# --- the simulation --------------------------------------------------------------------------------------------------


def mean_of(elements: int) -> tuple[Request, ...]:
    return (Mean(torch.empty(elements, device="meta")),)


def test_plain_ddp_by_hand() -> None:
    """Two buckets, ready at 1 and 2 s; each keeps a link of 8 kbit/s busy for 3 s: 1 + 3 + 3 = 7 s."""
    link = Link(8e3, header_share=0.0)
    step = simulate([Bucket(1.0, 3000), Bucket(2.0, 3000)], 2.0, link, 2)
    assert (step.seconds, step.compute, step.encode, step.communicate) == pytest.approx((7.0, 2.0, 0.0, 5.0))
    assert step.wire_bytes == 6000


def test_latencies_overlap_but_bytes_wait() -> None:
    """The second collective's bytes follow the first's; each is through two latencies after its last byte."""
    link = Link(8e3, latency_seconds=0.5, header_share=0.0)
    assert simulate([Bucket(1.0, 3000), Bucket(2.0, 3000)], 2.0, link, 2).seconds == pytest.approx(8.0)


def test_two_ticks_by_hand() -> None:
    """Backward ends at 2 s. Encode 1 s, 4000 bytes at 1000 B/s with the flag's tick behind it, decode 2 s.

    2 + 1 = 3: issued; the flag's tick waits for it until 7, decodes until 9, and sends its own 4 bytes: 9.004.
    """
    exchange = Exchange("g", 100, (Turn(1.0, mean_of(1000)), Turn(2.0)))
    link = Link(8e3, header_share=0.0)
    step = simulate([Bucket(2.0, exchanges=(exchange,))], 2.0, link, 2)
    assert step.seconds == pytest.approx(9.004)
    assert (step.encode, step.communicate) == pytest.approx((3.0, 4.004))
    assert step.wire_bytes == 4004


def test_encoding_hides_the_network() -> None:
    """Two segments: the second is encoded while the first travels."""
    exchanges = tuple(Exchange(f"g{i}", 100, (Turn(1.0, mean_of(250)), Turn(0.0))) for i in range(2))
    link = Link(8e3, header_share=0.0)
    bucket = Bucket(0.0, exchanges=exchanges)
    # 1: first issued (1 s on the wire); 2: second issued; 3: through; the flag behind it.
    assert simulate([bucket], 0.0, link, 2, segment_bytes=100).seconds == pytest.approx(3.004)
    # Both in one segment: 2 s of encoding, then 2 s of network.
    assert simulate([bucket], 0.0, link, 2, segment_bytes=200).seconds == pytest.approx(4.004)


def test_codecs_hide_behind_backward_only_with_a_core_of_their_own() -> None:
    exchange = Exchange("g", 100, (Turn(1.0, mean_of(1)), Turn(0.0)))
    buckets = [Bucket(1.0, exchanges=(exchange,)), Bucket(4.0, 8)]
    fast = Link(math.inf)
    assert simulate(buckets, 4.0, fast, 2).seconds == pytest.approx(4.0)
    shared = simulate(buckets, 4.0, fast, 2, speed=0.5)
    assert (shared.seconds, shared.encode) == pytest.approx((5.0, 1.0))


def test_serving_the_network_holds_up_computing_where_no_core_is_left() -> None:
    """100 bytes at 10 ms each are a second of the processors' time while two more seconds are computed."""
    buckets = [Bucket(1.0, 100), Bucket(3.0, 8)]
    link = Link(math.inf, header_share=0.0, host_seconds_per_byte=1e-2)
    alone, shared = (simulate(buckets, 3.0, link, 2, speed=speed).seconds for speed in (1.0, 0.5))
    assert (alone, shared) == pytest.approx((3.08, 4.08))


NODE = Node(2, Link(1.6e4, header_share=0.0))


def test_nodes_of_two_ranks_by_hand() -> None:
    """4000 bytes, ready at 1 s of 1; half of them takes 1 s at 2000 B/s inside, an average of 2 nodes 4 s between them.

    Hierarchical: 1 + 1 + 4 + 1. HSDP: 1, parameters gathered and gradients scattered 2, 4, and of the forward pass'
    gathering 1 s beside a third of a second; where nothing overlaps 1 + 2 * 1 + 1 + 4. A ring of 4 ranks: 1 + 6.
    """
    buckets = (Bucket(1.0, 4000),)
    pair = compare(Job(2, 1.0, buckets, buckets), Link(8e3, header_share=0.0), node=NODE)
    assert {name: step.seconds for name, step in pair.ways.items()} == pytest.approx(
        {HIERARCHICAL: 7.0, HSDP: 7.0 + 2 / 3, FLAT: 7.0}
    )
    assert {name: step.wire_bytes for name, step in pair.ways.items()} == {HIERARCHICAL: 4000, HSDP: 4000, FLAT: 6000}
    assert pair.dense.seconds == 7.0
    apart = compare(Job(2, 1.0, buckets, buckets, overlaps=False), Link(8e3, header_share=0.0), node=NODE)
    assert (apart.ways[HSDP].seconds, apart.ways[HSDP].wire_bytes) == (8.0, 4000)
    on_shards = replace(NODE, plans=SHARDS)
    assert [Network(node=on_shards, gpu=gpu).overlaps for gpu in (True, False)] == [True, False]
    assert Network(node=NODE).overlaps


def test_a_step_on_shards_by_hand() -> None:
    """Backward waits 1 s for the unit's reduce-scatter and 4 s for its exchange, at half the link for each rank.

    Gathers take 1 s twice, beside 1 s of computing.
    """
    buckets, shards = (Bucket(1.0, 4000),), (Bucket(1.0, 2000),)
    pair = compare(Job(2, 1.0, buckets, buckets, shards), Link(8e3, header_share=0.0), node=replace(NODE, plans=SHARDS))
    assert pair.compressed.seconds == pytest.approx(1 + 1 + 4 + 1)
    assert (pair.compressed.encode, pair.compressed.wire_bytes) == (0.0, 4000)
    # Gathers in a quarter of the bytes take a quarter of the time, none of it beside computing, and codecs 0.1 s each.
    quantized = Job(2, 1.0, buckets, buckets, shards, Gathers(0.25, 0.1))
    quick = compare(quantized, Link(8e3, header_share=0.0), node=replace(NODE, plans=SHARDS))
    assert quick.compressed.seconds == pytest.approx(1 + 1 + 4 + 2 * 0.25 + 2 * 0.1)


def test_a_step_whose_shards_lie_on_all_ranks_by_hand() -> None:
    """Gathers take 3 s twice, a reduce-scatter 3 s, or 6 s in Gloo. What is in 32 bits travels beside 2 s of computing,
    quantized messages do not."""
    buckets, link = (Bucket(2.0, 4000),), Link(8e3, header_share=0.0)

    def seconds(link: Link, *quantized: Gathers) -> tuple[float, float, float]:
        job = Job(4, 2.0, buckets, buckets, None, *([None] if len(quantized) == 1 else []), *quantized)
        pair = compare(job, link)
        assert (pair.dense_way, pair.dense.wire_bytes) == (FSDP, 9000)
        return pair.dense.seconds, pair.half.seconds, pair.compressed.seconds

    eighth, quarter = Gathers(0.125, 0.1), Gathers(0.25, 0.2)
    assert seconds(link, eighth) == pytest.approx((9.0, 4.5, 2 + 0.375 + (6 - 2) + 0.1))
    assert seconds(link, quarter, eighth) == pytest.approx((9.0, 4.5, 2 + 0.375 + 2 * 0.75 + 0.1 + 2 * 0.2))
    gloo = replace(link, scatter_factor=2.0, gather_factor=1.5)
    assert seconds(gloo, eighth) == pytest.approx((6 + 9, 7.5, 2 + 1.5 * 0.375 + (9 - 2) + 0.1))
    apart = compare(Job(4, 2.0, buckets, buckets, reduced=eighth, overlaps=False), link)
    assert apart.dense.seconds == pytest.approx(2 + 9)


@law(st.integers(2, 5), st.sampled_from([None, 0.01]), examples=20)
def test_shards_of_all_ranks_hold_the_model(local_ranks: int, bucket_cap_mb: float | None) -> None:
    plan = Plan.uniform(LAYERS, "block_scaled", dtype="int8")
    cut, units = cut_for_shards(plan, local_ranks, bucket_cap_mb)
    assert [[layer.name for layer in unit] for unit in units] == [
        [layer.name for layer in bucket] for bucket in assign_buckets(LAYERS, bucket_cap_mb)
    ]
    of_unit = {layer.name: index for index, unit in enumerate(units) for layer in unit}
    assert all(len({of_unit[name] for name in group.layers}) == 1 for group in cut.groups)
    for whole, shard in zip(LAYERS, cut.layers, strict=True):
        assert shard.shape[1:] == whole.shape[1:]
        assert whole.shape[0] <= local_ranks * shard.shape[0] < whole.shape[0] + local_ranks


def test_a_bucket_is_averaged_inside_while_another_travels() -> None:
    """Inside until 1.75 and 2.75 s; 3 s each between nodes, one after the other; the last is spread."""
    buckets = [Bucket(1.0, 3000), Bucket(2.0, 3000)]
    step = simulate(buckets, 2.0, Link(8e3, header_share=0.0), 2, within=Within(NODE))
    assert step.seconds == pytest.approx(1.75 + 3.0 + 3.0 + 0.75)
    slow = Node(2, replace(NODE.inside, gather_factor=3.0))  # what is spread is gathered
    step = simulate(buckets, 2.0, Link(8e3, header_share=0.0), 2, within=Within(slow))
    assert step.seconds == pytest.approx(1.75 + 3.0 + 3.0 + 3 * 0.75)


@law(st.integers(2, 8), st.floats(6, 10), examples=20)
def test_a_free_inside_costs_nothing(job: Job, local_ranks: int, power: float) -> None:
    """Then hierarchical averaging is plain DDP with a rank per node, and a plan takes no longer than with one."""
    link = Link(10.0**power, 1e-4)
    alone, nodes = compare(job, link), compare(job, link, node=Node(local_ranks, Link(math.inf)))
    assert nodes.ways[HIERARCHICAL].seconds == pytest.approx(alone.dense.seconds)
    assert nodes.ways[HSDP].seconds == pytest.approx(alone.dense.seconds)
    assert nodes.ways[FLAT].wire_bytes > nodes.ways[HIERARCHICAL].wire_bytes == alone.dense.wire_bytes
    assert nodes.compressed.seconds <= alone.compressed.seconds * (1 + 1e-9)
    assert nodes.compressed.wire_bytes == alone.compressed.wire_bytes
    assert nodes.dense.seconds == min(step.seconds for step in nodes.ways.values())


def test_nodes_are_forecast_by_the_command(gradlab: Command, tmp_path: Path) -> None:
    artifact = tmp_path / "plan.safetensors"
    Artifact(Plan.uniform(LAYERS, "block_scaled", aggregation="gather"), {}).save(artifact)
    common = ("predict", artifact, "--nodes", "2", "--compute-seconds", "10ms", "--bandwidth", "100mbit")
    one = json.loads(gradlab(*common, "--json")[1])
    of_two = json.loads(gradlab(*common, "--nodes", "2x2", "--inside", "400gbit", "--json")[1])
    link = of_two["nodes"][0]["links"][0]
    assert set(link["ways"]) == {FLAT, HIERARCHICAL, HSDP}
    assert link["dense"] == link["ways"][link["dense_way"]]
    assert link["ways"][HIERARCHICAL]["wire_bytes"] == one["nodes"][0]["links"][0]["dense"]["wire_bytes"]
    assert any("Nodes of 2 ranks" in remark for remark in of_two["warnings"])
    on_shards = json.loads(gradlab(*common, "--nodes", "2x2", "--inside", "400gbit", "--fsdp", "--json")[1])
    step = on_shards["nodes"][0]["links"][0]
    for way in (FLAT, HIERARCHICAL):
        assert step["ways"][way] == link["ways"][way]
    assert step["ways"][HSDP]["seconds"] > link["ways"][HSDP]["seconds"]
    assert any("do not travel beside computing on a CPU" in remark for remark in on_shards["warnings"])
    # The same bytes but for scales of more blocks.
    assert 1 <= step["compressed"]["wire_bytes"] / link["compressed"]["wire_bytes"] < 1.1
    assert any("on FSDP2's shards" in remark for remark in on_shards["warnings"])
    told = gradlab(*common, "--nodes", "2x2", "--inside", "1mbit", "--fsdp", "--parameters", "int8")[1]
    assert "gathers of parameters inside nodes (int8) " in told
    assert told.rstrip().endswith("most time goes to gradients inside nodes")
    told = gradlab(*common, "--nodes", "4", "--fsdp")[1]
    assert ", FSDP2 (" in told
    assert told.rstrip().endswith("most time goes to gathers of parameters (32 bits)")
    Artifact(Plan(LAYERS), {}).save(tmp_path / "dense.safetensors")
    told = gradlab(
        "predict", tmp_path / "dense.safetensors", *common[2:], "--nodes", "4", "--fsdp", "--parameters", "int8"
    )[1]
    assert "most time goes to gradients" in told


def test_codecs_take_longer_where_ranks_share_a_core() -> None:
    alone = Profile(0.2, "as given")
    in_run = Profile(0.2, "as given", CodecTime(0.05, 2, True, "a run"))
    assert [Network(profile=alone, cores=cores).crowding for cores in (0.25, 0.5, 1.0, 2.0)] == [4.0, 2.0, 1.0, 1.0]
    assert [Network(profile=in_run, cores=cores).crowding for cores in (0.25, 2.0)] == [1.0, 1.0]


def test_segments_hold_at_least_one_exchange() -> None:
    exchanges = [Exchange(str(size), size, (Turn(0.0),)) for size in (5, 20, 4, 6, 1)]
    cut = segments(exchanges, lambda exchange: exchange.gradient_bytes, 10)
    assert [[e.gradient_bytes for e in segment] for segment in cut] == [[5], [20], [4, 6], [1]]


times = st.floats(0.0, 2.0)
sizes = st.integers(1, 50_000)


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    asks = [Mean, Gather]
    turns = [
        Turn(draw(times), (draw(st.sampled_from(asks))(torch.empty(draw(sizes), device="meta")),))
        for _ in range(draw(st.integers(0, 3)))
    ]
    return Exchange("g", draw(sizes), (*turns, Turn(draw(times))), draw(times))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Bucket], float]:
    """Buckets, some compressed, and the computing time at which the last is ready."""
    moments = sorted(draw(st.lists(times, min_size=1, max_size=4)))
    buckets = [
        Bucket(moment, draw(sizes), draw(times), tuple(draw(st.lists(exchanges(), max_size=3)))) for moment in moments
    ]
    return buckets, moments[-1]


links = st.builds(Link, st.floats(1e4, 1e9), st.floats(0, 0.1), st.floats(0, 0.2))
worlds = st.integers(1, 9)


@law(steps(), links, worlds, st.floats(0.5, 1.0))
def test_a_step_is_the_sum_of_its_parts(step: tuple[list[Bucket], float], link: Link, world: int, speed: float) -> None:
    buckets, compute = step
    simulated = simulate(buckets, compute, link, world, speed=speed)
    assert simulated.seconds == pytest.approx(simulated.compute + simulated.encode + simulated.communicate)
    assert simulated.encode >= -1e-9
    assert simulated.communicate >= 0
    work = sum(b.scan_seconds + sum(e.codec_seconds + e.apply_seconds for e in b.exchanges) for b in buckets)
    network = 9.6 * simulated.wire_bytes / link.bits_per_second + 200 * link.latency_seconds
    assert simulated.seconds <= compute + work + network + 1e-9


@law(steps(), st.lists(st.integers(0, 3), min_size=1, max_size=6), links, st.floats(0.0, 3.0))
def test_shards_of_units_are_exchanged_one_after_another(
    step: tuple[list[Bucket], float], order: list[int], link: Link, factor: float
) -> None:
    """Units in any order, some of them equal, as a model's blocks are, and renamed: none of the work is left out."""
    buckets, compute = step
    units = [buckets[place % len(buckets)] for place in order]
    named = [[replace(e, name=f"{n} of {i}") for n, e in enumerate(u.exchanges)] for i, u in enumerate(units)]
    units = [replace(unit, exchanges=tuple(own)) for unit, own in zip(units, named, strict=True)]
    job = Job(2, compute, tuple(buckets), tuple(buckets), tuple(units)).scaled(factor, 1.0)
    mine = replace(link, bits_per_second=link.bits_per_second / 2)
    each = [simulate([replace(unit, ready_seconds=0.0)], 0.0, mine, 2) for unit in job.rank_buckets or ()]
    found = compare(job, link, node=replace(NODE, plans=SHARDS)).compressed
    assert found.wire_bytes == 2 * sum(one.wire_bytes for one in each)
    assert found.encode == pytest.approx(sum(one.encode for one in each), abs=1e-9)
    inside, gathered = traffic_inside(job, NODE)
    waited = sum(one.communicate for one in each) + inside + max(0.0, gathered - compute)
    assert found.communicate == pytest.approx(waited, abs=1e-9)


@law(steps(), links, worlds, st.floats(1.0, 100.0))
def test_a_faster_link_is_never_slower(step: tuple[list[Bucket], float], link: Link, world: int, factor: float) -> None:
    buckets, compute = step
    before = simulate(buckets, compute, link, world).seconds
    assert simulate(buckets, compute, replace(link, bits_per_second=factor * link.bits_per_second), world).seconds <= (
        before + 1e-9
    )
    assert simulate(buckets, compute, replace(link, latency_seconds=link.latency_seconds / factor), world).seconds <= (
        before + 1e-9
    )


@law(steps(), links, worlds)
def test_a_shared_core_is_never_faster(step: tuple[list[Bucket], float], link: Link, world: int) -> None:
    buckets, compute = step
    alone, shared = (simulate(buckets, compute, link, world, speed=speed).seconds for speed in (1.0, 0.5))
    assert shared >= alone - 1e-9


@law(steps(), worlds)
def test_dense_time_tends_to_computing(step: tuple[list[Bucket], float], world: int) -> None:
    plain = [Bucket(bucket.ready_seconds, bucket.in_place_bytes) for bucket in step[0]]
    gaps = [simulate(plain, step[1], Link(10.0**power), world).seconds - step[1] for power in (5, 9, 13)]
    assert gaps == sorted(gaps, reverse=True)
    assert 0 <= gaps[-1] < 1e-5
    assert simulate(plain, step[1], Link(math.inf), world).seconds == step[1]


def test_plain_ddp_is_an_all_reduce() -> None:
    link = Link(8e3, latency_seconds=0.5, header_share=0.0)
    moved = all_reduce(3000, 16)
    step = simulate([Bucket(1.0, 3000)], 1.0, link, 16)
    assert step.seconds == pytest.approx(1.0 + moved.path_bytes / 1000 + 0.5 * moved.rounds)
    assert step.wire_bytes == moved.wire_bytes
    # And so does a codec that asks for as large a mean, with which the flag travels.
    exchange = Exchange("g", 3000, (Turn(0.0, mean_of(750)), Turn(0.0)))
    compressed = simulate([Bucket(1.0, exchanges=(exchange,))], 1.0, link, 16)
    assert compressed.wire_bytes == all_reduce(3004, 16).wire_bytes


# --- calibration -----------------------------------------------------------------------------------------------------


def measured(link: Link, cases: list[tuple[int, int, float]]) -> list[Observation]:
    """What would be measured on such a link: the simulation's own step, that has nothing to compute."""
    observations = []
    for nodes, nbytes, rate in cases:
        step = simulate([Bucket(0.0, nbytes)], 0.0, replace(link, bits_per_second=rate), nodes)
        observations.append(Observation(nodes, nbytes, rate, step.seconds))
    return observations


cases = st.lists(
    st.tuples(st.integers(2, 64), st.integers(10**3, 10**9), st.sampled_from([5e7, 2e8, 1e9, 1e10, math.inf])),
    max_size=8,
).map(lambda drawn: [(4, 1000, math.inf), (4, 10**6, math.inf), *drawn])
planted = st.builds(
    Link,
    st.just(1e9),
    st.floats(0, 1e-3),
    st.floats(0, 0.2),
    st.floats(0, 1e-8),
    st.floats(1e-6, 1e-2),
)


@law(planted, cases)
def test_calibration_finds_what_was_planted(link: Link, drawn: list[tuple[int, int, float]]) -> None:
    observations = measured(link, drawn)
    fitted = calibrate_link(Link(2e8, link.latency_seconds, link.header_share, 3.0, 4.0), observations)
    assert fitted.host_seconds_per_byte == pytest.approx(link.host_seconds_per_byte, rel=1e-6, abs=1e-14)
    assert fitted.collective_seconds == pytest.approx(link.collective_seconds, rel=1e-6)
    assert max(map(abs, fitted.relative_errors)) < 1e-6
    assert (fitted.collective_fitted, fitted.too_fast) == (True, None)
    assert fitted.host_seen == (fitted.host_seconds_per_byte > 0)
    again = [seen.seconds for seen in measured(fitted.applied(link), drawn)]
    assert again == pytest.approx([seen.seconds for seen in observations])


# All-reduces of 4 and 16 MB on Gloo, medians in seconds: four ranks, two cores, each behind a token bucket of 400 kB.
LIMITED = {
    "200mbit": (0.24914, 1.00964),
    "500mbit": (0.09965, 0.39964),
    "700mbit": (0.07001, 0.29303),
    "1gbit": (0.04971, 0.20317),
    "2gbit": (0.02785, 0.10216),
    "100gbit": (0.02330, 0.06713),
}


def test_calibration_against_a_rate_limited_network() -> None:
    """The link sets the pace up to 2 Gbit/s, and then processors do: no byte waits for both."""
    observations = [
        Observation(4, nbytes, parse_bandwidth(rate), seconds)
        for rate, both in LIMITED.items()
        for nbytes, seconds in zip((4_000_000, 16_000_000), both, strict=True)
    ]
    fitted = calibrate_link(Link(1e9, 1e-4), observations)
    assert fitted.host_seconds_per_byte == pytest.approx(2.9e-9, rel=0.05)
    assert fitted.collective_seconds == pytest.approx(2.1e-3, rel=0.05)
    assert max(map(abs, fitted.relative_errors)) < 0.13
    assert max(map(abs, fitted.relative_errors[:10])) < 0.09
    assert fitted.too_fast is None


def test_calibration_says_where_a_link_was_beaten() -> None:
    """8 bits take a second on a link of 8 bit/s: nobody sends a thousand bytes in one."""
    fit = calibrate_link(Link(8.0, header_share=0.0), [Observation(2, 1000, 8.0, 1.0), Observation(2, 10, 8.0, 10.0)])
    assert (fit.host_seconds_per_byte, fit.collective_seconds) == (0.0, 0.0)
    assert fit.relative_errors == pytest.approx((999.0, 0.0))
    assert fit.too_fast == Observation(2, 1000, 8.0, 1.0)
    assert "1.00 kB at 2 nodes over 8 bit/s took less than its bandwidth" in fit.remark


@law(planted, cases, st.floats(0.3, 3.0))
def test_measured_gathers_tell_what_their_bytes_take(
    link: Link, drawn: list[tuple[int, int, float]], factor: float
) -> None:
    reduces, slower = measured(link, drawn), replace(link, gather_factor=factor)
    gathers = []
    for nodes, nbytes, rate in drawn:
        on, transfer = replace(slower, bits_per_second=rate), all_gather(nbytes, nodes)
        seconds = on.busy_seconds(transfer) + on.delay_seconds(transfer)
        gathers.append(Observation(nodes, nbytes, rate, seconds, "all-gather"))
    start = Link(2e8, link.latency_seconds, link.header_share)
    alone, fitted = calibrate_link(start, reduces), calibrate_link(start, [*gathers, *reduces])
    assert alone.gather_factor == 1.0
    assert fitted.applied(start).collective_seconds == alone.collective_seconds
    assert fitted.host_seconds_per_byte == alone.host_seconds_per_byte
    # Where a fixed cost is nearly all of a gather, rounding errors of the fit are the rest.
    seen = [g for g in gathers if g.seconds > 1.1 * (link.collective_seconds + link.latency_seconds * g.nodes)]
    if len(seen) == len(gathers) and fitted.host_seen:
        assert fitted.gather_factor == pytest.approx(factor, rel=1e-4)
        assert max(map(abs, fitted.relative_errors)) < 1e-4
    assert f"{len(reduces)} measured all-reduces and {len(gathers)} all-gathers" in fitted.remark
    assert fitted.to_json()["observations"][0]["collective"] == "all-gather"


def test_a_gathers_bytes_take_longer_and_an_all_reduces_do_not() -> None:
    link = Link(8.0, header_share=0.0, gather_factor=1.5)
    assert [link.busy_seconds(one) for one in (all_gather(10, 3), all_reduce(10, 2))] == [30.0, 10.0]


# --- break-even ------------------------------------------------------------------------------------------------------


@law(st.floats(1e5, 1e12))
def test_break_even_finds_a_crossing(crossing: float) -> None:
    """Savings of c / speed - 1 end at speed c."""
    assert break_even(lambda speed: crossing / speed - 1) == pytest.approx(crossing, rel=1e-6)


def test_break_even_at_the_ends() -> None:
    assert break_even(lambda speed: -1.0) is None
    assert break_even(lambda speed: 0.0) is None
    assert break_even(lambda speed: 1.0) == math.inf


@pytest.fixture(scope="module")
def job() -> Job:
    """Top-k on a model of 0.45 MB at 4 nodes, whose codecs' times are set: 2 ms of code."""
    plan = Plan.uniform(LAYERS, "topk", density=0.01)
    timed = make_job(plan, DryRuns(plan, 4, repeats=1), 0.01)
    return timed.scaled(codec=0.002 / timed.codec_seconds, engine=0.0)


@law(st.floats(0, 1e-3), examples=20)
def test_break_even_is_where_the_curves_cross(job: Job, latency: float) -> None:
    def on(rate: float) -> Any:
        return compare(job, Link(rate, latency))

    even = break_even(lambda rate: on(rate).dense.seconds - on(rate).compressed.seconds)
    assert even is not None
    assert math.isfinite(even)
    here, slower, faster = on(even), on(0.9 * even), on(1.1 * even)
    assert here.compressed.seconds == pytest.approx(here.dense.seconds, rel=1e-5)
    assert slower.speedup > 1 > faster.speedup


def test_plain_16_bit_reduction_sends_half_of_dense_and_computes_as_long() -> None:
    """Without latency, and with no computing to hide behind, its step takes half as long."""
    job = make_job(Plan.uniform(LAYERS, "topk", density=0.01), DryRuns(Plan.uniform(LAYERS, "topk"), 4), 1e-9)
    pair = compare(job, Link(1e6))
    assert pair.half.wire_bytes == pytest.approx(pair.dense.wire_bytes / 2)
    assert pair.half.seconds == pytest.approx(pair.dense.seconds / 2, rel=1e-6)
    assert pair.speedup_to_16_bits == pytest.approx(pair.speedup / 2, rel=1e-6)
    written = pair.to_json()
    assert written["speedup_to_16_bits"] == pair.speedup_to_16_bits
    assert written["half"]["seconds"] == pair.half.seconds


def test_a_step_without_computing_on_the_fastest_link_takes_its_codecs_time() -> None:
    """The search for a break-even simulates no link on which dense training takes less."""
    plan = Plan.uniform(LAYERS, "topk")
    job = make_job(plan, DryRuns(plan, 4), 1e-9, scan_seconds=1e-9)
    fastest = compare(job, Link(math.inf, latency_seconds=0.0)).compressed.seconds
    assert fastest == pytest.approx(job.least_seconds, rel=1e-6)
    assert replace(job, compute_seconds=1.0).least_seconds == 1.0


@pytest.mark.parametrize("codec", ["topk", "powersgd", "cast"])
def test_what_pays_below_a_speed_pays_there_by_the_verdict_too(codec: str) -> None:
    quick, plan = Profile(0.01, "as given", CodecTime(1e-5, 2, False, "a test")), Plan.uniform(LAYERS, codec)
    found = forecast(plan, Network([Link(1e6)], [2], quick))
    [node] = found.nodes
    assert node.break_even is not None
    for pair in node.curve:
        words = "pays in time" if pair.link.bits_per_second < node.break_even else "does not pay"
        assert replace(found, nodes=(replace(node, links=(pair,)),)).verdict.startswith(f"Compression {words}")


def test_a_plan_of_16_bits_is_no_faster_than_plain_16_bit_reduction() -> None:
    """It beats plain DDP on a slow link, and the verdict says that the same is to be had without a codec."""
    quick = Profile(0.01, "as given", CodecTime(1e-5, 2, False, "a test"))
    [node] = (result := forecast(Plan.uniform(LAYERS, "cast"), Network([Link(1e6)], [2], quick))).nodes
    assert result.verdict.startswith("Compression pays in time: at least")
    assert result.verdict.endswith(" Plain 16-bit reduction is about as fast or faster at 2 nodes over 1 Mbit/s.")
    assert node.links[0].speedup_to_16_bits < 1.01
    sparse = forecast(Plan.uniform(LAYERS, "topk", density=0.001), Network([Link(1e6)], [2], quick))
    assert "about as fast" not in sparse.verdict
    [node] = sparse.nodes
    assert node.half_break_even is not None
    assert node.break_even is not None
    assert node.half_break_even < node.break_even


# --- profiles and forecasts ------------------------------------------------------------------------------------------


def report(**changes: Any) -> dict[str, Any]:
    return {"world_size": 2, "plan": None, "time": {"compute": 0.25, "compress": 0.05}, **changes}


def written(folder: Path, value: object) -> Path:
    path = folder / "run.json"
    path.write_text(json.dumps(value))
    return path


def test_times_come_from_the_run_of_the_same_plan(tmp_path: Path) -> None:
    artifact = Artifact(Plan.uniform(LAYERS, "topk", density=0.01))
    same = profile_of(artifact, written(tmp_path, report(plan=artifact.plan.digest)))
    assert (same.compute_seconds, same.codec) == (0.25, CodecTime(0.05, 2, True, f"the run {tmp_path / 'run.json'}"))
    other = profile_of(artifact, written(tmp_path, report(plan="another")))
    assert (other.compute_seconds, other.codec) == (0.25, None)
    assert profile_of(artifact, written(tmp_path, report()), compute_seconds=3.0).compute_seconds == 3.0


def test_codec_times_come_from_the_artifacts_replay() -> None:
    provenance = {"world_size": 3, "replay": {"codec_seconds": 0.02}}
    artifact = Artifact(Plan.uniform(LAYERS, "topk", density=0.01), provenance)
    assert profile_of(artifact, compute_seconds=1.0).codec == CodecTime(
        0.02, 3, False, "the artifact's replay on 3 ranks"
    )
    for odd in ({}, {"replay": 3}, {"world_size": 2, "replay": {"codec_seconds": None}}, {"replay": {}}):
        assert profile_of(Artifact(artifact.plan, odd), compute_seconds=1.0).codec is None


@pytest.mark.parametrize(("engine", "expected"), [(True, 0.5), (False, 0.5)])
def test_measured_codec_times_are_met_at_their_number_of_nodes(engine: bool, expected: float) -> None:
    plan = Plan.uniform(LAYERS, "powersgd", rank=2)
    profile = Profile(1.0, "as given", CodecTime(expected, 4, engine, "a test"))
    node = forecast(plan, Network([Link(1e9)], [4], profile)).nodes[0].job
    groups = {group.name for group in plan.compressed_groups}
    exchanges = [exchange for bucket in node.buckets for exchange in bucket.exchanges if exchange.name in groups]
    of_codecs = sum(exchange.codec_seconds for exchange in exchanges)  # a replay's; a run's holds all that is done
    total = node.codec_seconds + node.engine_seconds if engine else of_codecs
    assert total == pytest.approx(expected)  # the codecs are timed once, for the factor and for the forecast


def test_a_first_line_that_says_no() -> None:
    """Links on which dense gradients cost nothing, a codec that does; and the other way round."""
    plan = Plan.uniform(LAYERS, "topk", density=0.001)
    slow_codec = Profile(0.01, "as given", CodecTime(5.0, 2, False, "a test"))
    assert forecast(plan, Network([Link(1e12)], [2, 4], slow_codec)).verdict.startswith(
        "Compression does not pay: at best"
    )
    quick = Profile(0.01, "as given", CodecTime(1e-5, 2, False, "a test"))
    result = forecast(plan, Network([Link(1e6)], [2, 4], quick))
    assert result.verdict.startswith("Compression pays in time: at least")
    mixed = forecast(plan, Network([Link(1e6), Link(1e14)], [2], quick)).verdict
    assert mixed.startswith("Compression does not pay everywhere: not at 2 nodes over 100 Tbit/s.")


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = Plan.uniform(LAYERS, "topk", density=0.01, warmup_steps=7)
    return Artifact(plan).save(tmp_path_factory.mktemp("artifact") / "topk.safetensors")


def test_predict_command(gradlab: Command, artifact: Path, tmp_path: Path) -> None:
    figure = tmp_path / "new" / "steps.svg"
    words = [
        "predict",
        artifact,
        "--nodes",
        "2,32",
        "--bandwidth",
        "10mbit,1gbit,unlimited",
        "--compute-seconds",
        "20ms",
    ]
    code, out, err = gradlab(*words, "--out", figure, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["verdict"].startswith("Compression")
    assert any("first 7 steps are dense" in line for line in result["warnings"])
    assert [node["nodes"] for node in result["nodes"]] == [2, 32]
    for node in result["nodes"]:
        assert [link["bits_per_second"] for link in node["links"]] == [1e7, 1e9, "unlimited"]
        assert {"compressed", "dense", "half"} <= set(node["curve"])
        assert node["links"][-1]["dense"]["seconds"] == pytest.approx(0.02 + 2 * (node["nodes"] - 1) * 1e-4)
        for link in node["links"]:
            step = link["compressed"]
            assert step["seconds"] == pytest.approx(step["compute"] + step["encode"] + step["communicate"])
    text = figure.read_text()
    assert text.startswith("<?xml")
    assert "plain DDP" in text
    assert "2 nodes" in text
    code, _, err = gradlab(*words, "--out", figure)
    assert code == 2
    assert "exists already" in err
    code, out, _ = gradlab(*words)
    assert code == 0
    assert "16-bit" in out
    assert "and beside plain 16 bits " in out
    assert out.splitlines()[0] == result["verdict"] or out.startswith("Compression")  # times differ from run to run


def refused(gradlab: Command, message: str, *words: object) -> None:
    code, out, err = gradlab("predict", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_bad_input_is_one_line(gradlab: Command, artifact: Path) -> None:
    for words, message in (
        (["--bandwidth", "1 furlong"], "bandwidth '1 furlong': expected bits per second"),
        (["--bandwidth", ""], "bandwidth ''"),
        (["--nodes", "0"], "nodes = 0, expected 1 to"),
        (["--nodes", "four"], "--nodes 'four': expected numbers of nodes"),
        (["--nodes", "-4"], "nodes '-4'"),
        (["--nodes", "2x0"], "expected nodes of one number of ranks from 1"),
        (["--nodes", "1", "--fsdp"], "name them, such as --nodes 8x8"),
        (["--fsdp", "--local-steps", "8"], "expected nodes of several ranks, such as --nodes 2x8"),
        (["--parameters", "int8"], "--parameters 'int8': expected one of int8, int4, "),
        (["--latency", "-1ms"], "duration '-1ms'"),
        (["--bucket-cap-mb", "-1"], "bucket size = -1"),
        (["--measured", "nowhere.json"], "nowhere.json"),
        (["--out", "steps.gif"], "a figure is written as .svg or .pdf"),
    ):
        refused(gradlab, message, artifact, "--compute-seconds", "1s", *words)
    refused(gradlab, "compute time = 0 s", artifact, "--compute-seconds", "0")


ENTRY = {"nodes": 4, "bytes": 44_700_000, "bandwidth": "200mbit", "seconds": 2.95}


BAD_TIMES = [
    ("{", "is not JSON: expected a JSON list of measured all-reduces"),
    ("[" * 100_000, "is not JSON"),
    *((text, "expected a JSON list") for text in ("{}", "[]")),
    ("[3]", "entry 1 is no object"),
    (json.dumps([ENTRY, {"nodes": 4, "seconds": 1}]), "entry 2 has no bytes, bandwidth"),
    *(
        (json.dumps([{**ENTRY, **change}]), message)
        for change, message in (
            ({"nodes": 1}, "entry 1: nodes = 1, expected a whole number from 2"),
            ({"nodes": 4.0}, "nodes = 4.0"),
            ({"bytes": True}, "bytes = True"),
            ({"bytes": 10**300}, "bytes = 1000"),
            ({"bandwidth": 2e8}, "bandwidth = 200000000.0, expected a text"),
            ({"bandwidth": "fast"}, "entry 1: bandwidth 'fast': expected bits per second"),
            ({"seconds": 0}, "seconds = 0, expected a number above 0"),
            ({"seconds": "2.95"}, "seconds = '2.95', expected a number above 0"),
            ({"seconds": math.nan}, "seconds = nan"),
            ({"seconds": 10**400}, "seconds = "),
            ({"seconds": 1e-320}, "out of all proportion"),
        )
    ),
]


def test_bad_measured_times_are_one_line(gradlab: Command, artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    for text, message in BAD_TIMES:
        path.write_text(text)
        refused(gradlab, message, artifact, "--compute-seconds", "1s", "--measured", path)


def test_measured_times_stand_in_the_forecast(gradlab: Command, artifact: Path, tmp_path: Path) -> None:
    truth = Link(1e9, 5e-5, 0.06, 2e-9, 3e-4)
    observations = measured(truth, [(4, 10**4, 1e9), (4, 10**7, 2e8), (8, 10**6, math.inf)])
    path = tmp_path / "times.json"
    rates = ("1gbit", "200mbit", "unlimited")
    entries = [
        {"nodes": o.nodes, "bytes": o.nbytes, "bandwidth": rate, "seconds": o.seconds}
        for o, rate in zip(observations, rates, strict=True)
    ]
    path.write_text(json.dumps(entries))
    assert read_observations(path) == observations
    words = ["predict", artifact, "--nodes", "64", "--bandwidth", "200mbit", "--latency", "50us"]
    words += ["--compute-seconds", "20ms", "--measured", path]
    code, out, err = gradlab(*words, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    for where in (result["link"], result["calibration"]):
        assert where["host_seconds_per_byte"] == pytest.approx(2e-9)
        assert where["collective_seconds"] == pytest.approx(3e-4)
    assert [o["seconds"] for o in result["calibration"]["observations"]] == [o.seconds for o in observations]
    assert result["calibration"]["observations"][2]["bits_per_second"] == "unlimited"
    assert all(abs(o["relative_error"]) < 1e-9 for o in result["calibration"]["observations"])
    # Plain DDP of this model: one bucket, which is ready when computing is over.
    size = 4 * sum(layer.numel for layer in LAYERS)
    dense = result["nodes"][0]["links"][0]["dense"]
    moved = all_reduce(size, 64)
    assert dense["wire_bytes"] == moved.wire_bytes
    spent = 3e-4 + moved.path_bytes * 8 * 1.06 / 2e8 + 126 * 5e-5
    assert dense["seconds"] == pytest.approx(0.02 + spent)
    code, out, _ = gradlab(*words)
    assert code == 0
    assert "calibrated on 3 measured all-reduces: 2.00 ns per byte on the ranks' processors and 300 µs per" in out


def test_without_measurements_a_forecast_is_of_rings() -> None:
    plan = Plan.uniform(LAYERS, "topk", density=0.01)
    result = forecast(plan, Network([Link(1e9)], [32], Profile(1.0, "as given")))
    assert result.to_json()["calibration"] is None
    assert any(line.startswith("Collectives are those of Gloo, rings") for line in result.remarks)


def test_no_computing_time_says_how_to_get_it(gradlab: Command, artifact: Path, tmp_path: Path) -> None:
    refused(gradlab, "--compute-seconds", artifact)
    assert "gradlab train" in gradlab("predict", artifact)[2]
    for value, message in (
        ([1], "a JSON object"),
        ({"step_seconds": 1.0}, "holds no time.compute"),
        (report(time={"compute": -1}), "holds no time.compute"),
        (report(plan=Artifact.load(artifact).plan.digest, world_size="two"), "world_size"),
    ):
        refused(gradlab, message, artifact, "--compute-seconds", written(tmp_path, value))
    (tmp_path / "run.json").write_text("{")
    refused(gradlab, "is not JSON", artifact, "--compute-seconds", tmp_path / "run.json")
    refused(gradlab, "nowhere.json", artifact, "--compute-seconds", tmp_path / "nowhere.json")
