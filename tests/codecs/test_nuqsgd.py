"""NUQSGD's levels, its mean and its variance, against the definition value by value."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.codecs.nuqsgd import level_numbers
from gradlab.layout import Layer


def values_of(levels: int) -> list[float]:
    return [0.0, *(2.0 ** (number - levels) for number in range(1, levels + 1))]


@given(st.integers(1, 31), st.floats(0, 1), st.floats(1e-6, 1 - 1e-6))
def test_a_level_above_or_below_with_the_chance_that_makes_the_mean_right(
    levels: int, place: float, chance: float
) -> None:
    known = values_of(levels)
    below = max(number for number, level in enumerate(known) if level <= place)
    share = 0.0 if below == levels else (place - known[below]) / (known[below + 1] - known[below])
    places, chances = torch.tensor([place], dtype=torch.float64), torch.tensor([chance], dtype=torch.float64)
    [number] = level_numbers(places, chances, levels).tolist()
    if abs(share - chance) > 1e-9:
        assert number == below + (chance < share)


@pytest.mark.parametrize(("bits", "norm"), [(2, "l2"), (3, "max"), (6, "l2")])
def test_mean_and_error_over_many_draws(bits: int, norm: str) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    codec = codecs.make("nuqsgd", bits=bits, norm=norm, bucket_size=50)
    drawn = torch.stack([codec.apply(x, seed=seed).decoded for seed in range(400)])
    norms = x.view(2, 50).norm(dim=1) if norm == "l2" else x.view(2, 50).abs().amax(1)
    levels = [sign * level for level in values_of(2 ** (bits - 1) - 1) for sign in (1, -1)]
    places = drawn.view(400, 2, 50) / norms.float().double()[:, None]
    assert all(min(abs(value - level) for level in levels) < 1e-6 for value in places.flatten()[:3000].tolist())
    deviation = drawn.var(0).sqrt() / math.sqrt(400)
    moved = deviation > 0
    scores = ((drawn.mean(0) - x)[moved] / deviation[moved]).square().mean()
    assert 0.6 < float(scores) < 1.5
    omega = codec.guarantees([Layer("x", (100,))]).omega
    assert omega is not None
    assert float((drawn - x).square().sum(1).mean()) <= 1.05 * omega * float(x.square().sum())


def test_small_values_miss_less_than_under_uniform_levels() -> None:
    """Of values over many octaves, at as many bits; of the largest alone it is the reverse."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5120, generator=generator) * torch.exp2(-8 * torch.rand(5120, generator=generator))
    errors = {}
    for name in ("nuqsgd", "qsgd"):
        codec = codecs.make(name, bits=4, norm="max")
        errors[name] = [codec.apply(x, seed=seed).decoded.sub(x) for seed in range(20)]
    small = x.abs() < 0.01
    left = {name: sum(float(one[small].norm()) for one in of) for name, of in errors.items()}
    assert left["nuqsgd"] < 0.5 * left["qsgd"]
