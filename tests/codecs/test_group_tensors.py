"""What is done for all layers of a group at once is what each would get alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.codec import Batch, Layer, Table, Tensors, concatenate, separate
from gradlab.codec.abilities import for_layers
from gradlab.codec.batch import consecutive, stacked
from gradlab.codec.exchanged import means_of
from gradlab.codec.measures import all_finite
from gradlab.collectives import run_lockstep, sum_in_rank_order
from support.laws import law

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@law(sizes, st.booleans())
def test_parts_of_a_vector_are_joined_without_a_copy_and_others_with_one(numels: list[int], turned: bool) -> None:
    vector = torch.arange(float(sum(numels)))
    like = {str(at): torch.empty(numel) for at, numel in enumerate(numels)}
    parts = separate(vector, like)
    order = list(reversed(parts)) if turned else list(parts)
    pieces = [parts[name] for name in order]
    joined = concatenate({name: parts[name] for name in order})
    assert torch.equal(joined, torch.cat(pieces))
    filled = [numel for numel in numels if numel]
    assert (consecutive(pieces) is not None) == bool(filled and (not turned or len(filled) == 1))
    if filled and not turned:
        assert joined.data_ptr() == vector.data_ptr()


def test_what_only_looks_like_parts_of_a_vector_is_not_taken_for_one() -> None:
    vector = torch.arange(12.0)
    turned = vector[:4].view(2, 2).T
    assert consecutive([turned, vector[4:]]) is None
    assert consecutive([vector[:4], vector[4:8].view(torch.int32)]) is None
    assert consecutive([vector[:4], vector[5:]]) is None
    assert consecutive([torch.empty(0), torch.empty(0)]) is None


@law(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.sampled_from([(3,), (2, 3), (2, 3, 1)]),
    st.booleans(),
    st.booleans(),
)
def test_tensors_at_equal_distances_are_a_stack_without_a_copy(
    gaps: list[int], shape: tuple[int, ...], even: bool, turned: bool
) -> None:
    """The first gap is before them all; where `even`, the others are alike."""
    numel = math.prod(shape)
    between = [gaps[-1]] * (len(gaps) - 1) if even else gaps[1:]
    memory = torch.arange(float(gaps[0] + len(gaps) * numel + sum(between)))
    begins, at = [], gaps[0]
    for gap in [*between, 0]:
        begins.append(at)
        at += numel + gap
    tensors = [memory[begin : begin + numel].view(shape) for begin in begins]
    tensors = tensors[::-1] if turned else tensors
    stack = stacked(tensors)
    assert torch.equal(stack, torch.stack(tensors))
    evenly = len(set(between)) < 2 and (not turned or len(tensors) == 1)
    assert (stack.data_ptr() == tensors[0].data_ptr()) == evenly


def test_what_only_looks_like_a_stack_is_copied() -> None:
    vector = torch.arange(12.0)
    overlapping = [vector[:4], vector[2:6], vector[4:8]]
    turned = [vector[:4].view(2, 2).T, vector[4:8].view(2, 2)]
    same = [vector[:4], vector[:4]]
    for tensors in (overlapping, turned, same):
        stack = stacked(tensors)
        assert torch.equal(stack, torch.stack(tensors))
        assert stack.data_ptr() != vector.data_ptr()


@law(
    st.lists(st.sampled_from([0, 1, 50, 2**15, 2**16 + 1, 2**17]), max_size=7),
    st.none() | st.tuples(st.integers(0, 6), st.sampled_from([math.nan, math.inf, -math.inf])),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_all_are_finite_if_each_is(numels: list[int], bad: tuple[int, float] | None, other: torch.dtype) -> None:
    tensors = [torch.ones(numel, dtype=other if at % 3 == 2 else torch.float32) for at, numel in enumerate(numels)]
    if bad is not None and bad[0] < len(tensors) and tensors[bad[0]].numel():
        tensors[bad[0]][-1] = bad[1]
    assert all_finite(iter(tensors)) == all(bool(tensor.isfinite().all()) for tensor in tensors)


def test_means_together_are_those_of_each() -> None:
    shapes = {"a": (3, 5), "large": (100, 100), "b": (7,), "double": (4,), "c": (2, 2)}
    ranks = [
        {name: torch.randn(shape, dtype=torch.float64 if name == "double" else None) for name, shape in shapes.items()}
        for _ in range(3)
    ]
    for result in run_lockstep([means_of(own) for own in ranks]):
        assert list(result.value) == list(shapes)
        for name, mean in result.value.items():
            assert torch.equal(mean, sum_in_rank_order([own[name] for own in ranks]))
    assert run_lockstep([means_of({})])[0].value == {}


def test_equal_layers_have_one_table() -> None:
    grads: Tensors = {"w": torch.zeros(4, 5), "b": torch.zeros(4)}
    table = Batch.of(grads).table
    assert Batch.of({name: grad.clone() for name, grad in grads.items()}).table is table
    assert Batch.of({**grads, "b": torch.zeros(5)}).table[1].shape == (5,)
    roles = [layer.role for layer in Batch.of(grads, [Layer("w", (4, 5), "linear")]).table]
    assert roles == ["linear", "other"]
    assert table.numel == 24
    assert table.numels == (20, 4)
    assert table.names == ("w", "b")


def test_a_table_from_another_process_is_the_one_here() -> None:
    """Its hash is of names, whose hashes differ between processes."""
    table = Table.of([Layer("w", (4, 5)), Layer("b", (4,))])
    assert hash(table) == hash(tuple(table))
    assert copy.deepcopy(table) is table  # made anew from its layers, as a pickled one is
    assert table.__reduce__() == (Table.of, (tuple(table),))


@pytest.mark.parametrize("codec", ["sign", "one_bit", "qsgd"])
def test_a_compressor_follows_other_layers(codec: str) -> None:
    """One that was asked for some layers is not taken for others of the same number of elements."""
    compressor = codecs.make(codec)
    first, second = (Table.of_shapes(shapes) for shapes in ([(8, 32), (8,)], [(4, 64), (8,)]))
    assert for_layers(compressor, first) is for_layers(compressor, Table.of_shapes(layer.shape for layer in first))
    vector = torch.randn(264)
    for table in (second, first):
        pair = [
            for_layers(one, table).compress(vector, torch.Generator().manual_seed(1))
            for one in (compressor, codecs.make(codec))
        ]
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
