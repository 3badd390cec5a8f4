"""Entropy-coded quantizers of selected values: the best path, what bits are worth, and the bound that none passes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from gradlab.analysis.fit.lgc.selections import Selections
from gradlab.analysis.fit.lgc.value_codes import (
    PRICES,
    RatePoint,
    ValueCode,
    contexts_of,
    error_at,
    learned_code,
    rate_curve,
)

FOLLOWS = {(0, 0): 0, (0, 1): 2, (1, 0): 2, (1, 1): 0, (2, 0): 1, (2, 1): 3, (3, 0): 3, (3, 1): 1}


def selections(iterations: int = 24, count: int = 200, layers: int = 2) -> Selections:
    """Normal values; those of the second layer a tenth as large, the leaders' three times."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(iterations, 3, count, generator=generator)
    layer = (torch.arange(count) * layers // count).expand(values.shape)
    leaders = torch.arange(iterations) % 3
    values = values * torch.where(layer == 1, 0.1, 1.0)
    values[torch.arange(iterations), leaders] *= 3
    positions = torch.arange(count).expand(values.shape)
    return Selections(list(range(iterations)), positions, layer, values, torch.ones_like(values), leaders, True)


def plain(drawn: Selections) -> Selections:
    """The same, all normal and of one size."""
    generator = torch.Generator().manual_seed(1)
    return replace(drawn, values=torch.randn(drawn.values.shape, generator=generator))


def code(quantizer: str, step: float = 0.5) -> tuple[ValueCode, torch.Tensor]:
    values = torch.randn(30, 100, generator=torch.Generator().manual_seed(2))
    return learned_code(quantizer, step, PRICES[quantizer], values, torch.zeros_like(values).long()), values


@pytest.mark.parametrize("quantizer", PRICES)
def test_bits_are_those_of_probabilities_that_sum_to_one(quantizer: str) -> None:
    fitted, _ = code(quantizer)
    torch.testing.assert_close((2.0**-fitted.bits).sum(-1), torch.ones(fitted.bits.shape[:2]), rtol=1e-4, atol=1e-4)


def test_the_trellis_takes_the_cheapest_path_that_a_decoder_can_follow() -> None:
    """Of all paths: each index's parity leads on to the quantizer of the next."""
    fitted, _ = code("trellis")
    values = 2 * torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    decoded, bits = fitted.coded(values, torch.zeros_like(values).long())
    indices = range(-6, 7)
    for row, points, costs in zip(values, decoded, bits, strict=True):
        least = math.inf
        for path in itertools.product(indices, repeat=4):
            state, cost = 0, 0.0
            for value, index in zip(row.tolist(), path, strict=True):
                quantizer, cell = state // 2, index + 160
                cost += ((value - float(fitted.points[0, quantizer, cell])) / fitted.step) ** 2
                cost += fitted.price * float(fitted.bits[0, quantizer, cell])
                state = FOLLOWS[state, index % 2]
                if cost >= least:
                    break
            least = min(least, cost)
        taken = float((((row - points) / fitted.step).square() + fitted.price * costs).sum())
        assert taken == pytest.approx(least, rel=1e-4)


def test_a_scalar_goes_where_error_and_bits_are_least() -> None:
    fitted, values = code("scalar")
    decoded, bits = fitted.coded(values, torch.zeros_like(values).long())
    every = ((values[..., None] - fitted.points[0, 0]) / fitted.step).square() + fitted.price * fitted.bits[0, 0]
    taken = ((values - decoded) / fitted.step).square() + fitted.price * bits
    torch.testing.assert_close(taken, every.min(-1).values)


def test_normal_values_stay_above_shannons_bound_and_a_trellis_comes_nearer() -> None:
    drawn = plain(selections(36, 300))
    learned, held = drawn.part(0, 24), drawn.part(24, 36)
    scalar = rate_curve("scalar", "none", learned, held, steps=(0.4, 0.8, 1.2, 2.2))
    trellis = rate_curve("trellis", "none", learned, held, steps=(0.25, 0.5, 0.8, 1.2))
    for bits in (1.0, 2.0, 3.0):
        bound = 4.0**-bits
        assert bound < error_at(trellis, bits) < 0.97 * error_at(scalar, bits) < 1.5 * bound


def test_tables_by_what_is_known_beat_one_for_all() -> None:
    drawn = selections()
    learned, held = drawn.part(0, 18), drawn.part(18, 24)
    errors = [
        error_at(rate_curve("scalar", contexts, learned, held, steps=(0.2, 0.4, 0.7, 1.0, 1.5)), 1.5)
        for contexts in ("none", "layer", "layer and leader")
    ]
    assert errors[0] > 1.2 * errors[1] > 1.3 * errors[2]
    assert contexts_of(drawn, "layer and leader")[1, :, 150].tolist() == [2, 3, 2]


def test_between_two_points_the_logarithm_is_straight() -> None:
    curve = [RatePoint(3.0, 0.01), RatePoint(1.0, 1.0)]
    assert error_at(curve, 2.0) == pytest.approx(0.1)
    assert math.isnan(error_at(curve, 4.0))
    with pytest.raises(ValueError, match="'vector' by 'none'"):
        rate_curve("vector", "none", selections(), selections(), steps=(1.0,))
