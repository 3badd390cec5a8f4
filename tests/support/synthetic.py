"""Synthetic gradients whose covariance, correlation and drift are known: the ground truth for tests.

Node n (a rank of a run; "rank" here is r) draws at step t, with orthonormal directions U_t (numel, rank) and
eigenvalues L = diag(l_1 >= ... >= l_r):

    g_{t,n} = U_t L^{1/2} (sqrt(rho) z_t + sqrt(1 - rho) w_{t,n}) + s_n e_{t,n},    U_t = cos(w t) A + sin(w t) B

z (shared by the nodes), w and e (one per node) are independent standard normal vectors, drawn anew at every step.
[A B] is orthonormal, so that all principal angles between U_s and U_t are w |t - s|. Hence, with S = l_1 + ... + l_r:

    covariance of node n at step t          U_t L U_t' + s_n^2 I
    between two nodes at one step           rho U_t L U_t'; between two steps 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GradientModel:
    """Settings of this module's model. All nodes have the same signal; their noise may differ."""

    numel: int  # elements of a gradient
    eigenvalues: tuple[float, ...]  # l_1 >= ... >= l_r > 0: variance along each direction
    noise_std: tuple[float, ...]  # s_n: one per node, the noise of every element
    shared: float = 1.0  # rho in [0, 1]: the share of the signal's variance that all nodes have in common
    drift: float = 0.0  # w, radians per step

    @property
    def rank(self) -> int:
        """r, the dimension of the signal."""
        return len(self.eigenvalues)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.noise_std)


@dataclass(frozen=True)
class Gradients:
    """Drawn gradients.

    values: float32 (steps, nodes, numel).
    start, turn: A and B, float64 (numel, rank).
    model: what they were drawn from.
    """

    values: np.ndarray
    start: np.ndarray
    turn: np.ndarray
    model: GradientModel

    def basis(self, step: int) -> np.ndarray:
        """Return U_t (numel, rank): the true principal directions at a step, largest eigenvalue first."""
        angle = self.model.drift * step
        return math.cos(angle) * self.start + math.sin(angle) * self.turn


def draw(model: GradientModel, steps: int, rng: np.random.Generator) -> Gradients:
    """Draw directions, and gradients of all nodes along them at each step."""
    directions, _ = np.linalg.qr(rng.standard_normal((model.numel, 2 * model.rank)))
    values = np.empty((steps, model.nodes, model.numel), np.float32)
    gradients = Gradients(values, directions[:, : model.rank], directions[:, model.rank :], model)
    deviation, noise = np.sqrt(model.eigenvalues), np.array(model.noise_std)[:, None]
    for step in range(steps):
        common, own = rng.standard_normal(model.rank), rng.standard_normal((model.nodes, model.rank))
        scores = deviation * (math.sqrt(model.shared) * common + math.sqrt(1 - model.shared) * own)
        values[step] = scores @ gradients.basis(step).T + noise * rng.standard_normal((model.nodes, model.numel))
    return gradients


def expected_energy(model: GradientModel) -> np.ndarray:
    """Compute E |g_n|^2 = S + numel s_n^2 of each node, (nodes,)."""
    return sum(model.eigenvalues) + model.numel * np.square(model.noise_std)


def expected_tail_energy(model: GradientModel, kept: int, age: int = 0, node: int = 0) -> float:
    """Compute the share of one node's energy outside the first `kept` <= rank true directions of `age` steps ago.

    It is 1 - (cos^2(w age) (l_1 + ... + l_d) + d s^2) / (S + numel s^2), because U_s' U_t = cos(w (t - s)) I.
    """
    captured = math.cos(model.drift * age) ** 2 * sum(model.eigenvalues[:kept])
    captured += kept * model.noise_std[node] ** 2
    return 1 - captured / float(expected_energy(model)[node])


def expected_cosine(model: GradientModel) -> np.ndarray:
    """Compute E <g_m, g_n> / sqrt(E |g_m|^2 E |g_n|^2) of two nodes at one step.

    It is rho S / sqrt((S + numel s_m^2) (S + numel s_n^2)) off the diagonal and 1 on it, (nodes, nodes).
    """
    lengths = np.sqrt(expected_energy(model))
    cosine = model.shared * sum(model.eigenvalues) / np.outer(lengths, lengths)
    np.fill_diagonal(cosine, 1.0)
    return cosine
