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
from gradlab.plan.plan import Group, Wrap, habitual_wrappers


@dataclass(frozen=True)
class Candidate:
    """A codec for one layer: settings as plain JSON values, what it has learned, and wrappers, None for its habit."""

    codec: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    learned: Tensors = field(default_factory=dict, compare=False)
    wrappers: tuple[Wrap, ...] | None = None

    def build(self) -> Codec:
        """The codec itself.

        Raises:
            GradlabError: for an unknown codec, or settings out of range.
        """
        method = codecs.get(self.codec)
        return method(build_settings(method, self.settings), self.learned)

    def group(self, layer: str) -> Group:
        """A plan's group of one layer."""
        around = habitual_wrappers(self.build()) if self.wrappers is None else self.wrappers
        return Group(layer, (layer,), self.codec, dict(self.settings), around)

    def __str__(self) -> str:
        return f"{self.codec}({', '.join(f'{key}={value}' for key, value in self.settings.items())})"


@torch.no_grad()
def squared_errors(
    layer: Layer, gradient: torch.Tensor, candidates: Sequence[Candidate], *, seed: int = 0
) -> list[float]:
    """||C(x) - x||^2 of each candidate C for one rank's gradient x of a layer, without feedback.

    gradient: of the layer's shape; seed: of the draws of codecs that round or choose at random.
    """
    context = Context(0, 1, 0, group=layer.name, seed=seed)
    found: dict[int, float] = {}
    by_codec: dict[str, list[int]] = {}
    for place, candidate in enumerate(candidates):
        by_codec.setdefault(candidate.codec, []).append(place)
    for name, places in by_codec.items():
        built = [candidates[place].build() for place in places]
        errors = codecs.get(name).squared_errors(built, layer, gradient, context)
        found |= dict(zip(places, errors, strict=True))
    return [found[place] for place in range(len(candidates))]
