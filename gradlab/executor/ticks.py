"""The loop in which several exchanges of one rank share collectives.

A tick (1) advances new exchanges to their first requests, while the last tick's collectives travel, (2) awaits those
and advances the exchanges that asked for them, and (3) issues all open requests together, one collective per kind.
So the order of collectives follows from the exchanges' order and their requests alone, never from timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gradlab.collectives import Request


class Advancing(Protocol):
    """An exchange in progress.

    requests: those it waits for.
    done: whether it has ended.
    """

    requests: tuple[Request, ...]
    done: bool

    def advance(self, answers: Sequence[Any] | None) -> None:
        """Go on to the next requests, or to the end.

        Args:
            answers: one per open request; None to start.
        """


class InFlight(Protocol):
    """Collectives under way."""

    def answers(self) -> list[Any]:
        """Wait for the collectives.

        Returns:
            One answer per request, in order.
        """


OneExchange = TypeVar("OneExchange", bound=Advancing)


class Ticks(Generic[OneExchange]):
    """Exchanges that advance together.

    issue: starts the collectives that serve some requests, and returns without waiting for them.
    """

    def __init__(self, issue: Callable[[Sequence[Request]], InFlight]) -> None:
        self._issue = issue
        self._running: list[OneExchange] = []
        self._in_flight: InFlight | None = None

    def tick(self, new: Sequence[OneExchange] = ()) -> None:
        """Start new exchanges, and advance all that are under way by one round of collectives.

        Args:
            new: the exchanges to start, in an order that is the same on all ranks.
        """
        for exchange in new:
            exchange.advance(None)
        self._receive()
        self._running = [exchange for exchange in (*self._running, *new) if not exchange.done]
        self._in_flight = self._issue([request for exchange in self._running for request in exchange.requests])

    def drain(self, awaited: Callable[[OneExchange], bool] = lambda _: True) -> None:
        """Go on until exchanges have ended.

        Args:
            awaited: says which; by default all. Others advance beside them.
        """
        while self.has(awaited):
            self.tick()

    def has(self, awaited: Callable[[OneExchange], bool]) -> bool:
        """Say whether an exchange under way is one of those.

        Args:
            awaited: says which.

        Returns:
            False once all of them have ended.
        """
        return any(awaited(exchange) for exchange in self._running)

    def abandon(self) -> None:
        """Let go of everything under way, after an error, because what is in flight refers to collectives."""
        self._in_flight = None
        self._running.clear()

    def _receive(self) -> None:
        if self._in_flight is None:
            return
        answers = iter(self._in_flight.answers())
        self._in_flight = None
        for exchange in self._running:
            exchange.advance([next(answers) for _ in exchange.requests])
