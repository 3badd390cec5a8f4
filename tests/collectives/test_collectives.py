"""Byte rules against explicit simulations of the algorithms, and the laws of the lockstep executor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.collectives import (
    AllToAll,
    Broadcast,
    Coroutine,
    Gather,
    Mean,
    Parts,
    Received,
    Request,
    Step,
    Sum,
    all_gather_wire_bytes,
    all_reduce_wire_bytes,
    all_to_all_wire_bytes,
    answer_for,
    as_requests,
    broadcast_wire_bytes,
    check_request,
    payload_bytes,
    run_lockstep,
    sum_in_rank_order,
    wire_bytes,
)
from gradlab.errors import GradlabError
from support.laws import law

worlds = st.integers(1, 17)

# --- byte rules: every message of the algorithm, one by one ---------------------------------------------------------


def ring_all_reduce_messages(nbytes: int, world_size: int) -> Iterator[tuple[int, int, int]]:
    """(from, to, bytes) of a ring all-reduce over N segments of equal, padded size (GradiVeQ, Fig. 1)."""
    padded = nbytes + (-nbytes) % world_size
    segment = padded // world_size
    for _ in ("reduce", "circulate"):
        for _ in range(world_size - 1):
            for rank in range(world_size):
                yield rank, (rank + 1) % world_size, segment


def tree_broadcast_messages(nbytes: int, root: int, world_size: int) -> list[tuple[int, int, int]]:
    """(from, to, bytes) of Gloo's tree: in every round all that have the data send it, each time twice as far."""
    holders, messages, distance = [0], [], 1
    while distance < world_size:
        for holder in tuple(holders):
            if holder + distance < world_size:
                messages.append(((holder + root) % world_size, (holder + distance + root) % world_size, nbytes))
                holders.append(holder + distance)
        distance *= 2
    return messages


@law(st.integers(0, 5000), worlds)
def test_all_reduce_is_a_ring(nbytes: int, world_size: int) -> None:
    sent: Counter[int] = Counter()
    for source, _, size in ring_all_reduce_messages(nbytes, world_size):
        sent[source] += size
    for rank in range(world_size):
        assert all_reduce_wire_bytes(nbytes, world_size) == sent[rank]


@law(st.lists(st.integers(-9, 9), min_size=1, max_size=24), st.integers(1, 6))
def test_the_ring_that_is_counted_sums(values: list[int], world_size: int) -> None:
    """The algorithm whose messages are counted does compute the sum, segment by segment."""
    padded = values + [0] * (-len(values) % world_size)
    size = len(padded) // world_size
    held = [np.array(padded).reshape(world_size, size) * (rank + 1) for rank in range(world_size)]
    for step in range(world_size - 1):
        moving = [held[rank][(rank - step) % world_size].copy() for rank in range(world_size)]
        for rank in range(world_size):
            held[rank][(rank - 1 - step) % world_size] += moving[rank - 1]
    for step in range(world_size - 1):
        moving = [held[rank][(rank + 1 - step) % world_size].copy() for rank in range(world_size)]
        for rank in range(world_size):
            held[rank][(rank - step) % world_size] = moving[rank - 1]
    total = np.array(padded) * (world_size * (world_size + 1) // 2)
    assert all(np.array_equal(ours.reshape(-1), total) for ours in held)


@law(st.integers(0, 1000), worlds, st.data())
def test_broadcast_is_a_binomial_tree(nbytes: int, world_size: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, world_size - 1))
    messages = tree_broadcast_messages(nbytes, root, world_size)
    assert sorted(target for _, target, _ in messages) == sorted(set(range(world_size)) - {root})
    sent: Counter[int] = Counter()
    for source, _, size in messages:
        sent[source] += size
    for rank in range(world_size):
        assert broadcast_wire_bytes(nbytes, rank, root, world_size) == sent[rank]


@law(st.integers(0, 1000), worlds)
def test_all_gather_passes_every_block_on(nbytes: int, world_size: int) -> None:
    holds: list[list[int]] = [[rank] for rank in range(world_size)]
    sent = [0] * world_size
    for _ in range(world_size - 1):
        moving = [blocks[-1] for blocks in holds]
        for rank in range(world_size):
            sent[rank] += nbytes
            holds[(rank + 1) % world_size].append(moving[rank])
    assert all(sorted(blocks) == list(range(world_size)) for blocks in holds)
    assert sent == [all_gather_wire_bytes(nbytes, world_size)] * world_size


@law(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.data())
def test_all_to_all_sends_nothing_to_itself(sizes: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(sizes) - 1))
    assert all_to_all_wire_bytes(sizes, rank) + sizes[rank] == sum(sizes)


def test_one_rank_sends_nothing() -> None:
    tensor = torch.zeros(5)
    for request in (Mean(tensor), Gather(tensor), Gather(tensor, varying=True), Broadcast(tensor, 0)):
        assert wire_bytes(request, 0, 1) == 0
        assert payload_bytes(request, 0) == 20
    assert wire_bytes(AllToAll((tensor,)), 0, 1) == 0


def test_payload_is_what_a_rank_contributes() -> None:
    half, wide = torch.zeros(3, 4, dtype=torch.float16), torch.zeros(7, dtype=torch.float64)
    assert payload_bytes(Mean(half), 2) == 24
    assert payload_bytes(Gather(wide), 2) == 56
    assert payload_bytes(AllToAll((half, wide)), 1) == 80
    assert [payload_bytes(Broadcast(wide, 1), rank) for rank in range(3)] == [0, 56, 0]
    assert payload_bytes(Mean(torch.zeros(0, 4)), 0) == 0


def test_a_varying_gather_is_padded_to_the_longest_and_tells_sizes() -> None:
    short, long = torch.zeros(3), torch.zeros(10)
    results = run_lockstep([asking(Gather(t, varying=True)) for t in (short, long, short)])
    assert [result.wire_bytes for result in results] == [2 * (40 + 4)] * 3
    assert [result.payload_bytes for result in results] == [12, 40, 12]
    results = run_lockstep([asking(Gather(t, varying=True)) for t in (short[:1], long, short[:1])])
    assert [result.wire_bytes for result in results] == [2 * (4 + 4), 2 * (40 + 4), 2 * (4 + 4)]  # half of it or less


@law(
    st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=3, max_size=3), st.booleans(), st.booleans()
)
def test_parts_whose_lengths_differ_between_ranks(lengths: list[list[int]], of_a_vector: bool, only: bool) -> None:
    """lengths[i][j] values go from rank i to rank j. Each length travels too, and nothing is padded. only: ranks that
    are sent nothing are told no lengths."""
    vectors = [torch.arange(float(sum(row))) + 100 * rank for rank, row in enumerate(lengths)]
    cut = [vector.split(row) for vector, row in zip(vectors, lengths, strict=True)]
    parts = [Parts(v, tuple(row)) for v, row in zip(vectors, lengths, strict=True)] if of_a_vector else cut
    served = frozenset(to for to in range(3) if any(row[to] for row in lengths)) if only else None
    results = run_lockstep([asking(AllToAll(one, varying=True, served=served)) for one in parts])
    for rank, result in enumerate(results):
        (received,) = result.value
        assert all(torch.equal(part, cut[source][rank]) for source, part in enumerate(received))
        assert result.payload_bytes == 4 * sum(lengths[rank])
        told = range(3) if served is None else served
        assert result.wire_bytes == sum(4 * lengths[rank][to] + 4 * (to in told) for to in range(3) if to != rank)


# --- lockstep -------------------------------------------------------------------------------------------------------


def asking(*steps: Step) -> Coroutine[list[Any]]:
    """A coroutine that yields prescribed steps and returns the answers."""
    answers = []
    for step in steps:
        answers.append((yield step))
    return answers


def rank_tensors(world_size: int, shape: tuple[int, ...] = (5,), dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(world_size)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world_size)]


@law(st.integers(1, 9), st.sampled_from([torch.float32, torch.float64, torch.float16]))
def test_means_are_summed_in_rank_order(world_size: int, dtype: torch.dtype) -> None:
    """Bit for bit: each rank's values times 1/N (in float32 for halves, then rounded), added one after the other."""
    tensors = rank_tensors(world_size, (6,), dtype)
    kind = tensors[0].numpy().dtype
    wide = np.float32 if kind == np.float16 else kind
    scaled = [(tensor.numpy().astype(wide) * np.asarray(1.0 / world_size, wide)).astype(kind) for tensor in tensors]
    expected = scaled[0]
    for values in scaled[1:]:
        expected = expected + values
    results = run_lockstep([asking(Mean(tensor)) for tensor in tensors])
    for result in results:
        (mean,) = result.value
        np.testing.assert_array_equal(mean.numpy(), expected)
        assert mean.dtype == dtype
    assert torch.equal(sum_in_rank_order(tensors), results[0].value[0])


def test_every_kind_gives_each_rank_its_answer() -> None:
    tensors = rank_tensors(4)
    parts = [tuple(torch.full((2 + j,), 10.0 * rank + j) for j in range(4)) for rank in range(4)]
    results = run_lockstep(
        [
            asking(Gather(t), Broadcast(t, 2), AllToAll(parts[r]), Gather(t[: r + 1], True))
            for r, t in enumerate(tensors)
        ]
    )
    for rank, result in enumerate(results):
        gathered, root, received, varying = result.value
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gathered, tensors, strict=True))
        assert torch.equal(root, tensors[2])
        for source, tensor in enumerate(received):
            assert torch.equal(tensor, torch.full((2 + rank,), 10.0 * source + rank))
        assert [len(tensor) for tensor in varying] == [1, 2, 3, 4]
        assert all(torch.equal(ours, t[: r + 1]) for r, (ours, t) in enumerate(zip(varying, tensors, strict=True)))


@law(st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple), st.sampled_from([torch.float32, torch.uint8]))
def test_parts_of_a_vector_are_served_as_tensors_are(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Answers and bytes are the same. Ranks in one process have the whole vectors beside them."""
    ranks = len(lengths)
    vectors = [(torch.arange(sum(lengths)) + 40 * rank).to(dtype) for rank in range(ranks)]
    of_vectors = [AllToAll(Parts(vector, lengths)) for vector in vectors]
    of_tensors = [AllToAll(vector.split(list(lengths))) for vector in vectors]
    lazy, plain = (run_lockstep([asking(request) for request in form]) for form in (of_vectors, of_tensors))
    for rank in range(ranks):
        (received,), (expected,) = lazy[rank].value, plain[rank].value
        assert isinstance(received, Received)
        assert len(received) == ranks
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(received, expected, strict=True))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(received[1:], expected[1:], strict=True))
        assert all(ours is theirs for ours, theirs in zip(received.whole, vectors, strict=True))
        assert lazy[rank].payload_bytes == plain[rank].payload_bytes == payload_bytes(of_vectors[rank], rank)
        assert lazy[rank].wire_bytes == plain[rank].wire_bytes == wire_bytes(of_vectors[rank], rank, ranks)
        assert of_vectors[rank].sizes == of_tensors[rank].sizes
        assert received.once(lambda rank=rank: rank) == 0  # what the first rank computed


def test_nobody_cuts_parts_that_nobody_reads() -> None:
    """And what is read is cut once, as the request says."""
    cut: list[int] = []

    def parts(rank: int) -> Parts:
        def halves() -> list[torch.Tensor]:
            cut.append(rank)
            return [A[2:], A[:2]]

        return Parts(A, (2, 2), halves)

    first, second = run_lockstep([asking(AllToAll(parts(rank))) for rank in range(2)])
    assert not cut
    assert all(torch.equal(part, A[2:]) for part in first.value[0])
    assert all(torch.equal(part, A[:2]) for part in second.value[0])
    assert cut == [0, 1]


def test_the_form_of_the_answer_follows_the_form_of_the_step() -> None:
    """A single request gets its answer, a tuple a tuple, even of one or none."""
    tensor = torch.ones(3)
    (result,) = run_lockstep([asking(Mean(tensor), (Mean(tensor),), (Mean(tensor), Gather(tensor)), ())])
    single, one, two, none = result.value
    assert torch.equal(single, tensor)
    assert type(one) is tuple
    assert torch.equal(one[0], tensor)
    assert len(two) == 2
    assert isinstance(two[1], list)
    assert none == ()
    assert answer_for((Mean(tensor),), [tensor]) == (tensor,)


def test_bytes_add_up_over_steps_and_requests() -> None:
    tensor = torch.zeros(6)
    results = run_lockstep([asking((Mean(tensor), Gather(tensor)), Broadcast(tensor, 1)) for _ in range(4)])
    mean, gather = all_reduce_wire_bytes(24, 4), all_gather_wire_bytes(24, 4)
    assert [result.wire_bytes - mean - gather for result in results] == [0, 48, 24, 0]
    assert [result.payload_bytes for result in results] == [48, 72, 48, 48]


def test_a_scalar_and_an_empty_tensor_travel() -> None:
    scalars = [torch.tensor(1.0), torch.tensor(4.0)]
    results = run_lockstep([asking((Mean(s), Mean(torch.zeros(0, 3)))) for s in scalars])
    assert all(float(result.value[0][0]) == 2.5 for result in results)
    assert all(result.value[0][1].shape == (0, 3) for result in results)


KINDS: dict[str, Callable[[torch.Tensor], Request]] = {
    "mean": Mean,
    "gather": Gather,
    "varying": lambda tensor: Gather(tensor, varying=True),
    "broadcast": lambda tensor: Broadcast(tensor, 1),
    "all-to-all": lambda tensor: AllToAll((tensor, tensor.clone(), tensor.clone())),
}


def tensors_in(answer: Any) -> list[torch.Tensor]:
    return list(answer) if isinstance(answer, list) else [answer]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "all-to-all"])
def test_ranks_share_what_all_of_them_are_sent(kind: str) -> None:
    """Copies for each of N ranks would take N^2 of a gather's memory. No rank changes an answer: see the contract."""
    answers = [tensors_in(r.value[0]) for r in run_lockstep([asking(KINDS[kind](t)) for t in rank_tensors(3)])]
    pointers = [[t.untyped_storage().data_ptr() for t in answer] for answer in answers]
    assert pointers[0] == pointers[1] == pointers[2]


@pytest.mark.parametrize("kind", ["mean", "gather", "varying", "all-to-all"])
def test_one_rank_gets_its_own_back(kind: str) -> None:
    tensor = torch.arange(4.0)
    request = AllToAll((tensor,)) if kind == "all-to-all" else KINDS[kind](tensor)
    (result,) = run_lockstep([asking(request)])
    (answer,) = tensors_in(result.value[0])
    assert torch.equal(answer, tensor)
    assert result.wire_bytes == 0
    assert result.payload_bytes == 16


def test_sixty_four_ranks() -> None:
    world_size = 64
    results = run_lockstep([asking((Mean(torch.full((3,), float(r))), Gather(torch.tensor([r])))) for r in range(64)])
    for result in results:
        mean, gathered = result.value[0]
        torch.testing.assert_close(mean, torch.full((3,), 31.5))
        assert torch.cat(gathered).tolist() == list(range(world_size))


A, B = torch.zeros(4), torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Mean(A), Gather(A)),
        (Mean(A), Mean(B)),
        (Mean(A), Mean(A.double())),
        (Gather(A), Gather(A[:3])),
        (Gather(A), Gather(A, varying=True)),
        (Gather(A, varying=True), Gather(A.double(), varying=True)),
        (AllToAll((A, A)), AllToAll((A, A), varying=True)),
        (AllToAll((A, A), varying=True), AllToAll((A, A.double()), varying=True)),
        (AllToAll((A, A), varying=True), AllToAll((A, A), varying=True, served=frozenset({0, 1}))),
        (Broadcast(A, 0), Broadcast(A, 1)),
        (Broadcast(A, 0), Broadcast(B, 0)),
        (AllToAll((A, A)), AllToAll((A, B))),
        (AllToAll((A, A)), AllToAll((A,))),
        (AllToAll(Parts(A, (1, 3))), AllToAll(Parts(A, (3, 1)))),
        (AllToAll(Parts(A, (1, 3))), AllToAll(Parts(A.double(), (1, 3)))),
        (AllToAll(Parts(A, (1, 3))), AllToAll((A[:1], A[1:]))),
        ((Mean(A), Mean(B)), (Mean(B), Mean(A))),
        (Sum(A.to(torch.int8)), Sum(A.to(torch.int32))),
        ((Mean(A),), (Mean(A), Mean(A))),
        ((), (Mean(A),)),
    ],
)
def test_ranks_that_ask_for_different_things_are_refused(ours: Step, theirs: Step) -> None:
    with pytest.raises(GradlabError, match=r"ranks ask for different collectives: rank 0 .*, rank 1 "):
        run_lockstep([asking(ours), asking(theirs)])


def test_a_rank_that_finishes_early_is_refused() -> None:
    with pytest.raises(GradlabError, match="1 ranks have finished while 2 still ask"):
        run_lockstep([asking(Mean(A), Mean(A)), asking(Mean(A)), asking(Mean(A), Mean(A))])


@pytest.mark.parametrize("step", [A, None, 3, [Mean(A)], (Mean(A), A), {"a": Mean(A)}])
def test_a_yield_of_anything_else_is_refused(step: Any) -> None:
    with pytest.raises(GradlabError, match="must yield one of Mean, Sum, Gather, Broadcast, AllToAll and Ring"):
        run_lockstep([asking(step)])
    with pytest.raises(GradlabError, match="must yield"):
        as_requests(step)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Mean(torch.zeros(3, dtype=torch.int64)), "Mean needs a floating-point tensor, not torch.int64"),
        (Mean(torch.zeros(3, dtype=torch.bool)), "Mean needs a floating-point tensor"),
        (Broadcast(A, 2), r"from rank 2, but ranks are 0\.\.1"),
        (Broadcast(A, -1), r"from rank -1, but ranks are 0\.\.1"),
        (AllToAll((A, A, A)), "AllToAll of 3 tensors at world size 2"),
        (AllToAll(()), "AllToAll of 0 tensors at world size 2"),
        (AllToAll(Parts(A, (1, 2, 1))), "AllToAll of 3 tensors at world size 2"),
        (AllToAll(Parts(A, (1, 2))), "AllToAll of a vector of 4 elements: the lengths of its parts add up to 3"),
        (Gather(B, varying=True), r"takes vectors, not shape \[2, 2\]"),
        (Gather(torch.tensor(1.0), varying=True), r"takes vectors, not shape \[\]"),
        (AllToAll((A, B), varying=True), r"a varying AllToAll takes vectors, not shape \[2, 2\]"),
        (AllToAll((A, A), True, served=frozenset({1})), r"serves ranks \[1\] has a vector for \[0\]"),
    ],
)
def test_requests_no_process_group_could_serve_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        run_lockstep([asking(request_), asking(request_)])
    with pytest.raises(GradlabError, match=message):
        check_request(request_, 2)


def test_no_rank_at_all_is_refused() -> None:
    with pytest.raises(GradlabError, match="at least one coroutine"):
        run_lockstep([])


def test_an_error_inside_a_codec_comes_through() -> None:
    def failing() -> Coroutine[None]:
        yield Mean(A)
        raise ZeroDivisionError("inside")

    with pytest.raises(ZeroDivisionError, match="inside"):
        run_lockstep([failing(), failing()])


def test_a_coroutine_that_asks_for_nothing() -> None:
    results = run_lockstep([asking() for _ in range(3)])
    assert [(result.value, result.payload_bytes, result.wire_bytes) for result in results] == [([], 0, 0)] * 3
