"""Compressors of blocks: runs of elements that share a number, such as a scale. Each block lies in one layer.

A compressor of blocks must know where layers end, and where a vector may be cut into shards.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from gradlab.codec.abilities import kinds
from gradlab.codec.batch import Table
from gradlab.codec.blocks import WHOLE, Blocks, block_sizes
from gradlab.codec.compressor import Compressor
from gradlab.codec.routes import join
from gradlab.coding.bits import PIECE
from gradlab.coding.random_bits import RandomBits
from gradlab.kernels import Form, Source, usable
from gradlab.layout import Layer

if TYPE_CHECKING:
    from gradlab.kernels.blocks import BlockTable

CACHED = PIECE  # elements worked on at a time
_ROWS_CACHED = 2**18
_WORTH_A_ROW = 16  # elements of a block from which the largest of a row is found faster than that of a run
_MANY = 6  # ranks whose small payloads are decoded as one
_MOST_ON_DEVICE = 2**26  # elements that a GPU decodes at once, where calls cost more than memory: 256 MiB in float32
Span = tuple[int, int]
Self = TypeVar("Self", bound="PiecewiseCompressor")
SomeBlocks = TypeVar("SomeBlocks", bound="BlockCompressor")


class Reduction(NamedTuple):
    """How blocks are reduced to a number or a few each.

    of_rows: reduces equal blocks, (m, n) -> (..., m); for large blocks, and on a GPU.
    of_blocks: reduces blocks of any sizes on the CPU: values (n,), the blocks' first positions (m,), as numpy's
        `reduceat` takes them, and their sizes (m,), to (..., m). Many small layers thus take few calls, and a block
        gives the same bits alone and among others.
    kernel: its name in `gradlab.kernels.blocks`.
    """

    of_rows: Callable[[torch.Tensor], torch.Tensor]
    of_blocks: Callable[[torch.Tensor, np.ndarray, np.ndarray], np.ndarray]
    kernel: str


class PiecewiseCompressor(Compressor):
    """A compressor that decodes any part of a vector by itself, so that all ranks' values of a part are added up while
    they are in the cache."""

    @abstractmethod
    def prepared(self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> Any:
        """Return what `fill` takes of a payload of one vector.

        Args:
            payload: the result of `compress`.
            like: a vector of the dtype that is decoded to.
            scale: a factor on all values.
        """

    @abstractmethod
    def fill(self, values: torch.Tensor, prepared: Any, start: int) -> torch.Tensor:
        """Overwrite the part of a vector that begins at element `start` with scale * C(x), and return it.

        Args:
            values: the part, (n,).
            prepared: the result of `prepared`.
            start: the part's first element in the vector, a multiple of 8.
        """

    def average_into(self, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        payloads = list(payloads)
        if self.by_kernels(out):
            return self.summed(out, payloads, scale)
        together = out.numel() * len(payloads)
        fewest, most = (_MANY, CACHED) if out.device.type == "cpu" else (2, _MOST_ON_DEVICE)
        if len(payloads) >= fewest and 0 < together <= most and kinds(self) and not out.numel() % 8:
            # As one vector of all ranks', which takes as many calls as one rank's.
            values = out.new_empty(len(payloads), out.numel())
            joined = join(self, [tuple(one) for one in payloads])
            self.repeated(out.numel(), len(payloads)).average_into(values.view(-1), [joined], scale)
            out.copy_(values[0])
            for of_rank in values[1:].unbind():  # in rank order, as below: a library's sum has an order of its own
                out += of_rank
            return out
        # All ranks' values of a piece while it is in the cache.
        ranks = [self.prepared(payload, out, scale) for payload in payloads]
        scratch = self._scratch(out) if len(ranks) > 1 else out
        for start, stop in self.spans(out):
            piece = self.fill(out[start:stop], ranks[0], start)
            for rank in ranks[1:]:
                piece += self.fill(scratch[: stop - start], rank, start)
        return out

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        if self.by_kernels(total):
            self.summed(total, [payload], scale, add=True)
            return
        prepared, scratch = self.prepared(payload, total, scale), self._scratch(total)
        for start, stop in self.spans(total):
            total[start:stop] += self.fill(scratch[: stop - start], prepared, start)

    def form(self) -> Form | None:
        """Return the codes that kernels of a GPU write and read; None: there are none."""
        return None

    def compress_source(self, source: Source, generator: torch.Generator) -> tuple[torch.Tensor, ...] | None:
        """Compress by kernels, as `compress` does. None, before a random number was drawn, where there are none for a
        sum. source: of at least one element."""
        return None

    def compressed_by_kernels(self, source: Source, generator: torch.Generator) -> tuple[torch.Tensor, ...] | None:
        """Do what `compress` does by kernels; None where there are none."""
        able = source.vector.numel() > 0 and self.by_kernels(source.vector)
        return self.compress_source(source, generator) if able else None

    def encoded(
        self,
        source: Source,
        numbers: torch.Tensor,
        bits: RandomBits | None = None,
        form: Form | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Return packed codes from a kernel.

        numbers: of blocks, (blocks,), float32.
        bits: random numbers of the rounding; None: there are none.
        form: the codes, if not those of `form()`.
        more: other arguments of `gradlab.kernels.codes.encode`.
        """
        from gradlab.kernels.codes import encode

        form, table = form or self.form(), self.block_table(source.vector)
        assert form is not None
        return encode(source, numbers, table, form, None if bits is None else bits.seed, **more)

    def by_kernels(self, vector: torch.Tensor) -> bool:
        """Return whether kernels do the work on a vector."""
        return usable(vector) and self.form() is not None

    def summed(
        self,
        out: torch.Tensor,
        payloads: Sequence[Sequence[torch.Tensor]],
        scale: float,
        add: bool = False,
        form: Form | None = None,
    ) -> torch.Tensor:
        """Overwrite a vector with the sum of all payloads by a kernel, or add to it. form: as in `encoded`."""
        from gradlab.kernels.codes import average

        form = form or self.form()
        assert form is not None
        return average(out, tuple(zip(*payloads, strict=True)), self.block_table(out), form, scale, add)

    @property
    def numbered(self) -> Blocks:
        """The blocks that have a number, or two, in a payload."""
        return self.blocks

    def block_table(self, vector: torch.Tensor) -> BlockTable:
        """Return where blocks lie, on the vector's device."""
        from gradlab.kernels.blocks import table_of

        size, starts, numel = self.numbered.size, self.numbered.starts, vector.numel()
        return self.cached(("table", numel, vector.device), lambda: table_of(size, starts, numel, vector.device))

    def _scratch(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(min(self.span(like), like.numel()))

    def repeated(self: Self, numel: int, times: int) -> Self:
        """Return the compressor of a number of vectors (numel,), one after another."""
        return self

    def span(self, like: torch.Tensor) -> int:
        """Return the number of elements worked on at a time: a multiple of 8 that fits the cache; on a GPU, the whole
        vector."""
        return CACHED if like.device.type == "cpu" else max(8, like.numel() + -like.numel() % 8)

    def spans(self, like: torch.Tensor) -> Iterator[Span]:
        """Return (start, stop) of each run of elements that is worked on at a time, in order."""
        numel, most = like.numel(), self.span(like)
        return ((start, min(numel, start + most)) for start in range(0, numel, most))


class BlockCompressor(PiecewiseCompressor):
    """A compressor of blocks whose elements share a number.

    A block has `block` elements. The last one may have fewer. The compressor that `for_layers` returns also ends its
    blocks where layers end.
    """

    blocks = Blocks(WHOLE)

    @abstractmethod
    def block_of(self, layer: Layer) -> int:
        """Return the elements of a block in a layer.

        More elements than the layer has mean one block for the whole layer.
        """

    def for_layers(self: SomeBlocks, layers: Sequence[Layer]) -> SomeBlocks:
        def made() -> SomeBlocks:
            if len(table) == 1:
                return self._with(Blocks(self.block_of(table[0])))
            sizes = [size for layer in table for size in block_sizes(layer.numel, self.block_of(layer))]
            return self._with(Blocks(self.blocks.size, sizes))

        table = Table.of(layers)
        return self.cached(table, made)

    def repeated(self: SomeBlocks, numel: int, times: int) -> SomeBlocks:
        return self.cached(("repeated", numel, times), lambda: self._with(self.blocks.repeated(numel, times)))

    def part(self: SomeBlocks, start: int, stop: int) -> SomeBlocks:
        if self.blocks.sizes is None:
            return self
        return self.cached(("part", start, stop), lambda: self._with(self.blocks.part(start, stop)))

    def _with(self: SomeBlocks, blocks: Blocks) -> SomeBlocks:
        relative = type(self)(self.settings)
        relative.blocks = blocks
        return relative

    def rows(self, vector: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the blocks of a vector (numel,) in order, as views (m, n): m blocks of n elements each."""
        if not vector.numel():
            return
        sizes, starts = self.blocks.sizes, self.blocks.starts
        if sizes is None or starts is None:
            yield from pieces(vector, min(self.blocks.size, vector.numel()))
            return
        for first, last in _alike(sizes):
            if size := int(sizes[first]):
                yield from pieces(vector[starts[first] : starts[last]], size)

    def reduced(self, vector: torch.Tensor, reduction: Reduction) -> torch.Tensor:
        """Reduce each block of a vector (numel,) to a number or a few: (..., blocks)."""
        if usable(vector) and (found := self.reduced_by_kernel(Source(vector), reduction.kernel)) is not None:
            return found
        if vector.device.type != "cpu":
            return torch.cat([reduction.of_rows(rows) for rows in self.rows(vector)], -1)
        parts = []
        for begin, end, starts, sizes in self._runs(vector.numel()):
            values = vector[begin:end]
            small = end - begin <= CACHED or len(starts) > 1
            numbers = reduction.of_blocks(values, starts, sizes) if small else None
            parts.append(reduction.of_rows(values.view(1, -1)) if numbers is None else torch.from_numpy(numbers))
        return torch.cat(parts, -1)

    def reduced_by_kernel(
        self, source: Source, kind: str, over: float = 1.0, tops: bool = False
    ) -> torch.Tensor | None:
        """Reduce as `gradlab.kernels.blocks.reduced` does; None where there is no kernel for it."""
        from gradlab.kernels.blocks import reduced

        return reduced(source, self.block_table(source.vector), kind, over, tops)

    def encoded_in_one_pass(
        self, source: Source, generator: torch.Generator | None, over: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return numbers of blocks and codes as `gradlab.kernels.codes.encode_tiles` does. generator: draws the random
        numbers of the rounding, if they are needed."""
        table, form, vector = self.block_table(source.vector), self.form(), source.vector
        if form is None or table.tiles is None or (generator is not None and table.aligned < 16):
            return None
        from gradlab.kernels.codes import encode_tiles

        seed = None if generator is None else RandomBits(generator, vector.device).seed
        return encode_tiles(source, table, form, seed, over)

    def reduced_and_encoded(self, source: Source, kind: str, coded: Source) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers of a vector's blocks, (n * blocks,), and another one's codes, which do not depend on them, by
        two launches, or by three that write the error too."""
        from gradlab.kernels.blocks import REDUCTIONS, reduced

        table, later = self.block_table(source.vector), source.left is None
        found = reduced(source, table, kind, later=later)
        assert found is not None
        if table.whole or not later:
            return found.view(-1), self.encoded(coded, found.view(-1))
        numbers = source.vector.new_empty(REDUCTIONS[kind][2] * table.count)
        return numbers, self.encoded(coded, numbers, every=[found], kind=kind)

    def largest_magnitudes(self, vector: torch.Tensor) -> torch.Tensor:
        """Find the largest magnitude of each block of a vector (numel,): (blocks,)."""
        on_cpu = vector.device.type == "cpu" and not usable(vector)
        if self.blocks.sizes is None and _WORTH_A_ROW <= self.blocks.size <= CACHED and on_cpu:
            parts = [largest_of_rows(rows) for rows in self.rows(vector)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.reduced(vector, LARGEST)

    def _runs(self, numel: int) -> Iterable[tuple[int, int, np.ndarray, np.ndarray]]:
        """Cut a vector (numel,) into runs of blocks that fit the cache: start, stop, its blocks' starts and sizes. A
        larger block is a run by itself."""
        if (starts := self.blocks.starts) is None:
            return _runs_of(np.arange(0, numel, min(self.blocks.size, numel)), numel)
        return self.cached("runs", lambda: list(_runs_of(starts[:-1], numel)))

    def blocks_of(self, start: int, stop: int) -> Span:
        """Return the indices of the first and the last block of the elements from start to stop."""
        if self.blocks.starts is None:
            return self.blocks.between(start, stop)
        return self.cached(("between", start, stop), lambda: self.blocks.between(start, stop))

    def scale(
        self, values: torch.Tensor, factors: torch.Tensor, start: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply a part (n,) of a vector from element `start` by its blocks' factors, of all blocks (blocks,), in
        place unless `out` is given."""
        return self._with_blocks(torch.mul, values, factors, start, out)

    def divide(
        self, values: torch.Tensor, divisors: torch.Tensor, start: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Divide a part of a vector by its blocks' divisors, and return it. Arguments as for `scale`."""
        return self._with_blocks(torch.div, values, divisors, start, out)

    def divide_and_shift(
        self, values: torch.Tensor, divisors: torch.Tensor, start: int, term: float, out: torch.Tensor
    ) -> torch.Tensor:
        """Write term + values / divisors, in one pass where that can be. Arguments as for `scale`."""

        def quotient_and_term(values: torch.Tensor, divisors: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            if divisors.ndim == 0:
                return torch.div(values, divisors, out=out).add_(term)
            # One of three operands at most may be a number where elements lie side by side, or the loop is a slow one.
            terms = values.new_full(values.shape[1:] if divisors.ndim > 1 else (), term)
            return torch.addcdiv(terms, values, divisors, out=out)

        return self._with_blocks(quotient_and_term, values, divisors, start, out)

    def shift(self, values: torch.Tensor, terms: torch.Tensor, start: int) -> torch.Tensor:
        """Add to a part of a vector its blocks' terms, in place, and return it. Arguments as for `scale`."""
        return self._with_blocks(torch.add, values, terms, start, None)

    def _with_blocks(
        self,
        function: Callable[..., torch.Tensor],
        values: torch.Tensor,
        numbers: torch.Tensor,
        start: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        out, numel = values if out is None else out, values.numel()
        if not numel:
            return out
        first, last = self.blocks_of(start, start + numel)
        if first == last:
            return function(values, numbers[first], out=out)
        if (starts := self.blocks.starts) is None:
            _blockwise(function, values, numbers, start, self.blocks.size, out)
            return out
        stop = start + numel  # of the elements, of which each block has so many
        counts = self.cached(("of blocks", start, stop), lambda: np.diff(starts[first : last + 2].clip(start, stop)))
        if numbers.device.type == "cpu":
            return function(values, torch.from_numpy(numbers.numpy()[first : last + 1].repeat(counts)), out=out)
        # A GPU repeats a number by 32 threads, however often. And it would have to be given the counts.
        at = 0
        for begin, end in _alike(counts):
            rows, shape = numbers[first + begin : first + end, None], (end - begin, int(counts[begin]))
            stop = at + math.prod(shape)
            function(values[at:stop].view(shape), rows, out=out[at:stop].view(shape))
            at = stop
        return out


def largest_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row, (m, n) -> (m,)."""
    return torch.maximum(rows.amax(1), -rows.amin(1))


def largest_of_blocks(vector: torch.Tensor, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each block, for `BlockCompressor.reduced`: (n,), (m,), (m,) -> (m,)."""
    values = vector.numpy()
    return np.maximum(np.maximum.reduceat(values, starts), -np.minimum.reduceat(values, starts))


LARGEST = Reduction(largest_of_rows, largest_of_blocks, "largest")


def _runs_of(starts: np.ndarray, numel: int) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Cut a vector (numel,) of blocks that begin at these places, (blocks,), into runs: see `BlockCompressor._runs`."""
    first, edges = 0, np.append(starts, numel)
    while first < len(starts):
        begin = int(starts[first])
        last = max(first + 1, int(np.searchsorted(starts, begin + CACHED, "right")) - 1)
        end = int(edges[last])
        yield begin, end, starts[first:last] - begin, np.diff(edges[first : last + 1])
        first = last


def pieces(vector: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Cut a vector (numel,) into views: matrices (m, size) of whole blocks, and (1, rest) of the remaining elements. On
    a CPU each matrix fits the cache."""
    whole = vector.numel() // size * size
    if whole == vector.numel() <= _ROWS_CACHED:
        return [vector.view(-1, size)]
    most = max(1, _ROWS_CACHED // size) * size if vector.device.type == "cpu" else max(1, whole)
    matrices = [vector[a:b].view(-1, size) for a, b in pairwise([*range(0, whole, most), whole])]
    rest = vector[whole:]
    return [*matrices, rest.view(1, -1)] if rest.numel() else matrices


def _alike(sizes: np.ndarray) -> Iterator[Span]:
    """Yield the first and the last place, exclusive, of each run of equal numbers (n,)."""
    ends = [*(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    return pairwise([0, *ends])


def _blockwise(
    function: Callable[..., torch.Tensor],
    values: torch.Tensor,
    numbers: torch.Tensor,
    start: int,
    size: int,
    out: torch.Tensor,
) -> None:
    first, offset = divmod(start, size)
    numel = values.numel()
    if not offset and not numel % size:
        rows, count = values.view(-1, size), numel // size
        of_rows = numbers[first : first + count].unsqueeze(1)
        function(rows, of_rows, out=rows if out is values else out.view(-1, size))
        return
    head = min(numel, size - offset) if offset else 0
    whole = head + (numel - head) // size * size
    if head:
        function(values[:head], numbers[first], out=out[:head])
        first += 1
    if whole > head:
        count = (whole - head) // size
        of_rows = numbers[first : first + count, None]
        function(values[head:whole].view(count, size), of_rows, out=out[head:whole].view(count, size))
        first += count
    if whole < numel:
        function(values[whole:], numbers[first], out=out[whole:])
