"""The settings of one run of the reference trainer, as plain JSON between launcher and ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradlab.errors import GradlabError
from gradlab.formatting import parse_bytes

if TYPE_CHECKING:
    from gradlab.datasets import Recipe

#: Settings without an option of their own: `-s NAME=VALUE`.
BY_NAME = (
    *("learning_rate", "momentum", "seed", "train_limit", "every", "bucket_cap_mb", "threads", "deterministic"),
    *("trace_steps", "link"),
)


@dataclass(frozen=True)
class TrainSettings:
    """One run. None takes what the workload's recipe says."""

    workload: str  # name
    data: str | None = None  # path, for workloads that need one
    ranks: int = 2  # world size
    steps: int | None = None  # optimizer steps
    batch_size: int | None = None  # samples per rank and step
    learning_rate: float | None = None  # peak
    momentum: float | None = None  # of the optimizer
    seed: int = 0  # of model, data order and augmentation
    threads: int = 1  # per rank
    bucket_cap_mb: float = 25.0  # DDP's bucket size in MiB
    capture: str | None = None  # folder for a trace
    every: int = 1  # record every so many steps
    budget: str | None = None  # bytes of the whole trace at most, as 20GB
    artifact: str | None = None  # file of a plan to train with
    deterministic: bool = False  # take means in rank order
    name: str = "run"  # how reports call the run
    train_limit: int | None = None  # first so many training samples
    emulate: bool = False  # one process plays all ranks
    trace_steps: tuple[int, ...] = ()  # iterations whose spans a compressed run keeps
    link: str | None = None  # speed of each rank's link, which is limited for it, as 50mbit
    log: str | None = None  # file for the run's numbers, step by step

    def check(self) -> None:
        """Refuse what no run can do."""
        for setting in ("ranks", "steps", "batch_size", "threads", "every", "train_limit"):
            value = getattr(self, setting)
            if value is not None and value < 1:
                raise GradlabError(f"{setting} = {value}, expected at least 1")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1e6:
            raise GradlabError(f"learning rate = {self.learning_rate}, expected a positive number")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise GradlabError(f"momentum = {self.momentum}, expected a number in [0, 1)")
        if not 0 <= self.seed < 2**63:
            raise GradlabError(f"seed = {self.seed}, expected a whole number from 0 to 2^63 - 1")
        if not 0 < self.bucket_cap_mb < 1e6:
            raise GradlabError(f"bucket size = {self.bucket_cap_mb} MiB, expected above 0 and below 1e6")
        if self.budget is not None:
            parse_bytes(self.budget, "--budget")
        self._check_together()

    def _check_together(self) -> None:
        if self.budget and not self.capture:
            raise GradlabError("a budget is a recording's: --budget needs --capture")
        if self.link and (self.emulate or self.ranks == 1):
            raise GradlabError("a link is between real ranks: link needs --ranks 2 or more, not --emulate")
        if self.emulate and (self.artifact or not self.capture):
            raise GradlabError("emulated nodes are there to be recorded: --emulate needs --capture, and no --compress")
        if self.ranks == 1 and (self.capture or self.artifact):
            option = "--emulate" if self.emulate else "--ranks"
            raise GradlabError(f"one rank exchanges no gradients: recording and compressing need {option} 2 or more")
        if self.log and self.emulate:
            raise GradlabError("a log is of real ranks: --log needs --ranks, not --emulate")
        if self.trace_steps and not self.artifact:
            raise GradlabError("a chrome trace shows the engine at work: --chrome-trace needs --compress")
        if self.capture and self.artifact:
            raise GradlabError("a run either records (--capture) or compresses (--compress), not both")

    def applied_to(self, recipe: Recipe) -> Recipe:
        """Return the workload's recipe with this run's own values; a warm-up never exceeds the steps."""
        steps = self.steps or recipe.steps
        momentum = recipe.momentum if self.momentum is None else self.momentum
        return dataclasses.replace(
            recipe,
            momentum=momentum,
            nesterov=recipe.nesterov and momentum > 0,
            steps=steps,
            warmup_steps=min(recipe.warmup_steps, steps),
            batch_size=self.batch_size or recipe.batch_size,
            learning_rate=self.learning_rate or recipe.learning_rate,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainSettings:
        return cls(**json.loads(text))


def read_settings(by_name: Mapping[str, Any], **options: Any) -> TrainSettings:
    """Join the settings of `-s` and those with an option of their own."""
    from gradlab.codec.settings import built

    if unknown := sorted(set(by_name) - set(BY_NAME)):
        raise GradlabError(f"train: no setting {', '.join(unknown)[:200]}; known: {', '.join(BY_NAME)}")
    return dataclasses.replace(built(TrainSettings, "train", {"workload": "", **by_name}), **options)
