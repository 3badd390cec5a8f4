"""What shares a collective, and when one is issued: laws of `gradlab.executor.ticks`, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from gradlab.collectives import Gather, Mean, Request
from gradlab.executor import ticks as rule
from gradlab.executor.ticks import Ticks
from support.laws import law

SEGMENT = 2**20  # bytes of gradients
FULL, LEAST = int(rule.FULL_MESSAGE * SEGMENT), int(rule.LEAST_MESSAGE * SEGMENT)  # of messages


class Asking:
    """An exchange that asks for a mean of so many bytes, a number of times, and keeps the answers."""

    def __init__(self, name: str, nbytes: int, rounds: int = 1, varying: bool = False) -> None:
        self.name, self.done, self.answers = name, False, list[Any]()
        tensor = torch.empty(nbytes // 4, device="meta")
        self.requests: tuple[Request, ...] = ()
        self._request: Request = Gather(tensor, varying=True) if varying else Mean(tensor)
        self._left = rounds

    def advance(self, answers: Sequence[Any] | None) -> None:
        self.answers += answers or []
        self.done = self._left == 0
        self.requests = () if self.done else (self._request,)
        self._left -= 1


class Network:
    """Answers every request with its number in the order of issue."""

    def __init__(self) -> None:
        self.ticks: list[int] = []
        self._issued = 0

    def issue(self, requests: Sequence[Request]) -> Network.Sent:
        self.ticks.append(len(requests))
        first, self._issued = self._issued, self._issued + len(requests)
        return Network.Sent(list(range(first, self._issued)))

    class Sent:
        def __init__(self, numbers: list[int]) -> None:
            self._numbers = numbers

        def answers(self) -> list[int]:
            return self._numbers


@law(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3 * 10**5), st.integers(0, 3)), max_size=12),
    st.integers(1, 10**6),
)
def test_every_exchange_gets_its_answers_in_order_and_no_tick_is_empty(
    given: list[tuple[int, int, int]], segment_bytes: int
) -> None:
    network = Network()
    ticks = Ticks[Asking](network.issue, segment_bytes)
    exchanges = [Asking(str(i), nbytes, rounds) for i, (_, nbytes, rounds) in enumerate(given)]
    for exchange, (gradient_bytes, _, _) in zip(exchanges, given, strict=True):
        ticks.start(exchange, gradient_bytes)
        ticks.end_part()
    ticks.drain()
    for exchange, (_, _, rounds) in zip(exchanges, given, strict=True):
        assert exchange.done
        assert len(exchange.answers) == rounds
        assert exchange.answers == sorted(exchange.answers)
    assert sum(network.ticks) == sum(rounds for _, _, rounds in given)


@pytest.mark.parametrize("varying", [False, True])
def test_small_messages_wait_for_more_within_a_part_and_least_ones_for_the_next_part(varying: bool) -> None:
    network = Network()
    ticks = Ticks[Asking](network.issue, SEGMENT)
    for part in range(3):
        for layer in range(4):
            ticks.start(Asking(f"{part}.{layer}", LEAST // 8, varying=varying), SEGMENT // 2)
        ticks.end_part()
    # A message whose size ranks do not know alike is taken for a full one, as it must not decide.
    assert network.ticks == ([2] * 6 if varying else [8])


@pytest.mark.parametrize("own", [8, LEAST // 4])
def test_of_known_lengths_the_longest_counts_on_every_rank(own: int) -> None:
    """Ranks whose own part is short decide as the others do."""
    network = Network()
    ticks = Ticks[Asking](network.issue, SEGMENT)
    exchange = Asking("g", 0)
    exchange._request = Gather(torch.empty(own, device="meta"), lengths=(8, LEAST // 4))
    ticks.start(exchange, 100)
    ticks.end_part()
    assert network.ticks == [1]


def test_a_full_message_is_sent_at_once() -> None:
    network = Network()
    ticks = Ticks[Asking](network.issue, SEGMENT)
    for layer in range(3):
        ticks.start(Asking(str(layer), FULL), SEGMENT)
        assert len(network.ticks) == layer + 1
