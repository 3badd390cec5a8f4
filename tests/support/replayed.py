"""A replay of a chosen cosine, for what follows from one: no recording has exactly that."""

from __future__ import annotations


class Replayed:
    """What `forecast_speed` asks of a replay whose codecs were not timed."""

    codec_seconds = at_nodes = None

    def __init__(self, cosine: float | None, length: int = 1, memory: bool = False, caution: str | None = None) -> None:
        self.judged_cosine, self.judged_length, self.memory, self.caution = cosine, length, memory, caution

    def summary(self) -> Replayed:
        return self
