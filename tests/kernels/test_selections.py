"""Kernels of selections, run by Triton's interpreter, against the PyTorch lines that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.codec.abilities import for_layers
from gradlab.codecs.lgc_server import LgcServer
from gradlab.layout import Layer
from gradlab.learning.selection import largest_of_parts
from support.by_kernels import by_kernels, encoded, equal, layered
from support.kernel_cases import SELECTIONS, TRANSFORMED
from support.laws import thorough

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of NaN in the interpreter
LAYERS = [300, 1, 8, 777, 300, 4500]


def drawn(numel: int, seed: int = 0) -> torch.Tensor:
    """Numbers of different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (numel,), generator=generator) * 2 - 1
    return signs * (torch.randperm(numel, generator=generator) + 1.0) / 64


def check(codec: Any, x: torch.Tensor) -> list[str]:
    """Compare what kernels send and decode; the names of those that were started."""
    wanted = [encoded(codec, each) for each in (x, x.roll(5), -2 * x)]
    with by_kernels() as started:
        found = encoded(codec, x)
        results = decoded(codec, x, wanted)
    for theirs, ours in zip(found, wanted[0], strict=True):
        if len(found) == 3 and ours.is_floating_point():  # means of float64 beside sums of float32 in order
            torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=0.0, equal_nan=True)
        else:
            assert equal(theirs, ours)
    assert all(map(equal, results, decoded(codec, x, wanted)))
    return started


def decoded(codec: Any, x: torch.Tensor, payloads: list[list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of several ranks' payloads, and what is left of x."""
    left = x.clone()
    codec.add_decompressed(left, payloads[0], -1.0)
    if codec.name == "threshold":  # parts of one memory, as a gather brings them
        columns = [torch.cat(column).split(list(map(len, column))) for column in zip(*payloads, strict=True)]
        payloads = [list(payload) for payload in zip(*columns, strict=True)]
    return codec.average_into(torch.full_like(x, 9.0), payloads, 1 / 3), left


# The others of a kind, with what is not finite among them, come next.
@pytest.mark.parametrize(
    ("name", "options"), [thorough(*case) if at in (4, 6, 10, 11) else case for at, case in enumerate(SELECTIONS)]
)
def test_a_kernel_equals_the_lines_that_it_stands_for(name: str, options: dict[str, Any]) -> None:
    sizes = LAYERS[:-1] if name == "chunk_topk" else LAYERS
    check(layered(name, options, sizes), drawn(sum(sizes)))


@pytest.mark.parametrize(("name", "options"), [*SELECTIONS[2:6], *SELECTIONS[-2:]])
def test_what_is_not_finite_and_what_is_not_normal(name: str, options: dict[str, Any]) -> None:
    x = drawn(1100) * 1e-43
    x[7], x[88], x[420] = float("nan"), float("inf"), -float("inf")
    check(layered(name, {**options, "density": 0.3} if name == "topk" else options, [1100]), x)


@pytest.mark.parametrize(("density", "special"), [(0.02, 0.0), (0.02, float("nan")), (1.0, float("nan"))])
def test_a_threshold_from_a_sample(density: float, special: float) -> None:
    """It is reached by too many, enough or too few at first; or by all, as it is not a number."""
    x, codec, sent = drawn(4200, 7), layered("sampled_threshold", {"density": density}, [4200]), []
    x[::70] += special
    for seed in range(3):
        wanted = codec.compress(x, torch.Generator().manual_seed(seed))
        with by_kernels() as started:
            found = codec.compress(x, torch.Generator().manual_seed(seed))
        assert all(map(equal, found, wanted))
        assert started == ["_histogram", "_histogram", "_histogram", "_count", "_write"]
        sent.append(len(wanted[0]))
    assert special or (min(sent) < 84 and max(sent) == 84)


@pytest.mark.parametrize(("name", "options"), TRANSFORMED, ids=str)
def test_coefficients_of_chunks(name: str, options: dict[str, Any]) -> None:
    """They differ from PyTorch's by less than a millionth of the largest value, as sums have another order."""
    shapes = [(16, 16), (7,), (0,), (24, 8), (3, 1), (16, 8)]
    layers = [Layer(f"w{at}", shape) for at, shape in enumerate(shapes)]
    codec, x = for_layers(codecs.make(name, **options), layers), drawn(sum(layer.numel for layer in layers))
    x[-1] = float("nan")  # in a chunk of its own, or with others
    wanted = [encoded(codec, each) for each in (x, x.roll(5), -2 * x)]
    with by_kernels():
        found = encoded(codec, x)
        results = decoded(codec, x, wanted)
    assert [(len(one), one.dtype) for one in found] == [(len(one), one.dtype) for one in wanted[0]]
    lines = decoded(codec, x, [found, *wanted[1:]])
    for mine, theirs, expected in zip(results, lines, decoded(codec, x, wanted), strict=True):
        for one in (mine, theirs):
            torch.testing.assert_close(one, expected, rtol=0.0, atol=1e-6 * float(x[:-1].abs().max()), equal_nan=True)


@settings(max_examples=3)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 99))
def test_among_equal_magnitudes_the_first_ones_are_sent(sizes: list[int], values: int, seed: int) -> None:
    """As many as there have to be, and none that is smaller than one that is not sent."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-values, values + 1, (sum(sizes),), generator=generator).float()
    for name, options in (
        ("topk", {"across_layers": False, "density": 0.1}),
        ("chunk_topk", {"chunk": 128, "count": 9, "bits": None}),
    ):
        codec = layered(name, options, sizes)
        with by_kernels():
            mine = encoded(codec, x)
        theirs = encoded(codec, x)
        assert [len(one) for one in mine] == [len(one) for one in theirs]
        nudged = x * (1 - torch.arange(len(x)) * 2.0**-20)  # the same order, and earlier ones are larger
        decode = [codec.average_into(torch.empty_like(x), [one], 1.0) for one in (mine, encoded(codec, nudged))]
        assert torch.equal(decode[0], torch.where(decode[1] != 0, x, 0.0))


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "most"), [("topk", 8), ("chunk_topk", 6)])
def test_launches_do_not_grow_with_the_number_of_layers(name: str, most: int) -> None:
    options: dict[str, Any] = {"across_layers": False} if name == "topk" else {"chunk": 4096}
    started = [check(layered(name, options, [50] * layers), drawn(50 * layers)) for layers in (2, 40)]
    assert started[0] == started[1][: most - 1]  # and zeros are written once


def test_what_lgc_selects() -> None:
    """Each part's largest magnitudes, of none, one, several tiles and all of it."""
    codec = LgcServer()
    sizes, counts = (0, 1, 9000, 40, 40), (0, 1, 70, 0, 40)
    vector = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1))
    with by_kernels() as started:
        found = codec.largest_of_each(vector, sizes, counts)
    assert len(started) == 5
    assert torch.equal(found, largest_of_parts(vector, sizes, counts))
