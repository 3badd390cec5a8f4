"""What an engine is told once, and what it asks anew in every iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gradlab.segments import SEGMENT_BYTES


@dataclass(frozen=True)
class EngineOptions:
    """segment_bytes: gradients encoded before the next collective is issued; measure_every: steps between measured
    ones, 0 for none; hold_unused: keep what is due to a layer whose gradient is zero on all ranks, because DDP may
    throw the result away; non_finite_limit: non-finite steps in a row that end the run; plain_sgd: whether the
    optimizer is SGD without momentum; scaled: whether a loss scaler is in use;
    trace_steps: iterations whose spans are kept."""

    segment_bytes: int = SEGMENT_BYTES
    measure_every: int = 1
    hold_unused: bool = False
    non_finite_limit: int = 50
    plain_sgd: bool = False
    scaled: bool = False
    trace_steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Surroundings:
    """What the engine reads anew in each iteration. learning_rates: by layer name; loss_scale: of the loss scaler;
    parameters: by layer name, the model's own tensors."""

    learning_rates: Callable[[], dict[str, float]]
    loss_scale: Callable[[], float]
    parameters: Mapping[str, torch.Tensor]
