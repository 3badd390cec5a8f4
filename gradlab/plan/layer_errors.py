"""The error that settings of a codec make on one layer's gradient: what a plan by layer is chosen by.

Alimohammadi et al., "L-GreCo", MLSys 2024, section 4: gradients accumulated over a window of iterations are compressed
with every setting, without error feedback, and the L2 distance to what comes out is the error. Settings of one codec
share work where they can: top-k's densities one sort, PowerSGD's ranks one decomposition (appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gradlab import codecs
from gradlab.codec import Codec, Context, Tensors
from gradlab.codec.settings import build_settings
from gradlab.layout import Layer
from gradlab.plan.plan import Group, Wrap, default_wrappers


@dataclass(frozen=True)
class Candidate:
    """A codec for one layer, with settings in plain JSON and tensors that it learned from data.

    wrappers: around the codec, outermost first; None: its default ones.
    """

    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    learned: Tensors = field(default_factory=dict, compare=False)
    wrappers: tuple[Wrap, ...] | None = None

    def build(self) -> Codec:
        """Build the codec, without wrappers."""
        method = codecs.get(self.codec)
        return method(build_settings(method, self.settings), self.learned)

    def group(self, layer: str) -> Group:
        """Return a plan's group of one layer alone, named after it."""
        around = default_wrappers(self.build()) if self.wrappers is None else self.wrappers
        return Group(layer, (layer,), self.codec, dict(self.settings), around)

    def __str__(self) -> str:
        return f"{self.codec}({', '.join(f'{key}={value}' for key, value in self.settings.items())})"


@torch.no_grad()
def squared_errors(
    layer: Layer, gradient: torch.Tensor, candidates: Sequence[Candidate], *, seed: int = 0
) -> list[float]:
    """Measure ||C(x) - x||^2 of each candidate C for one rank's gradient x of a layer, without error feedback, in the
    unit of x squared. `seed` is that of codecs that round or choose at random."""
    context = Context(0, 1, 0, group=layer.name, seed=seed)
    errors: dict[int, float] = {}
    by_codec: dict[str, list[int]] = {}
    for number, candidate in enumerate(candidates):
        by_codec.setdefault(candidate.codec, []).append(number)
    for name, numbers in by_codec.items():
        built = [candidates[number].build() for number in numbers]
        errors |= zip(numbers, codecs.get(name).squared_errors(built, layer, gradient, context), strict=True)
    return [errors[number] for number in range(len(candidates))]
