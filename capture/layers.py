"""Choose the layers whose gradients are recorded."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from gradlab.errors import GradlabError
from gradlab.layout import Layer

LayerChoice = str | Sequence[str] | Callable[[Layer], bool] | None


def choose_layers(pairs: Sequence[tuple[Layer, nn.Parameter]], choice: LayerChoice) -> list[tuple[Layer, nn.Parameter]]:
    """Choose layers, in order, by names, fnmatch patterns ("layer1.*.weight") or a function of a Layer; None: all."""
    for pattern in _patterns(choice):
        _check_pattern(pattern, [layer.name for layer, _ in pairs])
    chosen = [pair for pair in pairs if admits(choice, pair[0])]
    if not chosen:
        raise GradlabError("layers: the choice admits none of the model's trainable layers; choose at least one")
    return chosen


def admits(choice: LayerChoice, layer: Layer) -> bool:
    """Say whether a choice admits a layer. choice: as `choose_layers` takes it."""
    if callable(choice):
        return bool(choice(layer))
    return choice is None or any(fnmatchcase(layer.name, pattern) for pattern in _patterns(choice))


def _patterns(choice: LayerChoice) -> list[str]:
    return [choice] if isinstance(choice, str) else [] if choice is None or callable(choice) else list(choice)


def _check_pattern(pattern: object, names: Sequence[str]) -> None:
    if not isinstance(pattern, str):
        raise GradlabError(f"layers: expected names or patterns, got {pattern!r}")
    if not any(fnmatchcase(name, pattern) for name in names):
        close = difflib.get_close_matches(pattern, names, n=3) or list(names)[:3]
        raise GradlabError(f"layers: {pattern!r} matches no trainable layer; there are {', '.join(close)}, ...")
