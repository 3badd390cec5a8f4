"""Entropy-coded quantizers of selected values, learned on some iterations and judged on later ones.

Scalar: the entropy-constrained quantizer of Chou, Lookabaugh and Gray, "Entropy-constrained vector quantization" (IEEE
Trans. ASSP 1989), in one dimension: a value goes where squared error plus a price times its bits is least, bits and
reproduction points are learned in turn. Trellis: two such quantizers of twice the step, interleaved; the parity of one
value's index decides which quantizer comes next (Marcellin and Fischer, "Trellis coded quantization" (1990); Fischer
and Wang, "Entropy-constrained trellis-coded quantization" (1992); the four states are those of dependent quantization,
Schwarz et al., DCC 2019). The cells of its vectors are nearer to spheres than a scalar quantizer's cubes.

Bits are -log2 of probabilities that were learned on other iterations; an arithmetic coder meets them to a few bits per
vector. A value's context is what all ranks know before it is sent: its layer, and whether its rank is the leader, whose
values are large because they are selected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gradlab.analysis.fit.lgc.selections import Selections

CONTEXTS = ("none", "layer", "layer and leader")
QUANTIZERS = ("scalar", "trellis")
_STATES = 4
# By state: its quantizer, and the next state after an even and after an odd index.
_QUANTIZER_OF = (0, 0, 1, 1)
_NEXT = ((0, 2), (2, 0), (1, 3), (3, 1))
_FURTHEST = 160  # largest index; larger ones are clamped
_SEEN = 20  # an index that occurs so often gets a reproduction point of its own
_ROUNDS = 6
# Price of a bit in squared steps: where steps are small, a bit saves 2 ln 2 times the squared error. A trellis's points
# are one step apart, those of each of its quantizers two.
PRICES = {"scalar": 0.12, "trellis": 0.37}


@dataclass(frozen=True)
class ValueCode:
    """A quantizer with its tables.

    Args:
        quantizer: "scalar" or "trellis".
        step: between points, in the unit of values.
        price: of a bit, in squared steps.
        bits: (contexts, quantizers, 2 x 160 + 1), what each index costs.
        points: (contexts, quantizers, 2 x 160 + 1), the value that each index stands for.
    """

    quantizer: str
    step: float
    price: float
    bits: torch.Tensor
    points: torch.Tensor

    def coded(self, values: torch.Tensor, contexts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode and decode vectors (S, n) with contexts (S, n).

        Returns:
            The decoded values and the bits of each, (S, n) both.
        """
        _, decoded, bits = _chosen(self, values, contexts)
        return decoded, bits


def contexts_of(selections: Selections, which: str) -> torch.Tensor:
    """Number the context of each value, (T, K, n); which: one of `CONTEXTS`."""
    if which == "none":
        return torch.zeros_like(selections.layers)
    if which == "layer":
        return selections.layers
    leads = torch.arange(selections.values.shape[1]) == selections.leaders[:, None]
    return 2 * selections.layers + leads[:, :, None]


def learned_code(quantizer: str, step: float, price: float, values: torch.Tensor, contexts: torch.Tensor) -> ValueCode:
    """Learn bits and points for vectors (S, n) like these: indices are chosen and counted in turn."""
    shape = (int(contexts.max()) + 1, 1 if quantizer == "scalar" else 2, 2 * _FURTHEST + 1)
    regular = _levels(quantizer).float() * step
    # At first every index costs as much as in a Laplace distribution of the values' size.
    size = float(values.abs().mean()) + 1e-30
    code = ValueCode(quantizer, step, price, (regular.abs() / size / math.log(2)).expand(shape), regular.expand(shape))
    for _ in range(_ROUNDS):
        cells, _, _ = _chosen(code, values, contexts)
        counts = torch.bincount(cells.flatten(), minlength=math.prod(shape)).double()
        sums = torch.bincount(cells.flatten(), values.flatten().double(), minlength=math.prod(shape))
        points = torch.where(counts.view(shape) >= _SEEN, (sums / counts.clamp_min(1)).view(shape), regular.double())
        code = ValueCode(quantizer, step, price, _bits(counts.view(shape), regular, step), points.float())
    return code


def _bits(counts: torch.Tensor, regular: torch.Tensor, step: float) -> torch.Tensor:
    """-log2 of smoothed shares. Every index gets a small prior, which falls with its distance from zero."""
    prior = torch.exp(-(regular.abs() / step) / 8).double()
    prior = prior / prior.sum(-1, keepdim=True)
    return -((counts + prior) / (counts.sum(-1, keepdim=True) + 1)).log2().float()


def _levels(quantizer: str) -> torch.Tensor:
    """Points in steps, (quantizers, indices): all; or the even ones, and the odd ones with zero."""
    indices = torch.arange(-_FURTHEST, _FURTHEST + 1)
    if quantizer == "scalar":
        return indices[None]
    return torch.stack([2 * indices, 2 * indices - indices.sign()])


# --- choosing ---------------------------------------------------------------------------------------------------------


def _chosen(
    code: ValueCode, values: torch.Tensor, contexts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cell in the tables, the point and the bits of every value."""
    quantizers, width = code.bits.shape[1:]
    tables = code.bits.flatten(), code.points.flatten()
    cells, costs = [], []
    for quantizer in range(quantizers):
        for parity in (0, 1) if quantizers == 2 else (None,):
            cell, cost = _best(code, quantizer, parity, values, (contexts * quantizers + quantizer) * width, tables)
            cells.append(cell)
            costs.append(cost)
    branch = torch.zeros_like(contexts) if quantizers == 1 else _best_path(torch.stack(costs, -1))
    cell = torch.stack(cells, -1).gather(-1, branch[..., None])[..., 0]
    return cell, tables[1][cell], tables[0][cell]


def _best(
    code: ValueCode,
    quantizer: int,
    parity: int | None,
    values: torch.Tensor,
    starts: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cell and the cost, in squared steps, of one quantizer's cheapest index of that parity."""
    scaled = values / code.step
    near = scaled.round() if parity is None else ((scaled + quantizer * scaled.sign()) / 2).round()
    best_cell, best_cost = starts + _FURTHEST, torch.full_like(values, math.inf)
    for offset in (-2, -1, 0, 1, 2, None):
        index = torch.zeros_like(near) if offset is None else near + offset
        index = index.clamp(-_FURTHEST, _FURTHEST).long()
        cell = starts + index + _FURTHEST
        cost = ((values - tables[1][cell]) / code.step).square() + code.price * tables[0][cell]
        if parity is not None:
            cost = cost.masked_fill(index % 2 != parity, math.inf)
        better = cost < best_cost
        best_cell, best_cost = torch.where(better, cell, best_cell), torch.where(better, cost, best_cost)
    return best_cell, best_cost


def _best_path(costs: torch.Tensor) -> torch.Tensor:
    """Find the cheapest path from state 0 by Viterbi's algorithm.

    Args:
        costs: (S, n, 4), of quantizer 0 even, quantizer 0 odd, quantizer 1 even, quantizer 1 odd.

    Returns:
        (S, n), which of the four is taken.
    """
    sequences, length, _ = costs.shape
    arriving = [[(s, p) for s in range(_STATES) for p in (0, 1) if _NEXT[s][p] == state] for state in range(_STATES)]
    sources = torch.tensor([[s for s, _ in pairs] for pairs in arriving])
    branches = torch.tensor([[2 * _QUANTIZER_OF[s] + p for s, p in pairs] for pairs in arriving])
    total = torch.full((sequences, _STATES), math.inf)
    total[:, 0] = 0.0
    taken = torch.zeros(length, sequences, _STATES, dtype=torch.int64)
    for step in range(length):
        arrived = total[:, sources] + costs[:, step][:, branches]
        total, taken[step] = arrived.min(-1)
    path = torch.empty(sequences, length, dtype=torch.int64)
    state = total.argmin(1)
    for step in reversed(range(length)):
        way = taken[step].gather(1, state[:, None])[:, 0]
        path[:, step] = branches[state, way]
        state = sources[state, way]
    return path


# --- what it is worth -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RatePoint:
    """One rate of a code, on iterations that it was not learned from.

    Args:
        bits: per value.
        error: squared, of the average over ranks, as a share of the error of sending zeros.
    """

    bits: float
    error: float


def rate_curve(
    quantizer: str,
    contexts: str,
    learned: Selections,
    held_out: Selections,
    *,
    steps: Sequence[float],
    price: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[RatePoint]:
    """Measure bits and error of a code over steps.

    Args:
        quantizer: one of `QUANTIZERS`.
        contexts: one of `CONTEXTS`.
        learned: iterations to learn from.
        held_out: iterations to measure on.
        steps: in root mean squares of the values learned from.
        price: of a bit, in squared steps; `PRICES` by default.
        progress: called with the number of steps that are done.

    Raises:
        ValueError: for another quantizer or other contexts.
    """
    if quantizer not in QUANTIZERS or contexts not in CONTEXTS:
        raise ValueError(f"{quantizer!r} by {contexts!r}: expected one of {QUANTIZERS} and of {CONTEXTS}")
    unit = float(learned.values.square().mean().sqrt())
    seen, later = (contexts_of(part, contexts).flatten(0, 1) for part in (learned, held_out))
    paid = PRICES[quantizer] if price is None else price
    curve = []
    for done, step in enumerate(steps):
        code = learned_code(quantizer, step * unit, paid, learned.values.flatten(0, 1), seen)
        decoded, bits = code.coded(held_out.values.flatten(0, 1), later)
        missed, true = held_out.errors(decoded.view_as(held_out.values))
        curve.append(RatePoint(float(bits.double().mean()), float(missed.sum() / true.sum())))
        if progress:
            progress(done + 1)
    return curve


def error_at(curve: Sequence[RatePoint], bits: float) -> float:
    """Interpolate the error at a rate, its logarithm linearly between two points; NaN outside the curve."""
    ordered = sorted(curve, key=lambda point: point.bits)
    for low, high in itertools.pairwise(ordered):
        if low.bits <= bits <= high.bits:
            share = (bits - low.bits) / (high.bits - low.bits) if high.bits > low.bits else 0.0
            return math.exp((1 - share) * math.log(low.error) + share * math.log(high.error))
    return math.nan
