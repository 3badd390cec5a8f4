"""When and how a recorder records: plain settings with their own checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradlab.errors import GradlabError
from gradlab.layout import canonical_json
from gradlab.trace.schema import STORED_DTYPE

SEGMENT_BYTES = 2**30


@dataclass(frozen=True)
class RecorderSettings:
    """Must be equal on all ranks."""

    every: int = 1  # iterations from one recorded one to the next
    start: int = 0  # first recorded iteration
    max_steps: int | None = None  # recorded iterations at most; None: no limit
    queue_steps: int = 8  # steps that may wait for the disk
    on_full: str = "wait"  # when that many wait: "wait", or "drop" the step
    dtype: str = "float32"  # stored type
    flush_seconds: float = 5.0  # longest time that a step waits in memory for its block to fill
    segment_bytes: int = SEGMENT_BYTES  # size after which a new file begins

    def check(self) -> None:
        """Raises GradlabError for the first setting that is out of range."""
        for name, least in (("every", 1), ("start", 0), ("max_steps", 1), ("queue_steps", 1), ("segment_bytes", 1)):
            value = getattr(self, name)
            if value is None and name == "max_steps":
                continue
            if type(value) is not int or value < least:
                raise GradlabError(f"{name} is {value!r}, expected a whole number of at least {least}")
        if self.on_full not in ("wait", "drop"):
            raise GradlabError(f"on_full is {self.on_full!r}, expected 'wait' or 'drop'")
        if self.dtype not in STORED_DTYPE:
            raise GradlabError(f"dtype is {self.dtype!r}, expected one of {', '.join(STORED_DTYPE)}")
        if not isinstance(self.flush_seconds, (int, float)) or not 0 < self.flush_seconds < 1e6:
            raise GradlabError(f"flush_seconds is {self.flush_seconds!r}, expected a positive number of seconds")

    def finished(self, taken: int) -> bool:
        """Whether nothing is left to record after `taken` recorded iterations."""
        return self.max_steps is not None and taken >= self.max_steps

    def wants(self, iteration: int, taken: int) -> bool:
        """Whether this iteration is to be recorded, `taken` having been recorded before it."""
        due = iteration >= self.start and (iteration - self.start) % self.every == 0
        return due and not self.finished(taken)


def check_metadata(metadata: Any) -> None:
    """Raises GradlabError for anything but a dict of JSON values."""
    try:
        canonical_json(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise GradlabError(f"metadata cannot be written as JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise GradlabError(f"metadata is a {type(metadata).__name__}, expected a dict of JSON values")
