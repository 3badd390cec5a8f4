"""How a plan by layer was made: sizes, errors on the windows chosen on and on later ones, and what every layer got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradlab.jsonable import Jsonable
from gradlab.saving import Saving


@dataclass(frozen=True)
class WindowErrors(Jsonable):
    """A plan's relative errors by the metric that it was chosen by, as shares of sending zeros.

    By `l2`, the sum of the errors' norms over that of the gradients'; by `squared-l2`, the root of the same of squares.
    held_out: None: there are no later windows.
    """

    chosen_on: float
    held_out: float | None


@dataclass(frozen=True)
class PlanErrors(Jsonable):
    """Relative errors of the plan by layer and of the uniform plan."""

    plan: WindowErrors
    uniform: WindowErrors


@dataclass(frozen=True)
class LayerSetting(Jsonable):
    """Setting of one layer, beside the uniform plan's: costs, and errors on the windows chosen on over the l2 norm."""

    name: str
    numel: int
    chosen: str
    codec: str
    settings: Mapping[str, Any]
    cost: float
    uniform_cost: float
    relative_error: float
    uniform_relative_error: float


@dataclass(frozen=True)
class LgrecoProvenance(Jsonable):
    """How a plan by layer was made; its JSON is the artifact's metadata.

    size, uniform_size: cost of the plan and of the uniform plan; gain: the latter over the former.
    gap: share of its size that the plan may be too large by; 0: no plan is smaller.
    payload_bytes, uniform_payload_bytes, dense_payload_bytes: bytes of the whole model, per rank and step.
    sent_bytes: bytes that a rank sends for the first of these.
    windows: first and last iteration of each; windows_chosen_on: how many of them, from the first, it was chosen on.
    alpha: the error allowed, in the uniform plan's; None: a budget was given. budget: the same, summed over layers.
    alone: cost of the best plan of one codec and dense layers, by codec; empty: one codec.
    sample: extent of the trace, if errors are those of samples; None: it holds all values.
    """

    method: str
    trace: str
    size: float
    gap: float
    uniform_size: float
    gain: float
    payload_bytes: float
    uniform_payload_bytes: float
    dense_payload_bytes: float
    sent_bytes: float
    relative_error: PlanErrors
    windows: tuple[tuple[int, int], ...]
    windows_chosen_on: int
    layers: tuple[LayerSetting, ...]
    codec: str
    reference: Mapping[str, Any]
    alpha: float | None
    budget: float
    metric: str
    cost: str
    world_size: int
    varied: str
    uniform: str
    alone: Mapping[str, float] = field(default_factory=dict)
    sample: str | None = None

    @property
    def saving(self) -> Saving:
        """How many times fewer bytes a rank sends in a compressed step, of the whole model."""
        return Saving.of_sent(self.sent_bytes, self.dense_payload_bytes, self.world_size)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, by field; those with a default only where there are any."""
        missing = {name for name in ("alone", "sample") if not getattr(self, name)}
        return {name: value for name, value in super().to_json().items() if name not in missing}
