"""How long a step takes where ranks exchange what several steps add up to, instead of every gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlab.analysis.forecast.calibration import Calibration
from gradlab.analysis.forecast.link import json_rate
from gradlab.analysis.forecast.network import Network
from gradlab.analysis.forecast.plans import Forecast, forecast
from gradlab.analysis.forecast.profile import NOT_MEASURED
from gradlab.plan import Plan
from gradlab.progress import Progress

CLOSE = 1.05  # of computing alone: what "next to computing alone" means


@dataclass(frozen=True)
class LocalSteps:
    """Times of one number of nodes on one link, in seconds.

    nodes: that exchange.
    bits_per_second: of the link.
    compute: of a step without any exchange.
    dense, compressed: of a step that exchanges its gradients, as plain DDP and through the plan.
    exchange: of one outer step, which exchanges the whole model through the plan while nothing is computed.
    dense_exchange: the same, uncompressed.
    """

    nodes: int
    bits_per_second: float
    compute: float
    dense: float
    compressed: float
    exchange: float
    dense_exchange: float

    def seconds(self, every: int, *, streaming: bool = False, dense: bool = False) -> float:
        """Forecast a local step's time, with its share of an outer step.

        Args:
            every: local steps between two outer steps of a layer, H.
            streaming: whether local steps go on meanwhile (fragments and a delay), so that the longer of both counts.
            dense: whether what is exchanged is not compressed.

        Returns:
            Seconds.
        """
        share = (self.dense_exchange if dense else self.exchange) / every
        return max(self.compute, share) if streaming else self.compute + share

    @property
    def break_even(self) -> int:
        """The least H whose step is no longer than those that exchange gradients, dense or through the plan."""
        return self._least(min(self.dense, self.compressed))

    @property
    def close(self) -> int:
        """The least H whose step is at most 1.05 times computing alone."""
        return self._least(CLOSE * self.compute)

    def least(self, waiting: float) -> int:
        """The least H at which a worker waits at most this share of a step. waiting: from 0, below 1."""
        return self._least(self.compute / (1 - waiting))

    def waits(self, every: int) -> float:
        """The share of a step in which a worker waits.

        Args:
            every: local steps between two outer steps, H; 0: gradients are exchanged in every step.

        Returns:
            From 0 to 1. Codec time counts as waiting.
        """
        return 1 - self.compute / (self.seconds(every) if every else self.compressed)

    @property
    def uncompressed(self) -> LocalSteps:
        """The same where nothing is compressed."""
        return replace(self, compressed=self.dense, exchange=self.dense_exchange)

    def _least(self, seconds: float) -> int:
        spare = seconds - self.compute
        return 1 if self.exchange <= spare else math.ceil(self.exchange / max(spare, 1e-12) * (1 - 1e-9))

    def to_json(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Write the times as plain JSON. numbers: of local steps, H."""
        steps = [
            {"local_steps": every, "seconds": self.seconds(every), "streaming": self.seconds(every, streaming=True)}
            for every in numbers
        ]
        times = {**asdict(self), "bits_per_second": json_rate(self.bits_per_second)}
        return {**times, "break_even": self.break_even, "close_to_computing_alone": self.close, "steps": steps}


def forecast_local_steps(
    plan: Plan,
    network: Network,
    synchronous: Forecast,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> list[LocalSteps]:
    """Forecast steps between which only every H-th is followed by an exchange.

    Args:
        plan: that the exchange goes through. One that compresses nothing is plain averaging.
        network: of the forecast.
        synchronous: the forecast of steps that exchange their gradients, on the same network.
        calibration: of its links.
        progress: told of the work.

    Returns:
        One for each number of nodes and link.
    """
    codec = network.profile.codec
    alone = replace(network, profile=replace(NOT_MEASURED, codec=codec))
    exchanges = forecast(plan, alone, calibration=calibration, progress=progress, uncompressed=True)
    return [
        LocalSteps(
            nodes,
            pair.link.bits_per_second,
            network.profile.compute_seconds,
            pair.dense.seconds,
            pair.compressed.seconds,
            exchange.compressed.seconds,
            exchange.dense.seconds,
        )
        for (nodes, pair), (_, exchange) in zip(synchronous.comparisons, exchanges.comparisons, strict=True)
    ]
