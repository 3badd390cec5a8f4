"""Settings of a recording with their own checks, and a trace's account of its run."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradlab.ddp.optimizers import HeldLayers
from gradlab.errors import GradlabError
from gradlab.formatting import parse_bytes
from gradlab.layout import canonical_json
from gradlab.trace.schema import STORED_DTYPE

SEGMENT_BYTES = 2**30


@dataclass(frozen=True)
class StepSettings:
    """Iterations that are recorded, and how they are stored."""

    every: int = 1  # iterations from one recorded one to the next
    start: int = 0  # first recorded iteration
    max_steps: int | None = None  # recorded iterations at most; None: no limit
    dtype: str = "float32"  # stored type
    segment_bytes: int = SEGMENT_BYTES  # size after which a new file begins
    budget: int | str | None = None  # bytes of the whole trace at most, as "20GB"; None: no limit
    expected_steps: int | None = None  # iterations of the run, if known: a budget spreads steps over them
    sample_seed: int = 0  # of the samples of layers that a budget leads to

    @property
    def wanted_steps(self) -> int | None:
        """Iterations that are recorded without a budget; None: not known."""
        if self.expected_steps is None:
            return self.max_steps
        due = max(1, -(-(self.expected_steps - self.start) // self.every))
        return due if self.max_steps is None else min(due, self.max_steps)

    def check(self) -> None:
        """Refuse the first setting that is out of range."""
        least = {"every": 1, "start": 0, "max_steps": 1, "segment_bytes": 1, "expected_steps": 1, "sample_seed": 0}
        for name, smallest in least.items():
            if name not in ("max_steps", "expected_steps") or getattr(self, name) is not None:
                _require_whole(name, getattr(self, name), smallest)
        if self.budget is not None:
            parse_bytes(self.budget, "budget")
        if self.dtype not in STORED_DTYPE:
            raise GradlabError(f"dtype is {self.dtype!r}, expected one of {', '.join(STORED_DTYPE)}")

    def finished(self, taken: int) -> bool:
        """Say whether nothing is left to record after so many recorded iterations."""
        return self.max_steps is not None and taken >= self.max_steps

    def wants(self, iteration: int, taken: int) -> bool:
        """Say whether an iteration, from 0, is to be recorded, after so many recorded ones."""
        due = iteration >= self.start and (iteration - self.start) % self.every == 0
        return due and not self.finished(taken)


@dataclass(frozen=True)
class RecorderSettings(StepSettings):
    """The same, and how steps wait for the disk. Must be equal on all ranks."""

    queue_steps: int = 8  # steps that may wait for the disk
    on_full: str = "wait"  # when that many wait: "wait", or "drop" the step
    flush_seconds: float = 5.0  # longest time that a step waits in memory for its block to fill

    def check(self) -> None:
        super().check()
        _require_whole("queue_steps", self.queue_steps, 1)
        if self.on_full not in ("wait", "drop"):
            raise GradlabError(f"on_full is {self.on_full!r}, expected 'wait' or 'drop'")
        if not isinstance(self.flush_seconds, (int, float)) or not 0 < self.flush_seconds < 1e6:
            raise GradlabError(f"flush_seconds is {self.flush_seconds!r}, expected a positive number of seconds")


def _require_whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise GradlabError(f"{name} is {value!r}, expected a whole number of at least {least}")


def announce(path: Path, size: object, settings: StepSettings) -> None:
    """Say on standard error how large a recording within a budget will be; without a budget to the log alone."""
    line = f"recording {path}: {size}"
    if settings.budget is None:
        logging.getLogger("gradlab.capture").info(line)
    else:
        print(line, file=sys.stderr, flush=True)


def run_metadata(model: nn.Module, settings: StepSettings) -> dict[str, Any]:
    """Collect what a manifest says of any run, in plain JSON, unless the user's metadata say it."""
    device = next(model.parameters()).device.type
    return {
        **({} if device == "cpu" else {"device": device}),
        "torch": str(torch.__version__),
        "model": type(model).__name__,
        "every": settings.every,
        "start": settings.start,
        "max_steps": settings.max_steps,
    } | ({} if settings.budget is None else {"budget": parse_bytes(settings.budget)})


def optimizer_metadata(held: HeldLayers) -> dict[str, Any]:
    """Collect what a manifest says of the optimizers, in plain JSON, unless the user's metadata say it.

    A replay has to know what the run's residuals would be multiplied by, and a fit what training would refuse: whether
    SGD without momentum trains the layers, and each layer's `OptimizerSettings`.
    """
    settings = held.settings()
    plain = held.plain_sgd() and not held.missing
    return {"plain_sgd": plain, "optimizer": None if settings is None else settings.to_json()}


def warn_of_missing(held: HeldLayers) -> None:
    """Name recorded layers that no optimizer holds, if one was given."""
    if held.optimizers and held.missing:
        warnings.warn(
            f"the optimizers hold {held.total - len(held.missing)} of {held.total} recorded layers (not "
            f"{held.named_missing()}): the trace cannot say what trains the others; give all optimizers that train the "
            "model: optimizer=[a, b]",
            stacklevel=4,
        )


def check_metadata(metadata: Any) -> None:
    """Refuse metadata that JSON cannot hold."""
    try:
        canonical_json(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise GradlabError(f"metadata cannot be written as JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise GradlabError(f"metadata is a {type(metadata).__name__}, expected a dict of JSON values")
