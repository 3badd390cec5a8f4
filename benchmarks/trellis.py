"""Trellis-coded quantization with entropy-coded levels: what `ecsq_refinements.py` measures under that name.

Two quantizers take turns, one of even multiples of the step and one of odd multiples and zero; the parity of the last
level says which is next (the dependent quantization of Versatile Video Coding, of four states). A Viterbi search finds
the levels of least distortion + multiplier * bits, where the bits are those of the tables. Sequences start anew every
`LENGTH` values, so that they could be coded beside one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

LENGTH = 128
MOST = 255  # magnitudes beyond it count as it and an Elias gamma code
FORGET = 0.5
_NEXT = ((0, 2), (2, 0), (1, 3), (3, 1))  # by state and parity; states 0 and 1 have the first quantizer
_BEFORE = tuple([(s, p) for s in range(4) for p in range(2) if _NEXT[s][p] == state] for state in range(4))


class Trellis:
    """One step and one multiplier, over the iterations of a recording.

    Args:
        step: half of each quantizer's.
        multiplier: of bits, in squared steps.
    """

    def __init__(self, step: float, multiplier: float) -> None:
        self.step, self.multiplier = step, multiplier
        self.counts: np.ndarray | None = None  # by layer, quantizer and magnitude

    def iteration(self, ranks: Sequence[Mapping[str, np.ndarray]], names: Sequence[str]) -> tuple[float, float, float]:
        """Bits, squared errors and squares of all ranks' layers."""
        lanes, layers = [], []
        for number, name in enumerate(names):
            for rank in ranks:
                values = np.asarray(rank[name], np.float32).reshape(-1)
                lanes.append(np.pad(values, (0, -len(values) % LENGTH)).reshape(-1, LENGTH))
                layers.append(np.full(len(lanes[-1]), number))
        scaled, layer = np.concatenate(lanes) / self.step, np.concatenate(layers)
        if self.counts is None:
            start = 0.5 ** np.minimum(30.0, np.arange(1, MOST + 2))
            self.counts = np.tile(start + 1e-3, (len(names), 2, 1))
        tables = -np.log2(self.counts / self.counts.sum(2, keepdims=True))
        tables[:, :, 1:] += 1  # the sign
        magnitudes, second = self._searched(np.abs(scaled), tables, layer)
        found = np.minimum(magnitudes, MOST)
        bits = float(tables[layer[:, None], second, found].sum())
        beyond = magnitudes[magnitudes >= MOST] - MOST + 1
        bits += float((2 * np.floor(np.log2(beyond)) + 1).sum())
        key = ((layer[:, None] * 2 + second) * (MOST + 1) + found).reshape(-1)
        new = np.bincount(key, minlength=self.counts.size).reshape(self.counts.shape)
        self.counts = self.counts * FORGET + new + 1e-3
        missed = np.abs(scaled) - self._decoded(np.abs(scaled), magnitudes, second, layer)
        return bits, float(np.square(missed).sum()) * self.step**2, float(np.square(scaled).sum()) * self.step**2

    @staticmethod
    def _decoded(scaled: np.ndarray, magnitudes: np.ndarray, second: np.ndarray, layer: np.ndarray) -> np.ndarray:
        """What is decoded: points of the quantizers, moved to the means of their class, quantizer and layer."""
        points = np.where(magnitudes > 0, 2 * magnitudes - second, 0).astype(np.float64)
        classes = (layer[:, None] * 2 + second) * 4 + np.minimum(3, magnitudes)
        counts = np.bincount(classes.reshape(-1))
        offsets = np.bincount(classes.reshape(-1), (scaled - points).reshape(-1)) / np.maximum(1, counts)
        offsets[0::4] = 0  # zero stays
        return points + offsets[classes]

    def _searched(self, scaled: np.ndarray, tables: np.ndarray, layer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Magnitudes (lanes, LENGTH), and whether the second quantizer has them, of values without signs."""
        choices = [self._choices(scaled, tables[:, q], layer, q) for q in range(2)]
        lanes = len(scaled)
        cost = np.full((4, lanes), np.inf)
        cost[0] = 0
        came = np.empty((LENGTH, 4, lanes), np.uint8)
        for t in range(LENGTH):
            new = np.empty_like(cost)
            for state in range(4):
                (a, p), (b, q) = _BEFORE[state]
                first = cost[a] + choices[a >> 1][p][0][:, t]
                other = cost[b] + choices[b >> 1][q][0][:, t]
                came[t, state] = other < first
                new[state] = np.minimum(first, other)
            cost = new
        state, index = cost.argmin(0), np.arange(lanes)
        magnitudes, second = np.empty(scaled.shape, np.int64), np.empty(scaled.shape, np.int64)
        before = np.array(_BEFORE)  # (state, which, (state before, parity))
        levels = np.array([[choices[q][p][1] for p in range(2)] for q in range(2)])
        for t in reversed(range(LENGTH)):
            last, parity = before[state, came[t, state, index]].T
            second[:, t] = last >> 1
            magnitudes[:, t] = levels[last >> 1, parity, index, t]
            state = last
        return magnitudes, second

    def _choices(
        self, scaled: np.ndarray, tables: np.ndarray, layer: np.ndarray, second: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each parity the least cost and the magnitude that has it."""
        low = np.floor((scaled + second) / 2).astype(np.int64)
        of_low, of_high = (self._cost(scaled, k, tables, layer, second) for k in (low, low + 1))
        odd = (low & 1).astype(bool)
        even = np.where(odd, of_high, of_low), np.where(odd, low + 1, low)
        zero = self._cost(scaled, np.zeros_like(low), tables, layer, second)
        better = zero < even[0]
        return [
            (np.where(better, zero, even[0]), np.where(better, 0, even[1])),
            (np.where(odd, of_low, of_high), np.where(odd, low, low + 1)),
        ]

    def _cost(
        self, scaled: np.ndarray, magnitudes: np.ndarray, tables: np.ndarray, layer: np.ndarray, second: int
    ) -> np.ndarray:
        points = np.where(magnitudes > 0, 2 * magnitudes - second, 0)
        return np.square(scaled - points) + self.multiplier * tables[layer[:, None], np.minimum(magnitudes, MOST)]
