"""Error feedback by kernels that add the residual and write the next one while they compress."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlab import codecs, wrappers
from gradlab.codec import Codec, Context, Exchanged, Tensors, exchange_group
from gradlab.collectives import run_lockstep
from support.by_kernels import by_kernels, equal
from support.kernel_cases import CASES

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of what is masked in the interpreter
FED = [(name, options) for name, options in CASES if options.get("scale") != "one"]
ALIGNED = [512, 48, 1120]  # blocks of 256, 32 and 16 elements begin at multiples of 16


def stack_of(name: str, options: dict[str, Any], two_way: bool) -> Codec:
    codec = codecs.make(name, **options)
    return wrappers.get("error_feedback")(wrappers.get("two_way")(codec) if two_way else codec)


def steps_of(codec: Codec, sizes: list[int], ranks: int, seed: int, reuse: bool) -> list[Exchanged]:
    """Rank 0's results of two steps. The gradients lie one after another, as in a bucket."""
    draw = torch.Generator().manual_seed(seed)
    states: list[Tensors] = [{}] * ranks
    found = []
    for step in range(2):
        vectors = [torch.randn(sum(sizes), generator=draw).split(sizes) for _ in range(ranks)]
        grads = [{f"w{at}": piece for at, piece in enumerate(pieces)} for pieces in vectors]
        runs = [
            exchange_group(codec, mine, state, Context(rank, ranks, step, "g"), reuse=reuse)
            for rank, (mine, state) in enumerate(zip(grads, states, strict=True))
        ]
        done = [result.value for result in run_lockstep(runs)]
        states = [one.state for one in done]
        found.append(done[0])
    return found


@settings(max_examples=3)
@given(
    st.sampled_from(FED),
    st.booleans(),
    st.one_of(st.just(ALIGNED), st.lists(st.integers(1, 400), min_size=1, max_size=3)),
    st.integers(1, 2),
    st.integers(0, 2**32),
)
def test_sums_and_errors_have_the_bits_of_launches_of_their_own(
    case: tuple[str, dict[str, Any]], two_way: bool, sizes: list[int], ranks: int, seed: int
) -> None:
    with by_kernels():
        wanted, found = (steps_of(stack_of(*case, two_way), sizes, ranks, seed, reuse) for reuse in (False, True))
    for theirs, ours in zip(found, wanted, strict=True):
        assert theirs.state.keys() == ours.state.keys()
        assert all(equal(theirs.mean[name], ours.mean[name]) for name in ours.mean)
        assert all(equal(theirs.state[key], ours.state[key]) for key in ours.state)


@pytest.mark.parametrize(
    ("name", "options", "sizes", "launches"),
    [
        ("block_scaled", {"dtype": "int4"}, ALIGNED, ["_encode_tiles", "_average"]),
        ("block_scaled", {"dtype": "int4"}, [300, 7], ["_of_chunks", "_encode", "_average"]),
        ("block_scaled", {"dtype": "mxfp4"}, ALIGNED, ["_encode_tiles", "_average"]),
        ("block_scaled", {"dtype": "nvfp4"}, ALIGNED, ["_of_chunks", "_encode", "_average"]),
        ("qsgd", {"bits": 8}, ALIGNED, ["_encode_tiles", "_average"]),
        ("sign", {}, [5000, 30], ["_of_chunks", "_of_blocks", "_encode", "_average"]),
        ("one_bit", {}, [300, 30], ["_of_chunks", "_encode", "_average"]),
    ],
    ids=str,
)
def test_a_step_takes_a_launch_for_what_travels_and_one_for_the_mean(
    name: str, options: dict[str, Any], sizes: list[int], launches: list[str]
) -> None:
    codec = stack_of(name, options, two_way=False)
    with by_kernels() as started:
        steps_of(codec, sizes, 1, 0, reuse=True)
    assert started[-len(launches) :] == launches
    assert started.count(launches[-1]) == 3  # two means, and what is left of the first step's input
