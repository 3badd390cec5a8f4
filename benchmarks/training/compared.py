"""A method that campaigns compare: a published one, by `gradlab.plan.method_plan` alone, or a uniform plan of a codec.

A title that bears a published method's name says every setting by which the row differs from the recipe of that name
(tests/contract/test_benchmarks.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.layout import Layer
from gradlab.plan import Plan, Wrap, lgc_plan, method_plan
from gradlab.plan.recipes import METHODS
from gradlab.trace import Trace


@dataclass(frozen=True)
class Compared:
    """A method of training.

    codec: codec of a uniform plan; "" for a published method, and for dense training. settings: of the codec, and other
    arguments of its plan. wrappers: around the codec; None: the default ones. published: a published method, or "LGC",
    in a ring. wrapper_settings: settings that differ from a published method's, by wrapper. by_layer: whether L-GreCo
    chooses the codec's setting for each layer. momentum: whether the optimizer has momentum; False where the method has
    its own. rate: the learning rate, in units of the common one.
    """

    codec: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Wrap, ...] | None = None
    published: str = ""
    wrapper_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by_layer: bool = False
    momentum: bool = True
    rate: float = 1.0

    def plan(self, layers: Sequence[Layer], warmup: int, **more: Any) -> Plan:
        """Make the plan of a method that needs no recording; more: settings, and arguments of a uniform plan."""
        settings = {**more, **self.settings}
        if self.published == "LGC":
            return lgc_plan(layers, "ring", warmup_steps=warmup, **settings)
        if self.published:
            return method_plan(
                layers, self.published, warmup_steps=warmup, wrapper_settings=self.wrapper_settings, **settings
            )
        if not self.codec:
            return Plan(tuple(layers))
        around = {} if self.wrappers is None else {"wrappers": self.wrappers}
        return Plan.uniform(layers, self.codec, warmup_steps=warmup, **around, **settings)

    def fitted(self, trace: Trace | None, warmup: int, layers: Sequence[Layer], **more: Any) -> Plan:
        """Make the plan: on a recording, where L-GreCo chooses the settings."""
        if not self.by_layer:
            return self.plan(layers, warmup, **more)
        if trace is None:
            raise SystemExit("a plan by layer is fitted on a recording: give one")
        fitted = fit_lgreco(trace, self.codec, dict(self.settings), warmup_steps=warmup, metric="squared-l2")
        return fitted.artifact().plan

    @property
    def codec_settings(self) -> dict[str, Any]:
        """Settings beside the codec's defaults: a published method's, and the row's own."""
        return {**(METHODS[self.published].settings if self.published in METHODS else {}), **self.settings}


def published(
    name: str, momentum: bool = True, rate: float = 1.0, wrapper_settings: Any = None, **settings: Any
) -> Compared:
    """Name a published method, with settings that differ from its recipe's."""
    return Compared("", settings, published=name, wrapper_settings=wrapper_settings or {}, momentum=momentum, rate=rate)
