"""Slow, explicit simulations of what wrappers do, in plain numpy: one vector per rank, everything held in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating]
Shards = list[tuple[int, int]]


def keep_largest(vector: Vector, density: float) -> Vector:
    """The ceil(density * numel) elements of largest magnitude, at least one; zeros elsewhere."""
    count = min(len(vector), max(1, math.ceil(round(density * len(vector), 9))))
    kept = np.zeros_like(vector)
    for place in sorted(range(len(vector)), key=lambda i: -abs(vector[i]))[:count]:
        kept[place] = vector[place]
    return kept


def rates_ratio(before: float | None, now: float | None) -> float:
    """eta_(t-1) / eta_t where both are known and positive, else 1."""
    if before is None or now is None or before <= 0 or now <= 0:
        return 1.0
    return before / now


def by_element(values: Mapping[str, float], numels: Mapping[str, int]) -> Vector:
    """One value per layer, repeated for each of the layer's elements: (sum of numel,)."""
    return np.concatenate([np.full(numel, values[name]) for name, numel in numels.items()])


def equal_shards(numel: int, ranks: int) -> Shards:
    """Contiguous shards whose sizes differ by one element at most; rank n's ends at floor(numel (n + 1) / N)."""
    return list(pairwise([numel * rank // ranks for rank in range(ranks + 1)]))


def one_server(numel: int, ranks: int, server: int) -> Shards:
    """Everything on one rank."""
    return [(0, numel) if rank == server else (0, 0) for rank in range(ranks)]


def low_pass(residual: Vector, grad: Vector, density: float, decay: float) -> tuple[Vector, Vector]:
    """ScaleCom eq. (5) with beta = 1 - decay: what is sent, and the new residual."""
    beta = 1.0 - decay
    sent = keep_largest(residual + grad, density)
    return sent, (1.0 - beta) * residual + beta * (residual + grad - sent)


@dataclass
class DGC:
    """Deep gradient compression of N ranks: their u and v (N, numel), all dense.

    clip_norm: of the whole step's gradient; each rank's share is clip_norm / sqrt(N).
    """

    momentum: Vector
    velocity: Vector
    density: float
    m: float
    nesterov: bool
    masking: bool
    clip_norm: float = 0.0

    @classmethod
    def start(cls, ranks: int, numel: int, **settings: float) -> DGC:
        return cls(np.zeros((ranks, numel)), np.zeros((ranks, numel)), **settings)  # type: ignore[arg-type]

    def step(self, grads: Sequence[Vector]) -> Vector:
        """The mean (numel,) that is applied."""
        ranks = len(grads)
        mean = np.zeros(len(grads[0]))
        for rank, raw in enumerate(grads):
            grad = raw
            if self.clip_norm > 0:
                norm = math.sqrt(float(np.sum(raw * raw)))
                share = self.clip_norm / math.sqrt(ranks)
                grad = raw * (share / norm) if norm > share else raw
            if self.nesterov:
                self.momentum[rank] = self.m * (self.momentum[rank] + grad)
                self.velocity[rank] += self.momentum[rank] + grad
            else:
                self.momentum[rank] = self.m * self.momentum[rank] + grad
                self.velocity[rank] += self.momentum[rank]
            sent = keep_largest(self.velocity[rank], self.density)
            where = sent != 0
            self.velocity[rank][where] = 0.0
            if self.masking:
                self.momentum[rank][where] = 0.0
            mean += sent / ranks
        return mean


@dataclass
class DGCSGD:
    """The optimizer of DGC's published code: lambda x has a momentum of its own, and joins the mean uncompressed."""

    rate: float
    m: float
    nesterov: bool
    buffer: Vector | None = None

    def update(self, x: Vector, mean: Vector) -> Vector:
        """What the learning rate multiplies (numel,)."""
        decay = self.rate * x
        if self.m == 0:
            return decay + mean
        self.buffer = decay if self.buffer is None else self.m * self.buffer + decay
        return (decay + self.m * self.buffer if self.nesterov else self.buffer) + mean


@dataclass
class WeightDecayMomentum:
    """BytePS's, beside its dist-EF: m is multiplied after lambda x has been added, and both join what was answered."""

    rate: float
    mu: float
    momentum: Vector | float = 0.0

    def decompress(self, x: Vector, answer: Vector) -> Vector:
        """What the learning rate multiplies (numel,)."""
        cache = x * self.rate
        self.momentum = (self.momentum + cache) * self.mu
        return answer + cache + self.momentum


@dataclass
class ServerSimulation:
    """dist-EF-SGD (Algorithm 2) with top-k: workers' residuals (N, numel) and the server's (numel,). Workers select
    from the whole vector, servers from their shards."""

    worker: Vector
    server: Vector
    density: float
    shards: Shards

    @classmethod
    def start(cls, ranks: int, numel: int, density: float, shards: Shards) -> ServerSimulation:
        return cls(np.zeros((ranks, numel)), np.zeros(numel), density, shards)

    def answer(self, vector: Vector) -> Vector:
        sent = np.zeros_like(vector)
        for start, stop in self.shards:
            if stop > start:
                sent[start:stop] = keep_largest(vector[start:stop], self.density)
        return sent

    def step(self, grads: Sequence[Vector], ratio: Vector | float = 1.0, feedback: bool = True) -> Vector:
        """What the server answers (numel,). ratio: eta_(t-1) / eta_t by element; feedback: of the workers."""
        asked = np.stack([grad + ratio * self.worker[rank] for rank, grad in enumerate(grads)])
        sent = np.stack([keep_largest(vector, self.density) for vector in asked])
        if feedback:
            self.worker = asked - sent
        merged = sent.mean(0) + ratio * self.server
        answer = self.answer(merged)
        self.server = merged - answer
        return answer
