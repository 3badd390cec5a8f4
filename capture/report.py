"""What a recorder did, for its user."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecorderReport:
    """Of one rank: steps committed and lost, bytes of gradients committed, and why recording failed, if it did."""

    path: str
    steps_written: int
    steps_lost: int
    bytes_written: int
    reason: str | None = None

    def __str__(self) -> str:
        text = f"{self.path}: {self.steps_written} steps recorded, {self.bytes_written / 1e6:.1f} MB"
        if self.steps_lost:
            text += f"; {self.steps_lost} steps lost"
        return text + (f" ({self.reason})" if self.reason else "")
