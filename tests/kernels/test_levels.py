"""Kernels of levels under known tables, by Triton's interpreter, against the processor's bytes and values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from kernels.test_quantizers import by_kernels

from gradlab.codec import Context, Exchanged, Tensors, exchange_group
from gradlab.codecs.ecsq import ECSQ
from gradlab.coding.level_tables import LevelTables, nothing_known, running
from gradlab.coding.levels import decode_levels, encode_levels
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.layout import Layer
from support.laws import law

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # numpy's, in the interpreter


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Parts and blocks of few elements, which take the interpreter less time; nothing else follows from their sizes."""
    from gradlab.coding import levels as form
    from gradlab.kernels import levels

    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in (
            (form, "PART", 256),
            (form, "CODES", 128),
            (levels, "_SLOT", 128),
            (levels, "_LANES", 8),
            (levels, "_PER", 4),
        ):
            patch.setattr(module, name, size)
        yield


def drawn(seed: int, sizes: list[int], tail: float) -> torch.Tensor:
    """Layers whose standard deviations differ."""
    draw = torch.Generator().manual_seed(seed)
    widths = [0.3 + at % 3 for at in range(len(sizes))]
    parts = [w * torch.randn(size, generator=draw) for w, size in zip(widths, sizes, strict=True)]
    return torch.cat([part * part.abs() ** tail for part in parts])


def coded(seed: int, sizes: list[int], tail: float, step: float) -> tuple[torch.Tensor, LevelTables, bytes]:
    """A vector, tables of others like it, and its bytes by the processor."""
    codec, nothing, seen = ECSQ(ECSQ.Settings(step=step)), nothing_known(len(sizes)), nothing_known(len(sizes))
    for other in range(3):
        given = codec._quantized(drawn(seed + 1 + other, sizes, tail), step)
        data = encode_levels(given.positions.numpy(), given.levels.numpy(), sizes, nothing)
        decode_levels(data, sizes, nothing, seen)
    vector, tables = drawn(seed, sizes, tail), running(seen)
    given = codec._quantized(vector, step)
    return vector, tables, encode_levels(given.positions.numpy(), given.levels.numpy(), sizes, tables.frequencies)


sizes = st.lists(st.sampled_from([0, 1, 2, 33, 130, 300]), min_size=1, max_size=3).filter(sum)


@law(sizes, st.sampled_from([0.0, 1.5]), st.sampled_from([0.01, 0.5, 1.0, 4.0]), st.integers(0, 99), examples=20)
def test_bytes_and_values_are_those_of_the_processor(sizes: list[int], tail: float, step: float, seed: int) -> None:
    from gradlab.kernels import levels

    step = float(np.float32(step))
    vector, tables, expected = coded(seed, sizes, tail, step)
    with by_kernels() as started:
        table = levels.table_for(sizes, tables.frequencies, tables.centroids, vector.device)
        message, (codes, rests, blocks, misfits) = levels.encode(vector, step, table, 4 * len(vector) + 99)
        count = int(table.nbytes + codes + rests + 2 * blocks)
        if not misfits:
            assert bytes(message[:count].tolist()) == expected
        assert len(started) == 5
        whole = torch.frombuffer(bytearray(expected), dtype=torch.uint8)
        total = torch.ones(len(vector))
        flags = int(levels.add_decoded(total, whole, step, 0.5, table))
        assert len(started) == 12
    assert (flags == 0) == (not misfits)
    if not misfits:
        positions, found = map(torch.from_numpy, decode_levels(expected, sizes, tables.frequencies))
        codec = ECSQ(ECSQ.Settings(step=step)).for_layers([Layer(f"w{at}", (n,)) for at, n in enumerate(sizes) if n])
        known = [at for at, size in enumerate(sizes) if size]
        told = LevelTables([tables.frequencies[at] for at in known], tables.centroids[known])
        values = codec._knowing(told)._values(positions, found, step, [], torch.float32)
        assert torch.equal(total, torch.ones(len(vector)).index_add_(0, positions, 0.5 * values))


@law(sizes, st.sampled_from([0.5, 4.0]), st.integers(0, 10**6), st.integers(0, 255), examples=20)
def test_a_damaged_message_is_told_or_decoded_as_the_processor_does(
    sizes: list[int], step: float, place: int, value: int
) -> None:
    """And nothing is written outside a vector."""
    from gradlab.kernels import levels

    vector, tables, data = coded(7, sizes, 1.0, step)
    damaged = bytearray(data)
    damaged[place % len(data)] = value
    with by_kernels():
        table = levels.table_for(sizes, tables.frequencies, tables.centroids, vector.device)
        for given in (bytes(damaged), data[: place % len(data)] + b"\0", data + b"\0"):
            around = torch.ones(len(vector) + 200)
            message = torch.frombuffer(bytearray(given), dtype=torch.uint8)
            flags = int(levels.add_decoded(around[100:-100], message, step, 1.0, table))
            assert (around[:100] == 1).all()
            assert (around[-100:] == 1).all()
            if not flags:
                positions, _ = decode_levels(given, sizes, tables.frequencies)
                assert set(np.flatnonzero(around[100:-100].numpy() != 1)) <= set(positions.tolist())


LAYERS = [Layer("w", (10, 30), "linear"), Layer("b", (7,), "bias")]


def gradients(rank: int, iteration: int) -> Tensors:
    vector = drawn(10 * iteration + rank, [layer.numel for layer in LAYERS], 0.5)
    cut = vector.split([layer.numel for layer in LAYERS])
    return {layer.name: one.view(layer.shape) for layer, one in zip(LAYERS, cut, strict=True)}


def exchanged(codec: ECSQ, iterations: int) -> list[LockstepResult[Exchanged]]:
    states, results = [{}, {}], []
    for iteration in range(iterations):
        rows = [
            exchange_group(codec, gradients(rank, iteration), state, Context(rank, 2, iteration, "g"))
            for rank, state in enumerate(states)
        ]
        results += run_lockstep(rows)
        states = [result.value.state for result in results[-2:]]
    return results


@pytest.mark.parametrize(("options", "iterations", "packed"), [({"step": 1.0}, 1, 2), ({"bits": 1.5}, 2, 2)])
def test_ranks_by_kernels_are_those_without(options: dict[str, float], iterations: int, packed: int) -> None:
    """Means, own contributions, states and bytes, of fitted tables; without a kernel where the step is not known."""
    codec = ECSQ(ECSQ.Settings(tables="fitted", **options)).fitted(LAYERS, (gradients(rank, 9) for rank in range(4)))
    plain = exchanged(codec, iterations)
    with by_kernels() as started:
        for one, other in zip(exchanged(codec, iterations), plain, strict=True):
            assert one.payload_bytes == other.payload_bytes
            for kind in ("mean", "own", "state"):
                found, expected = getattr(one.value, kind), getattr(other.value, kind)
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], expected[name]) for name in expected), kind
    assert started.count("_pack") == packed
    assert started.count("_add") >= 2 * started.count("_pack")
