"""What a payload saves, against 32 bits and against plain 16-bit reduction."""

from __future__ import annotations

import doctest

import pytest
import torch

from gradlab import saving
from gradlab.layout import Layer
from gradlab.plan import Group, Plan
from gradlab.saving import Saving, bytes_in_16_bits

LAYERS = (Layer("a", (64, 32), "linear"), Layer("b", (32,), "vector"))


def saving_of(plan: Plan) -> Saving:
    return Saving.of(plan.payload_bytes(4), plan.payload_bytes(4, compressing=False))


@pytest.mark.parametrize("codec", ["identity", "cast", "topk", "powersgd", "qsgd", "sign"])
def test_against_16_bits_a_plan_of_float32_saves_half(codec: str) -> None:
    found = saving_of(Plan.uniform(LAYERS, codec, warmup_steps=0))
    assert found.ratio is not None
    assert found.ratio_to_16_bits == found.ratio * 16 / 32


def test_what_saves_nothing_against_16_bits_is_shown_so() -> None:
    """All in bfloat16: as many bytes but for the finite flag. All dense: twice as many."""
    sent = saving_of(Plan(LAYERS, (Group("all", ("a", "b"), "cast", {"dtype": "bfloat16"}),)))
    assert sent.ratio_to_16_bits == pytest.approx(1.0, abs=2e-3)
    dense = saving_of(Plan(LAYERS, ()))
    assert (dense.ratio, dense.ratio_to_16_bits) == (1.0, 0.5)
    assert str(dense) == "1.00x (0.500x vs 16 bits)"
    assert dense.text("fewer bytes") == "1.00x fewer bytes (0.500x vs 16 bits)"
    assert dense.cells == ("1.00x", "0.500x")


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert Saving.of(0, 400) == Saving(None, None) == Saving.read({})
    assert Saving.read({}).cells == ("-", "-")


def test_a_report_keeps_both_factors() -> None:
    found = Saving.of(100, 800, 200)
    assert found.to_json() == {"compression_ratio": 8.0, "ratio_to_16_bits": 2.0}
    assert Saving.read(found.to_json()) == found


@pytest.mark.parametrize(
    ("dtype", "each"),
    [(torch.float64, 2), (torch.float32, 2), (torch.bfloat16, 2), (torch.complex64, 4), (torch.complex128, 4)],
)
def test_16_bits_are_of_each_real_number(dtype: torch.dtype, each: int) -> None:
    parameter = torch.empty(3, 5, dtype=dtype)
    assert bytes_in_16_bits(parameter) == 15 * each
    assert bytes_in_16_bits(parameter, 4) == 4 * each


def test_the_example_holds() -> None:
    assert doctest.testmod(saving).failed == 0
