"""How long a step takes where ranks exchange what several steps add up to, instead of every gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlab.analysis.forecast.calibration import Calibration
from gradlab.analysis.forecast.link import Link, json_rate
from gradlab.analysis.forecast.network import NOT_MEASURED, Network
from gradlab.analysis.forecast.plans import Forecast, forecast
from gradlab.analysis.forecast.simulator import Step
from gradlab.plan import Plan
from gradlab.progress import Progress

CLOSE = 1.05  # of computing alone: what "next to computing alone" means


@dataclass(frozen=True)
class LocalSteps:
    """Times of one number of nodes on one link, in seconds.

    compute: a step without any exchange; dense, compressed: one that exchanges gradients, plainly or through the plan.
    exchange, dense_exchange: an outer step, which exchanges the whole model while nothing is computed.
    work, dense_work: time that either takes from local steps meanwhile: codecs' and sockets' work as far as there is no
        core left for it. 0 with two cores per rank.
    """

    nodes: int
    bits_per_second: float
    compute: float
    dense: float
    compressed: float
    exchange: float
    dense_exchange: float
    work: float = 0.0
    dense_work: float = 0.0

    def seconds(self, every: int, *, streaming: bool = False, dense: bool = False) -> float:
        """Forecast the seconds of a local step, with its share of an outer step every H steps."""
        if dense:
            return self.uncompressed.seconds(every, streaming=streaming)
        share = self.exchange / every
        if not streaming:
            return self.compute + share
        # Only what is exchanged beside computing takes time from it.
        beside = min(1.0, every * self.compute / self.exchange) if self.exchange > 0 else 1.0
        return max(self.compute + beside * self.work / every, share)

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
        """Compute the share of a step in which a worker waits, 0 to 1, codec time included; every 0: no local steps."""
        return 1 - self.compute / (self.seconds(every) if every else self.compressed)

    @property
    def uncompressed(self) -> LocalSteps:
        """The same where nothing is compressed."""
        return replace(self, compressed=self.dense, exchange=self.dense_exchange, work=self.dense_work)

    def _least(self, seconds: float) -> int:
        spare = seconds - self.compute
        return 1 if self.exchange <= spare else math.ceil(self.exchange / max(spare, 1e-12) * (1 - 1e-9))

    def to_json(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Write the times as plain JSON. numbers: of local steps, H."""
        steps = [
            {
                "local_steps": every,
                "seconds": self.seconds(every),
                "streaming": self.seconds(every, streaming=True),
            }
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
    """Forecast steps between which only every H-th is followed by an exchange."""
    codec = network.profile.codec
    alone = replace(network, profile=replace(NOT_MEASURED, codec=codec))
    exchanges = forecast(plan, alone, calibration=calibration, progress=progress, uncompressed=True)
    lacking = 2 * (1 - network.speed)  # of a core for an exchange's work beside computing

    def work(exchange: Step, link: Link) -> float:
        return lacking * (exchange.encode + exchange.wire_bytes * link.host_seconds_per_byte)

    return [
        LocalSteps(
            nodes,
            pair.link.bits_per_second,
            network.profile.compute_seconds,
            pair.dense.seconds,
            pair.compressed.seconds,
            exchange.compressed.seconds,
            exchange.dense.seconds,
            work(exchange.compressed, exchange.link),
            work(exchange.dense, exchange.link),
        )
        for (nodes, pair), (_, exchange) in zip(synchronous.comparisons, exchanges.comparisons, strict=True)
    ]
