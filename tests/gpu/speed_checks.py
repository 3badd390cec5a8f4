"""Encoding and decoding of every codec beside a copy of the same tensor within the device, by the device's clock."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from codec_speed import CASES, compare
from outcome import MEASURED, Check, Outcome, Place

from gradlab import codecs
from gradlab.layout import Layer

SUBJECTS: list[tuple[str, Mapping[str, Any]]] = [
    (name, settings) for name in codecs.names() for settings in CASES.get(name, [{}])
]


def measure(place: Place, codec: str, settings: Mapping[str, Any]) -> Outcome:
    """Medians over nine turns; no timing passes or fails."""
    shape = (1024, place.numel // 9216, 3, 3) if codec == "gradiveq" else (4096, place.numel // 4096)
    times = compare(
        codec, settings, [Layer("weight", shape, "convolution" if len(shape) == 4 else "linear")], 9, place.device
    )
    ratios = ", ".join(f"{key} {times[key]:.1f}" for key in ("encode", "decode", "own"))
    return Outcome(MEASURED, f"{ratios} copies of {times['copy'] * 1e3:.3f} ms")


def _title(codec: str, settings: Mapping[str, Any]) -> str:
    return codec + "".join(f", {key} {value}" for key, value in settings.items())


CHECKS: dict[str, Check] = {
    _title(codec, settings): functools.partial(measure, codec=codec, settings=settings) for codec, settings in SUBJECTS
}
