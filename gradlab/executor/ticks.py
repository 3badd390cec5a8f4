"""The loop in which several exchanges of one rank share collectives.

New exchanges are advanced to their first requests, while the last tick's collectives travel. Once what they ask for is
worth a message, a tick (1) awaits the last one's collectives and advances the exchanges that asked for them, and (2)
issues all open requests together, one collective per kind. So which collectives there are, and their order, follows
from the exchanges' order and the sizes of their requests alone, never from timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gradlab.collectives import AllToAll, Gather, Request, payload_bytes

# Bytes of gradients that are encoded before the next collective is issued, unless the user says otherwise.
SEGMENT_BYTES = 8 * 2**20
# Shares of it: messages below the first, 256 KiB, wait until more gradients are encoded, and a part's last ones below
# the second, 32 KiB, for the next part's: a collective costs its ranks about a millisecond of their processors.
FULL_MESSAGE, LEAST_MESSAGE = 1 / 32, 1 / 256


class Advancing(Protocol):
    """An exchange in progress, with the requests that it waits for."""

    requests: tuple[Request, ...]
    done: bool

    def advance(self, answers: Sequence[Any] | None) -> None:
        """Go on to the next requests, or to the end, with one answer per open request; None to start."""


class InFlight(Protocol):
    """Collectives under way."""

    def answers(self) -> list[Any]:
        """Wait for the collectives, and return one answer per request, in order."""


OneExchange = TypeVar("OneExchange", bound=Advancing)


class Ticks(Generic[OneExchange]):
    """Exchanges that advance together.

    issue: starts the collectives that serve some requests, and returns without waiting for them.
    segment_bytes: gradients that are encoded before the next tick, in bytes.

    Attributes:
        last_bytes: bytes of the gradients whose exchanges were new in the last tick that had any.
    """

    def __init__(self, issue: Callable[[Sequence[Request]], InFlight], segment_bytes: int = SEGMENT_BYTES) -> None:
        self._issue, self._segment_bytes = issue, segment_bytes
        self._running: list[OneExchange] = []
        self._new: list[OneExchange] = []
        self._new_bytes = self._message_bytes = 0.0
        self._in_flight: InFlight | None = None
        self.last_bytes = 0.0

    def start(self, exchange: OneExchange, gradient_bytes: int) -> None:
        """Start an exchange. Its collectives are issued with those of others."""
        exchange.advance(None)
        self._new.append(exchange)
        self._new_bytes += gradient_bytes
        self._message_bytes += sum(map(_message_bytes, exchange.requests))
        if self._new_bytes >= self._segment_bytes and self._message_bytes >= FULL_MESSAGE * self._segment_bytes:
            self.tick()

    def end_part(self) -> None:
        """Issue what the exchanges of a part ask for, unless it is too little."""
        if self._new and self._message_bytes >= LEAST_MESSAGE * self._segment_bytes:
            self.tick()

    def tick(self) -> None:
        """Advance all exchanges that are under way by one round of collectives."""
        self._receive()
        self._running = [exchange for exchange in (*self._running, *self._new) if not exchange.done]
        self.last_bytes = self._new_bytes or self.last_bytes
        self._new, self._new_bytes, self._message_bytes = [], 0.0, 0.0
        self._in_flight = self._issue([request for exchange in self._running for request in exchange.requests])

    def drain(self, awaited: Callable[[OneExchange], bool] = lambda _: True) -> None:
        """Go on until exchanges have ended."""
        while self.has(awaited):
            self.tick()

    def has(self, awaited: Callable[[OneExchange], bool]) -> bool:
        """Say whether an exchange under way is one of those."""
        return any(awaited(exchange) for exchange in (*self._running, *self._new))

    def abandon(self) -> None:
        """Let go of everything under way, after an error, because what is in flight refers to collectives."""
        self._in_flight = None
        self._running.clear()
        self._new.clear()

    def _receive(self) -> None:
        if self._in_flight is None:
            return
        answers = iter(self._in_flight.answers())
        self._in_flight = None
        for exchange in self._running:
            exchange.advance([next(answers) for _ in exchange.requests])


def _message_bytes(request: Request) -> float:
    """The size of a request, the same on every rank: one whose size depends on the rank's data counts as full."""
    if isinstance(request, (Gather, AllToAll)) and request.varying:  # as often as speeds are tried
        return math.inf
    if isinstance(request, Gather) and request.lengths is not None:
        return max(request.lengths) * request.tensor.element_size()
    return request.tensor.nbytes if hasattr(request, "tensor") else payload_bytes(request, 0)
