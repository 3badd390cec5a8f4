"""The exchanges since the last optimizer step, whose results the optimizer may apply yet, or never gets.

An exchange hands the optimizer a mean and keeps a residual. If that mean is dropped (`zero_grad` without a step), what
the residual sent is lost, and states have to be those of the last optimizer step again. If a second backward pass adds
to the mean instead, residuals go on: sum of what is applied + residual == sum of the gradients, as after any step.

States are replaced and never written in place. Holding those before an exchange until the optimizer steps therefore
takes no more memory than the exchange itself had taken, unless several exchanges come between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradlab.codec import Tensors


@dataclass
class OpenStep:
    """The exchanges of a run since the last optimizer step.

    followed: whether optimizer steps are known. If not, nothing is noted, and every exchange is a step.
    seen: whether the optimizer has stepped. Before, each exchange counts as an iteration: it may never step.
    taken_back: exchanges that were dropped before the first step, and counted as iterations until then.
    exchanges: those since the last step whose gradients were finite.
    iteration: the first one's.
    states: each exchanged group's state before, with the learning rates by layer before.
    """

    followed: bool = False
    seen: bool = False
    taken_back: int = 0
    exchanges: int = 0
    iteration: int = 0
    states: dict[str, tuple[Tensors, Mapping[str, float]]] = field(default_factory=dict)

    def add(
        self, iteration: int, groups: Iterable[str], states: Mapping[str, Tensors], rates: Mapping[str, float]
    ) -> None:
        """Note an exchange of these groups before its states are committed. The dict of rates is kept, so it must not
        be changed."""
        if not self.followed:
            return
        if not self.exchanges:
            self.iteration = iteration
        self.exchanges += 1
        for name in groups:
            self.states.setdefault(name, (states.get(name, {}), rates))

    @property
    def repeats(self) -> int:
        """The exchanges that the next one continues, within one iteration."""
        return self.exchanges if self.seen else 0

    def forget(self, groups: Iterable[str] | None = None) -> None:
        """End the open step of these groups, None: all: the optimizer has applied it, or nothing is known of it."""
        self.exchanges = 0
        if groups is None:
            self.states.clear()
        for name in groups or ():
            self.states.pop(name, None)
