"""Rows of values by layer, and the sum over a choice of one setting per layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Rows = Sequence[np.ndarray]
Choice = Sequence[int] | np.ndarray


def total(rows: Rows, choice: Choice) -> float:
    """Sum over layers the value of each one's chosen setting."""
    return float(np.array([row[index] for row, index in zip(rows, choice, strict=True)]).sum())
