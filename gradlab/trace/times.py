"""How long the steps of a recording took: computing, waiting for averages, and the recorder itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradlab.formatting import format_seconds
from gradlab.jsonable import Jsonable

_FEWEST = 3  # timed steps: the first one warms up


@dataclass(frozen=True)
class RecordedTimes(Jsonable):
    """Median seconds of a step on the rank that computes longest, which all others wait for.

    seconds: a whole step.
    computing: forward, backward with DDP's copies into its buckets, optimizer and data, and exchanges inside a node.
    waited: time for averages between ranks or nodes, after the last gradient was there; before, for a processor.
    recording: time of the recorder.
    bits_per_second: rate at which averages passed through each rank's link, at least; None: not known.
    ranks, steps: numbers of those that were timed. recorded: "rank", or "node" where a record is that of a node.
    """

    seconds: float
    computing: float
    waited: float
    recording: float
    bits_per_second: float | None
    ranks: int
    steps: int
    recorded: str = "rank"

    def __str__(self) -> str:
        return (
            f"a step took {format_seconds(self.seconds)}: computing {format_seconds(self.computing)}, "
            f"waiting for averages {format_seconds(self.waited)}, recording {format_seconds(self.recording)}"
        )


def recorded_times(records: Sequence[np.ndarray], gathers: bool = False) -> RecordedTimes | None:
    """Compute medians of ranks' records, `gradlab.trace.schema.STEP_DTYPE` (T,) each; None if fewer than 3 were timed.

    gathers: whether a record is a node's, whose ranks are more than there are records.
    """
    rows = np.stack(records)
    computing = rows["seconds"] - rows["waited"] - rows["recording"]  # (ranks, T)
    timed = np.isfinite(computing).all(0) & (computing > 0).all(0)
    if timed.sum() < _FEWEST:
        return None
    medians = np.median(computing[:, timed], axis=1)
    slowest = rows[int(np.argmax(medians))][timed]
    seconds, waited, recording = (float(np.median(slowest[name])) for name in ("seconds", "waited", "recording"))
    rate = None if gathers else _link_rate(rows[:, timed])
    recorded = "node" if gathers else "rank"
    return RecordedTimes(seconds, float(medians.max()), waited, recording, rate, len(rows), int(timed.sum()), recorded)


def _link_rate(rows: np.ndarray) -> float | None:
    """Bits per second that a ring passed through each link: of the rank that begins last, as the others wait for it."""
    ranks = len(rows)
    shortest = rows["exchanged"].min(0)
    if ranks == 1 or not (shortest > 0).all():
        return None
    return float(np.median(2 * (ranks - 1) / ranks * 8 * rows["averaged_bytes"][0] / shortest))
