"""All-to-alls in two hops: every part arrives as it does directly, and the bytes are those of the forecast."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import strategies as st

from gradlab.analysis.forecast.link import Link, all_to_all
from gradlab.collectives import all_to_all_wire_bytes
from gradlab.collectives.relay import grid
from gradlab.runtime.network.relay import hops
from support.laws import law
from support.process_pool import ProcessPool


@law(st.integers(1, 5000))
def test_a_grid_holds_all_ranks_as_nearly_square_as_divides(ranks: int) -> None:
    rows, columns = grid(ranks)
    assert rows * columns == ranks
    assert not any(ranks % side == 0 for side in range(rows + 1, math.isqrt(ranks) + 1))
    assert rows <= columns


@law(st.sampled_from([1, 2, 4, 5, 6, 9, 12, 16, 20]), st.integers(0, 10**6))
def test_every_part_arrives_and_every_byte_is_counted(ranks: int, seed: int) -> None:
    """Against a table of the element that each rank has for each other. Forecast bytes on the busiest link: a hop's
    are at least those that any rank sends or is sent, and no more where all ranks have as many."""
    draw = random.Random(seed)
    most = [draw.choice((0, 3)), draw.choice((0, 3))]
    even = draw.random() < 0.3
    for_one, for_all = ([m if even else draw.randint(0, m) for _ in range(ranks)] for m in most)
    meant = {
        (i, j): torch.cat([torch.full((for_one[j],), 100.0 * i + j), torch.full((for_all[i],), 1000.0 + i)])
        for i in range(ranks)
        for j in range(ranks)
    }
    outs = [torch.empty(ranks * for_one[j] + sum(for_all)) for j in range(ranks)]
    running = [hops(i, outs[i], torch.cat([meant[i, j] for j in range(ranks)]), for_one, for_all) for i in range(ranks)]
    sent, path = Counter[int](), 0
    for _ in range(2):
        turns = [next(one) for one in running]
        moved = Counter[tuple[str, int]]()
        for i, (_, vectors) in enumerate(turns):
            for j, vector in vectors.items():
                turns[j][0][i].copy_(vector)
                moved.update({("from", i): vector.numel() * (i != j), ("to", j): vector.numel() * (i != j)})
        sent.update({rank: moved["from", rank] for rank in range(ranks)})
        path += max(moved.values())
    assert all(next(one, None) is None for one in running)
    rows = grid(ranks)[0]
    for j, out in enumerate(outs):
        assert torch.equal(out, torch.cat([meant[i, j] for i in range(ranks)]))
        forecast = all_to_all(for_one, j, for_all, below=10**9)
        assert forecast.wire_bytes == sent[j] == all_to_all_wire_bytes(for_one, j, for_all, rows)
        assert forecast.path_bytes >= path
        assert forecast.path_bytes == path or not even


@law(st.integers(2, 2000), st.sampled_from([1e8, 1e10, math.inf]), st.sampled_from([0.0, 2e-5, 1e-3, 0.1]))
def test_two_hops_are_taken_where_they_take_less(ranks: int, rate: float, latency: float) -> None:
    """For parts of equal bytes, from 64 ranks on."""
    link = Link(rate, latency)
    below = link.relay_below(ranks)
    assert below == 0 or (ranks >= 64 and grid(ranks)[0] > 1)
    for nbytes in {1, max(1, below - 1), below + 1, 10**6} if ranks >= 64 else ():
        ways = [all_to_all([nbytes] * ranks, 0, below=one) for one in (below, 0, 2**40)]
        chosen, direct, relayed = (link.busy_seconds(one) + link.delay_seconds(one) for one in ways)
        assert chosen <= min(direct, relayed) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("ranks", [3, 4])
def test_real_ranks_send_what_is_forecast(pool: ProcessPool, ranks: int) -> None:
    """Also when all choose alike by what they measured."""
    results = pool.run("jobs.relay_tasks:sent_and_forecast", ranks)
    for result in results:
        assert result["equal"]
        assert result["sent"] == result["forecast"]
        assert result["below"] == results[0]["below"]
        assert result["counts"] == [0, 0]


def test_a_run_in_two_hops_is_one_of_direct_messages(pool: ProcessPool) -> None:
    """Bit for bit, at 2 x 2 ranks; and its table says how messages go."""
    for result in pool.run("jobs.relay_tasks:trained", 4):
        assert result == {"equal": True, "told": [False, True]}


def test_a_rank_that_goes_between_the_hops_ends_in_an_error(pool: ProcessPool) -> None:
    """The rank of its column waits for it; the others have all they need."""
    messages = pool.run("jobs.relay_tasks:gone_between_hops", 4)
    assert messages[0] == ""
    assert messages[2].startswith("a collective failed")
