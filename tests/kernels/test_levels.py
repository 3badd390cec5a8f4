"""Kernels of levels under known tables, by Triton's interpreter, against the processor's bytes and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from kernels.test_quantizers import by_kernels

from gradlab.codec import Context, Exchanged, Tensors, exchange_group
from gradlab.codecs.ecsq import _HEADER, ECSQ
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.layout import Layer
from support.benchmark_modules import benchmark_modules
from support.laws import law, thorough

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


def coded(seed: int, sizes: list[int], tail: float, step: float) -> tuple[torch.Tensor, ECSQ, bytes]:
    """A vector, its codec, and its message by the processor."""
    codec = ECSQ(ECSQ.Settings(step=step)).for_layers([Layer(f"w{at}", (n,)) for at, n in enumerate(sizes)])
    vector = drawn(seed, sizes, tail)
    quantized = codec._quantized(vector, step)
    assert quantized is not None
    return (
        vector,
        codec,
        _HEADER.pack(step, *quantized.told, 0.0) + codec._encoded(quantized, len(vector))[_HEADER.size :],
    )


def on_device(codec: ECSQ) -> Any:
    from gradlab.kernels import levels

    return levels.table_for(codec._sizes, torch.device("cpu"), _HEADER.size)


def message_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


sizes = st.lists(st.sampled_from([0, 1, 2, 33, 130, 300]), min_size=1, max_size=3).filter(sum)


@law(sizes, st.sampled_from([0.0, 1.5]), st.sampled_from([0.01, 0.5, 1.0, 4.0]), st.integers(0, 99), examples=10)
def test_bytes_and_values_are_those_of_the_processor(sizes: list[int], tail: float, step: float, seed: int) -> None:
    from gradlab.kernels import levels

    vector, codec, expected = coded(seed, sizes, tail, float(np.float32(step)))
    with by_kernels() as started:
        table = on_device(codec)
        message, (count, misfits) = levels.encode(vector, torch.tensor(step), table, 4 * len(vector) + 99)
        if not misfits:
            assert bytes(message[: int(count)].tolist()) == expected
        assert len(started) == 6
        total, messages = torch.ones(len(vector)), [message_of(expected), message_of(expected)]
        flags = int(levels.add_decoded(total, messages, 0.25, table))
        assert len(started) == 6 + 7  # whatever the number of messages
        assert (flags == 0) == (not misfits)
        if differ := not misfits and seed % 3 == 0:
            other = message_of(coded(seed + 1, sizes, 1.5 - tail, step)[2])
            more = torch.ones(len(vector))
            flags = int(levels.add_decoded(more, [other, *messages], 0.25, table))
    if not misfits:
        before = torch.ones(len(vector))
        for found, sent in ((total, messages), *([(more, [other, *messages])] if differ and not flags else [])):
            wanted = before.clone()
            for message in sent:
                codec._decoded(message, vector).added_to(wanted, 0.25)
            assert torch.equal(found, wanted)


@law(sizes, st.sampled_from([0.5, 4.0]), st.integers(0, 10**6), st.integers(0, 255), examples=5)
def test_a_damaged_message_is_told_or_decoded_as_the_processor_does(
    sizes: list[int], step: float, place: int, value: int
) -> None:
    """And nothing is written outside a vector."""
    from gradlab.kernels import levels

    vector, codec, data = coded(7, sizes, 1.0, step)
    damaged = bytearray(data)
    damaged[place % len(data)] = value
    with by_kernels():
        table = on_device(codec)
        for given in (bytes(damaged), data[: place % len(data)] + b"\0", data + b"\0"):
            around = torch.ones(len(vector) + 200)
            flags = int(levels.add_decoded(around[100:-100], [message_of(given)], 1.0, table))
            assert (around[:100] == 1).all()
            assert (around[-100:] == 1).all()
            if not flags:
                positions = codec._decoded(message_of(given), vector).positions
                assert positions is not None
                assert set(np.flatnonzero(around[100:-100].numpy() != 1)) <= set(positions.tolist())


LAYERS = [Layer("w", (3, 30), "linear"), Layer("b", (7,), "bias")]


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


@pytest.mark.parametrize(("options", "packed"), [({"step": 1.0}, 4), thorough({"bits": 1.5}, 2)])
def test_ranks_by_kernels_are_those_without(options: dict[str, Any], packed: int) -> None:
    """Means, own contributions, states and bytes; without a kernel that encodes where the step is not known yet."""
    codec = ECSQ(ECSQ.Settings(**options))
    plain = exchanged(codec, 2)
    with by_kernels() as started:
        for one, other in zip(exchanged(codec, 2), plain, strict=True):
            assert one.payload_bytes == other.payload_bytes
            for kind in ("mean", "own", "state"):
                found, expected = getattr(one.value, kind), getattr(other.value, kind)
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], expected[name]) for name in expected), kind
    assert started.count("_pack") == packed


@pytest.mark.parametrize("ranks", [1, thorough(3)])
def test_the_host_waits_twice_for_a_step(ranks: int) -> None:
    """For the length of its message, and for whether others' were decoded."""
    codec, states = ECSQ(ECSQ.Settings(bits=1.5)), [Tensors()] * ranks
    with benchmark_modules("device_calls") as modules, modules["device_calls"].far_device() as device:
        for iteration in range(3):
            device.waits.clear()
            runs = []
            for rank, state in enumerate(states):
                given = gradients(rank, iteration % 2)
                far = {name: modules["device_calls"].FarTensor(one) for name, one in given.items()}
                run = exchange_group(codec, far, state, Context(rank, ranks, iteration))
                runs.append(modules["device_calls"]._counted(run, device, rank == 0))
            states = [done.value.state for done in run_lockstep(runs)]
        assert device.waits.total() == 2
