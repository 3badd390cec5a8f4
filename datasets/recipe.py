"""The recipe of a training run: optimizer and its settings, batch, number of steps, learning rate over time.

Linear warm-up: Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2. Cosine: Loshchilov and Hutter,
"SGDR" (2017), eq. 5 without restarts. Steps: He et al., "Deep Residual Learning" (2016), section 4.2, which divides
the rate by 10 at 32k and 48k of 64k iterations: at one half and three quarters. AdamW: Loshchilov and Hutter,
"Decoupled Weight Decay Regularization" (2019), algorithm 2. Clipping by the norm: Pascanu et al., "On the difficulty of
training recurrent neural networks" (2013), algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from gradlab.errors import GradlabError

Schedule = Literal["cosine", "constant", "step"]
Optimizer = Literal["sgd", "adamw"]


@dataclass(frozen=True)
class Recipe:
    """Settings of SGD with momentum, or of AdamW. Change one with `dataclasses.replace`.

    Raises:
        GradlabError: for a setting out of its range.
    """

    learning_rate: float  # peak rate, reached when the warm-up ends
    momentum: float  # in [0, 1); AdamW's beta_1
    weight_decay: float  # SGD's L2 penalty, AdamW's decay per unit of learning rate; see `decays_vectors`
    batch_size: int  # samples per rank and step
    steps: int  # optimizer steps
    warmup_steps: int = 0  # steps of linear warm-up, at most `steps`
    schedule: Schedule = "cosine"
    nesterov: bool = False  # Nesterov's momentum, with SGD only
    optimizer: Optimizer = "sgd"
    second_momentum: float = 0.999  # in [0, 1); AdamW's beta_2
    end_factor: float = 0.0  # in [0, 1]; the rate at the end of "cosine", over the peak
    clip_norm: float | None = None  # largest L2 norm of the averaged gradient of all parameters; None: no clipping
    decays_vectors: bool = True  # False: no weight decay of parameters of less than two dimensions

    def __post_init__(self) -> None:
        rules = {
            "learning_rate": (0 < self.learning_rate < math.inf, "a positive number"),
            "momentum": (0 <= self.momentum < 1, "0 <= momentum < 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "steps": (self.steps >= 1, "at least 1"),
            "warmup_steps": (0 <= self.warmup_steps <= self.steps, f"0 to steps = {self.steps}"),
            "schedule": (self.schedule in get_args(Schedule), f"one of {', '.join(get_args(Schedule))}"),
            "nesterov": (
                not self.nesterov or (self.momentum > 0 and self.optimizer == "sgd"),
                "SGD and a momentum above 0 with it",
            ),
            "optimizer": (self.optimizer in get_args(Optimizer), f"one of {', '.join(get_args(Optimizer))}"),
            "second_momentum": (0 <= self.second_momentum < 1, "0 <= second_momentum < 1"),
            "end_factor": (0 <= self.end_factor <= 1, "0 <= end_factor <= 1"),
            "clip_norm": (self.clip_norm is None or 0 < self.clip_norm < math.inf, "a positive number, or None"),
        }
        for setting, (fine, expected) in rules.items():
            if not fine:
                raise GradlabError(f"recipe: {setting} is {getattr(self, setting)!r}, expected {expected}")


def learning_rate_at(recipe: Recipe, step: int) -> float:
    """Compute the learning rate of one step, counted from 0.

    In a warm-up of W steps it is peak ((step + 1) / W). Afterwards p = (step - W) / (steps - W) in [0, 1] is the
    progress. "cosine": peak (e + (1 - e) (1 + cos(pi p)) / 2) with e =
    `end_factor`. "constant": peak. "step": peak, peak / 10 from steps / 2 on, and
    peak / 100 from 3 steps / 4 on. Steps past the end keep the last rate.
    """
    peak, warmup, steps = recipe.learning_rate, recipe.warmup_steps, recipe.steps
    if step < warmup:
        return peak * ((step + 1) / warmup)
    if recipe.schedule == "cosine":
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        end = recipe.end_factor
        return peak * (end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)
    if recipe.schedule == "step":
        return peak * 0.1 ** ((2 * step >= steps) + (4 * step >= 3 * steps))
    return peak
