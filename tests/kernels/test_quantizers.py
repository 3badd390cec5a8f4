"""Quantizers' kernels, run by Triton's interpreter, against the PyTorch and numpy lines that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.codec import Context, exchange_group
from gradlab.coding.bits import pack, unpack
from gradlab.collectives import run_lockstep
from support.by_kernels import by_kernels, decoded, encoded, equal, layered
from support.kernel_cases import CASES, SUMMED
from support.laws import thorough

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of NaN in the interpreter
LAYERS = [300, 1, 8, 777]
NAMED: dict[str, tuple[str, dict[str, Any]]] = {"nvfp4": ("block_scaled", {"dtype": "nvfp4"})}
SPECIAL = {2: float("nan"), 99: float("inf"), 303: 1e-42, 305: -1e-42}  # by place


def check(name: str, options: dict[str, Any], sizes: list[int], x: torch.Tensor) -> None:
    codec = layered(name, options, sizes)
    wanted = encoded(codec, x)
    with by_kernels():
        found = encoded(codec, x)
        results = decoded(codec, x, wanted)
    for theirs, ours in zip(found[:-1], wanted[:-1], strict=True):
        if name == "sign":  # means of float64 beside sums of float32 in numpy's order
            torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=0.0, equal_nan=True)
        else:
            assert equal(theirs, ours)
    if x.isfinite().all():  # codes of NaN differ in its sign
        assert torch.equal(found[-1], wanted[-1])
    assert all(map(equal, results, decoded(codec, x, wanted)))


def large(name: str, options: dict[str, Any]) -> list[int]:
    """Elements of a layer more, of methods whose blocks are large."""
    return (
        [4500] if name in ("sign", "one_bit") else [9000] if options == {"dtype": "nvfp4", "stochastic": False} else []
    )


# Every third of the others is seen with what is not finite among its values, below.
@pytest.mark.parametrize(
    ("name", "options"),
    [thorough(*case) if at % 3 == 0 and not large(*case) else case for at, case in enumerate(CASES)],
    ids=str,
)
def test_a_kernel_equals_the_lines_that_it_stands_for(name: str, options: dict[str, Any]) -> None:
    sizes = [*LAYERS, *large(name, options)]
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(len(sizes)))
    check(name, options, sizes, x * torch.logspace(-6, 2, len(x)))


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_what_is_not_finite_and_what_is_not_normal(case: tuple[str, dict[str, Any]]) -> None:
    x = torch.randn(sum(LAYERS), generator=torch.Generator().manual_seed(0))
    for place, special in SPECIAL.items():
        x[place] = special
    check(*case, LAYERS, x)


@settings(max_examples=8)
@given(
    st.sampled_from(CASES),
    st.lists(st.integers(1, 600), min_size=1, max_size=5),
    st.floats(-30, 30),
    st.integers(0, 2**32),
)
def test_any_layers(case: tuple[str, dict[str, Any]], sizes: list[int], magnitude: float, seed: int) -> None:
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)) * 10**magnitude
    check(*case, sizes, x)


@pytest.mark.parametrize(
    "name", ["block_scaled", "sign", "qsgd", "natural", *map(thorough, ("nvfp4", "one_bit", "nuqsgd", "terngrad"))]
)
def test_launches_do_not_grow_with_the_number_of_layers(name: str) -> None:
    counts = []
    for sizes in ([9, 9], [9] * 300, *([[9, 5000]] if name in ("sign", "one_bit") else ())):
        codec, x = layered(*NAMED.get(name, (name, {})), sizes), torch.ones(sum(sizes))
        with by_kernels() as started:
            decoded(codec, x, encoded(codec, x))
        counts.append(started)
    assert all(one == counts[0] for one in counts)
    assert len(counts[0]) == 4 - (name == "natural")  # numbers, codes, mean and what is left


@pytest.mark.parametrize(
    ("name", "options"), [thorough(*case) if at in (2, 5, 6, 10) else case for at, case in enumerate(SUMMED)], ids=str
)
@pytest.mark.parametrize("special", [False, thorough(True)])
def test_layers_that_an_all_reduce_sums(name: str, options: dict[str, Any], special: bool) -> None:
    """Layers of any size, an empty one and zeros, too; a second step, of a running scale."""
    codec, draw = codecs.make(name, **options), torch.Generator().manual_seed(1)
    selects = name in ("clt_k", "random_k")
    sizes = [3, 5000 if selects else 1100, 0, 8, 301]  # several tiles
    ranks = [{f"w{at}": torch.randn(size, generator=draw) for at, size in enumerate(sizes)} for _ in range(2)]
    for rank, mine in enumerate(ranks):
        mine["w3"] *= name == "clt_k"  # where any of equal magnitudes are taken there are none
        for place, value in SPECIAL.items() if special else ():
            mine["w1" if rank else "w4"][place % 301] = value

    def steps(states: list[Any]) -> list[dict[str, torch.Tensor]]:
        rows = [
            exchange_group(codec, *one, Context(at, 2, 1, "g"))
            for at, one in enumerate(zip(ranks, states, strict=True))
        ]
        done = [result.value for result in run_lockstep(rows)]
        error = getattr(done[0].own, "compression_error", None)
        return [done[0].mean, dict(done[0].own), dict(done[0].state or {}), error() if error else {}]

    known = {f"w{at}/energy": torch.tensor(float(at), dtype=torch.float64) for at in range(len(sizes))}
    states = [known if options.get("scale") == "running" else {}] * 2
    wanted = steps(states)
    with by_kernels() as started:
        found = steps(states)
    kernel = "_encode" if name == "terngrad" else "_add" if selects else "_round"
    chosen_by_kernels = name == "clt_k" and options.get("selection") != "chunks"  # with their values
    assert started.count(kernel) == (6 - chosen_by_kernels if selects else 2)
    # Both ranks' mean, and a rank's own.
    assert selects or started.count("_average") == 3 * (name == "terngrad" or options.get("bits") == 8)
    for theirs, ours in zip(found, wanted, strict=True):
        assert theirs.keys() == ours.keys()
        assert all(equal(theirs[key] + 0.0, ours[key] + 0.0) for key in ours)  # numpy's largest of zeros may be -0


@pytest.mark.parametrize(("ranks", "bits"), [(3, 3), thorough(127, 8), (200, 9)])
def test_sums_of_codes(ranks: int, bits: int) -> None:
    from gradlab.kernels.codes import sum_codes

    parts = [pack(torch.full((77,), 2, dtype=torch.uint8), 2) for _ in range(ranks)]
    with by_kernels():
        found = sum_codes(parts, 77, 2, bits)
    assert torch.equal(found, pack(sum(unpack(part, 2).long()[:77] for part in parts), bits))
