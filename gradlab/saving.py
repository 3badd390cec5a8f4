"""The saving by compression, against the gradients as they are and against plain 16-bit reduction.

Bytes that a rank sends are compared with those of a ring all-reduce between as many ranks. Without any codec,
gradients can be reduced in bfloat16 or float16, and where mixed precision is used they often are. A codec that sends 4
times fewer bytes than 32 bits sends half of what such a training sends. So both factors stand wherever one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradlab.collectives import ring_sends
from gradlab.formatting import format_ratio

_BYTES = 2  # of a real number in bfloat16 or float16


def bytes_in_16_bits(parameter: torch.Tensor, numel: int | None = None) -> int:
    """Return the bytes of a plain 16-bit reduction of a gradient, or of `numel` of its elements: 2 per real number, 4
    per complex one."""
    return _BYTES * (parameter.numel() if numel is None else numel) * (2 if parameter.is_complex() else 1)


@dataclass(frozen=True)
class Saving:
    """How many times fewer bytes are sent than by the gradients as they are, and in 16 bits; None: not known.

    >>> print(Saving.of(payload_bytes=100, dense_bytes=400))
    4.00x (2.00x vs 16 bits)
    """

    ratio: float | None
    ratio_to_16_bits: float | None

    @classmethod
    def of(cls, payload_bytes: float, dense_bytes: float, half_bytes: float | None = None) -> Saving:
        """Divide by the bytes that are sent; for 0, neither factor is known. `half_bytes` are those of the gradients in
        16 bits, None: half of `dense_bytes`, which are of float32 gradients."""
        if not payload_bytes:
            return cls(None, None)
        return cls(dense_bytes / payload_bytes, (dense_bytes / 2 if half_bytes is None else half_bytes) / payload_bytes)

    @classmethod
    def of_sent(cls, sent_bytes: float, dense_bytes: float, world_size: int, half_bytes: float | None = None) -> Saving:
        """Divide what a ring all-reduce sends by what is sent. One rank sends nothing: neither factor is known.

        >>> print(Saving.of_sent(sent_bytes=600, dense_bytes=400, world_size=4))
        1.00x (0.500x vs 16 bits)
        """
        sends = ring_sends(world_size)
        return cls.of(
            sent_bytes if sends else 0, sends * dense_bytes, None if half_bytes is None else sends * half_bytes
        )

    @classmethod
    def read(cls, report: Mapping[str, Any]) -> Saving:
        """Read what `to_json` wrote into a report. A report of a dense run has no factors."""
        return cls(report.get("compression_ratio"), report.get("ratio_to_16_bits"))

    def to_json(self) -> dict[str, float | None]:
        """Write both factors, under the keys that reports have."""
        return {"compression_ratio": self.ratio, "ratio_to_16_bits": self.ratio_to_16_bits}

    @property
    def cells(self) -> tuple[str, str]:
        """Both factors as two cells of a table, "ratio" and "vs 16 bits"."""
        return format_ratio(self.ratio), format_ratio(self.ratio_to_16_bits)

    def text(self, what: str = "") -> str:
        """Write both factors in a sentence: "4.00x fewer bytes (2.00x vs 16 bits)" with `what` = "fewer bytes"."""
        ratio, to_16_bits = self.cells
        beside = "" if self.ratio_to_16_bits is None else f" ({to_16_bits} vs 16 bits)"
        return f"{ratio}{what and ' ' + what}{beside}"

    __str__ = text
