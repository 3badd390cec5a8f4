"""Blocks of steps: what is put in is what the file holds, bit for bit, and memory is never used again too early."""

import zlib
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlab.capture.writing import segment
from gradlab.capture.writing.buffers import Block, BufferPool
from gradlab.capture.writing.folder import start_folder
from gradlab.capture.writing.rank_writer import RankWriter
from gradlab.capture.writing.values import all_finite, chunk_checksums, count_non_finite
from gradlab.layout import Layer
from gradlab.trace import Trace, check
from gradlab.trace.crc import crc32
from gradlab.trace.schema import Manifest, row_checksums
from gradlab.trace.segment import as_float32

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Of 16 rows, a chunk holds 16,384 columns of them: one chunk, several that end together, and several that do not.
LAYERS = (
    Layer("scalar", (), "other"),
    Layer("small", (7, 3), "linear"),
    Layer("nothing", (0, 4), "linear"),
    Layer("even", (2, 16384), "linear"),
    Layer("odd", (3, 7001), "linear"),
)
SPECIAL = [0.0, -0.0, 1e-40, -3e38, 2e19, 65504.0, float("inf"), float("-inf"), float("nan")]


def gradients(step: int, dtype: str, specials: bool = True) -> list[torch.Tensor]:
    """A gradient per layer, some of them transposed in memory, as channels_last convolutions are."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(layer.shape, generator=generator).to(TORCH[dtype]) for layer in LAYERS]
    if specials:
        for gradient in drawn:
            if gradient.numel() > len(SPECIAL):
                places = torch.randperm(gradient.numel(), generator=generator)[: step % (len(SPECIAL) + 1)]
                gradient.view(-1)[places] = torch.tensor(SPECIAL[: len(places)]).to(TORCH[dtype])
    return [gradient.t().contiguous().t() if gradient.ndim == 2 and step % 2 else gradient for gradient in drawn]


def bits(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values).tobytes()


@settings(max_examples=6, deadline=None)
@given(
    dtype=st.sampled_from(list(TORCH)),
    steps=st.integers(1, 40),
    most_steps=st.sampled_from([None, 1, 3, 16]),
    flushes=st.sets(st.integers(0, 39), max_size=4),
    segment_bytes=st.sampled_from([1, 2**30]),
)
def test_what_is_put_in_is_what_is_read_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    steps: int,
    most_steps: int | None,
    flushes: set[int],
    segment_bytes: int,
) -> None:
    """Whether blocks are written whole, or in parts as `flush` comes, and into however many files."""
    folder = tmp_path_factory.mktemp("blocks") / "t"
    manifest = Manifest(1, LAYERS, dtype)
    start_folder(folder, manifest, overwrite=False)
    writer = RankWriter(folder, manifest, 0, segment_bytes, most_steps)
    pool = BufferPool(LAYERS, dtype, writer.rows, 1)
    counts = []
    for index in range(steps):
        step = pool.acquire(lambda: False)
        assert step is not None
        step.record["index"] = index
        drawn = gradients(index, dtype)
        for position, gradient in enumerate(drawn):
            step.put(position, gradient)
        step.unused[index % len(LAYERS)] = True
        counts.append(sum(int((~torch.isfinite(gradient)).sum()) for gradient in drawn))
        pool.keep(step)
        writer.append(step)
        if step.last:
            pool.release(step.block)
        if index in flushes:
            writer.flush()
            assert writer.steps_committed == index + 1
    writer.close()
    assert check(folder).ok
    with Trace(folder) as trace:
        assert trace.rank_steps == (steps,)
        assert trace.scalars(0)["non_finite"].tolist() == counts
        for position, layer in enumerate(LAYERS):
            read = trace.read(layer.name, 0)
            for index in range(steps):
                given_in = gradients(index, dtype)[position].float().numpy()
                assert bits(read[index]) == bits(given_in), (layer.name, index)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 5), room=st.integers(0, 7), moves=st.lists(st.sampled_from("akkrd"), max_size=60))
def test_a_step_that_waits_is_never_overwritten(rows: int, room: int, moves: list[str]) -> None:
    """Whatever order steps are acquired, kept, dropped and written in; and no fewer may wait than was asked for."""
    layer = Layer("w", (2, 3), "linear")
    pool = BufferPool((layer,), "float32", rows, room)
    waiting: deque[tuple[int, object]] = deque()
    for number, move in enumerate(moves):
        step = pool.acquire(lambda: False) if move in "akd" else None
        if move == "r":  # the writer takes the oldest step, and gives a block back with its last row
            if waiting:
                _, taken = waiting.popleft()
                if taken.last:
                    pool.release(taken.block)
        elif step is None:
            assert len(waiting) > room
        else:
            step.put(0, torch.full(layer.shape, float(number)))
            if move == "k":
                pool.keep(step)
                waiting.append((number, step))
        for held, taken in waiting:
            assert (taken.block.stored(0, taken.index, taken.index + 1) == held).all()


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_what_is_found_out_of_chunks_is_what_rows_say(dtype: str, rows: int) -> None:
    block = Block(LAYERS, dtype, rows)
    for index in range(rows):
        step = block.step(index)
        for position, gradient in enumerate(gradients(index, dtype)):
            step.put(position, gradient)
    for position, layer in enumerate(LAYERS):
        stored = block.stored(position, 0, rows)
        assert (chunk_checksums(block.chunks[position], layer.numel) == row_checksums(stored)).all()
        expected = np.count_nonzero(~np.isfinite(as_float32(stored, dtype)), axis=1)
        assert count_non_finite([stored], dtype).tolist() == expected.tolist()
        if all_finite(block.chunks[position], dtype):
            assert not expected.any()


@pytest.mark.parametrize("dtype", TORCH)
def test_ordinary_gradients_need_no_count(dtype: str) -> None:
    block = Block(LAYERS, dtype, 3)
    for index in range(3):
        step = block.step(index)
        for position, gradient in enumerate(gradients(index, dtype, specials=False)):
            step.put(position, gradient)
    assert all(all_finite(chunks, dtype) for chunks in block.chunks)


def test_a_file_of_which_the_page_cache_forgets_most_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "CACHED_BYTES", 2**20)
    manifest = Manifest(1, LAYERS)
    start_folder(tmp_path / "t", manifest, overwrite=False)
    writer = RankWriter(tmp_path / "t", manifest, 0, most_steps=1)
    pool = BufferPool(LAYERS, "float32", writer.rows, 1)
    for index in range(30):
        step = pool.acquire(lambda: False)
        assert step is not None
        step.record["index"] = index
        for position, gradient in enumerate(gradients(index, "float32")):
            step.put(position, gradient)
        pool.keep(step)
        writer.append(step)
        pool.release(step.block)
    writer.close()
    assert check(tmp_path / "t").ok


@given(data=st.binary(max_size=300), begun=st.integers(0, 2**32 - 1))
def test_checksums_are_zlibs_whatever_computes_them(data: bytes, begun: int) -> None:
    assert crc32(data, begun) == zlib.crc32(data, begun)
