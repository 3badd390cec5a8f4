"""Top-k of chunks against a slow oracle, the paper's own ratio, and the bound that it promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.layout import Layer

seeds = st.integers(0, 2**32 - 1)

SETTINGS = st.tuples(st.integers(2, 40), st.integers(1, 45), st.sampled_from([None, 1, 2, 3, 8]))


def oracle(x: torch.Tensor, chunk: int, count: int, bits: int | None) -> torch.Tensor:
    """One value after another."""
    values, kept = x.tolist(), [0.0] * len(x)
    sent = []
    for first in range(0, len(values), chunk):
        places = range(first, min(first + chunk, len(values)))
        share = math.ceil(min(count, chunk) * len(places) / chunk)
        sent += sorted(places, key=lambda place: -abs(values[place]))[:share]
    if bits is None:
        for place in sent:
            kept[place] = values[place]
        return torch.tensor(kept)
    bins = 2 ** (bits - 1)
    magnitudes = {place: abs(values[place]) for place in sent}
    least, largest = min(magnitudes.values()), max(magnitudes.values())
    width = (largest - least) / bins or 1.0
    number = {place: min(bins - 1, int((one - least) / width)) for place, one in magnitudes.items()}
    for place in sent:
        alike = [magnitudes[other] for other in sent if number[other] == number[place]]
        kept[place] = math.copysign(sum(alike) / len(alike), values[place])
    return torch.tensor(kept)


@given(st.integers(1, 150), SETTINGS, seeds)
def test_it_is_the_oracle(numel: int, chosen: tuple[int, int, int | None], seed: int) -> None:
    chunk, count, bits = chosen
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codec = codecs.make("chunk_topk", chunk=chunk, count=count, bits=bits)
    done = codec.apply(x)
    torch.testing.assert_close(done.decoded, oracle(x, *chosen).double(), rtol=1e-6, atol=1e-6)
    delta = codec.guarantees([Layer("x", (numel,))]).delta
    assert delta is not None
    error = float((done.decoded - x).square().sum() / x.square().sum())
    assert error <= 1 - delta + 1e-6


def test_the_papers_ratio() -> None:
    """64 of 4,096 values in 2 bits each, and 12 bits a position: 146 times less than 32 bits a value."""
    done = codecs.make("chunk_topk").apply(torch.randn(4096 * 512, generator=torch.Generator().manual_seed(0)))
    assert done.ratio == pytest.approx(4096 * 32 / (64 * (12 + 2)), rel=1e-3)
    assert round(done.ratio) == 146


def test_what_is_all_alike_or_not_a_number_is_sent_as_it_is() -> None:
    codec = codecs.make("chunk_topk", chunk=4, count=4)
    assert codec.apply(torch.full((8,), -2.0)).decoded.tolist() == [-2.0] * 8
    assert codec.apply(torch.zeros(8)).decoded.tolist() == [0.0] * 8
    spoiled = codec.apply(torch.tensor([1.0, torch.nan, 3.0, -4.0])).decoded
    assert bool(spoiled.isnan().any())
