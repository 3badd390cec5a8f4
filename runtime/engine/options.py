"""The options of a run, and the values that it reads anew in every iteration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradlab import version
from gradlab.codec import Codec
from gradlab.ddp.optimizers import HeldLayers, check_optimizer_and_scaler, describe_optimizer
from gradlab.errors import GradlabError
from gradlab.executor import PlanRun, RunSettings
from gradlab.executor.rules import levels
from gradlab.executor.ticks import SEGMENT_BYTES
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import compressed_layers
from gradlab.plan.plan import EXCHANGES
from gradlab.runtime.engine.device import HostDevice
from gradlab.runtime.network.communicator import Communicator
from gradlab.runtime.timeline import Timeline
from gradlab.workspace import RecyclingWorkspace


@dataclass(frozen=True)
class RunOptions:
    """Options of `Exchange` and `CompressionState`, which describe them."""

    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
    scaler: torch.amp.GradScaler | None = None
    deterministic: bool = False
    segment_bytes: int = SEGMENT_BYTES
    measure_every: int = 10
    trace_steps: Collection[int] = ()
    non_finite_limit: int = 50
    check_requests: bool = False
    history: int = 1000
    hold_unused: bool = False
    rules: Mapping[str, str] | str | None = None
    exchanges: str = "gradients"

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, Iterator):  # which could be read once only
            object.__setattr__(self, "optimizer", tuple(self.optimizer))

    @property
    def scaled(self) -> bool:
        """Whether a loss scaler is in use."""
        return self.scaler is not None and self.scaler.is_enabled()

    def check(self) -> None:
        """Refuse what would fail only when it is used."""
        check_optimizer_and_scaler(self.optimizer, self.scaler)
        for name in ("deterministic", "check_requests", "hold_unused"):
            if not isinstance(getattr(self, name), bool):
                raise GradlabError(f"{name} = {getattr(self, name)!r}, expected True or False")
        if not isinstance(self.trace_steps, Collection):
            raise GradlabError(f"trace_steps = {self.trace_steps!r}, expected a list of iterations")
        for name, least in (("segment_bytes", 1), ("measure_every", 0), ("non_finite_limit", 1), ("history", 1)):
            _require_whole(name, getattr(self, name), least)
        levels(self.rules)
        if self.exchanges not in EXCHANGES:
            raise GradlabError(f"exchanges = {self.exchanges!r}, expected one of {', '.join(EXCHANGES)}")
        for step in self.trace_steps:
            _require_whole("a step of trace_steps", step, 0)

    def same_everywhere(self, plan: Plan) -> dict[str, Any]:
        """Options and plan, which have to be equal on all ranks, as plain JSON."""
        names = ("segment_bytes", "measure_every", "hold_unused", "non_finite_limit", "scaled", "exchanges")
        return {
            "the plan (sha256)": plan.digest,
            "deterministic": bool(self.deterministic),
            "check_requests": bool(self.check_requests),
            **{name: getattr(self, name) for name in names},
            "trace_steps": list(self.trace_steps),
            "optimizer": str(describe_optimizer(self.optimizer)),
            "rules": levels(self.rules),
            # Codecs' bits and random draws may differ between versions.
            "the versions": {"gradlab": version.VERSION, "torch": str(torch.__version__)},
        }


class Surroundings:
    """The options, device and memory of a run on one rank, and values that it reads anew in each iteration.

    held: the layers by the optimizers that train them, with their learning rates.
    parameters: their values by layer name as they are when they are asked for.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        options: RunOptions,
        device: HostDevice,
        values: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    ) -> None:
        """Take parameters by layer name; `values` gives what a rank holds of them (None: all)."""
        self.options, self.device = options, device
        self.held = HeldLayers(options.optimizer, {parameter: name for name, parameter in parameters.items()})
        read = {name: one.detach for name, one in parameters.items()} if values is None else values
        self.parameters: Mapping[str, torch.Tensor] = _Values(read)
        self.workspace = RecyclingWorkspace()
        self._timeline = Timeline(options.trace_steps)

    def loss_scale(self) -> float:
        """Return the loss scaler's factor, 1 without one."""
        return self.options.scaler.get_scale() if self.options.scaler else 1.0

    def communicator(self, group: dist.ProcessGroup, **options: Any) -> Communicator:
        """Make a communicator of a group, with this run's memory and options."""
        given = {"deterministic": self.options.deterministic, "check_requests": self.options.check_requests, **options}
        return Communicator(
            group, timeline=self._timeline, workspace=self.workspace, device=self.device.device, **given
        )

    def run(self, plan: Plan, rank: int, world_size: int, codecs: Mapping[str, Codec] | None = None) -> PlanRun:
        """Make a rank's run of a plan; `codecs` are those of the groups that it carries (None: all)."""
        plain, device = self.held.plain_sgd(compressed_layers(plan)), self.device.device
        settings = RunSettings(plain, self.options.hold_unused, replan_beside=True, device=device)
        return PlanRun(plan, rank, world_size, settings, codecs=codecs, workspace=self.workspace)


class _Values(Mapping[str, torch.Tensor]):
    """The values of parameters, by layer name. A tensor that was detached once would go on in the old memory after
    `Module.to` or `parameter.data = ...`."""

    def __init__(self, read: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def _require_whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise GradlabError(f"{name} = {value!r}, expected a whole number from {least}")
