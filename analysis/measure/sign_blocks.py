"""How much of a gradient's energy blocks of signs keep: Fig. 1 and Table 1 of dist-EF-blockSGD, and better blocks.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
section 3.2. C(v) = ||v||_1 / d sign(v) of a block v of d elements keeps ||v||_1^2 / d of the energy ||v||_2^2.

Sums of magnitudes and energies add up over tensors, so that work is shared out by layer and a worker holds one layer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradlab.analysis.gradients import read_positions
from gradlab.analysis.measure.spectrum import spread
from gradlab.analysis.parallel import share_out_layers
from gradlab.codec import Table
from gradlab.codecs.sign import Sign
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceSource

_BLOCK_VALUES = 2**22  # of one rank, read at a time
_SMALLEST_BLOCK = 16  # elements: below it the scale weighs two bits per value and more


def variation(block: np.ndarray) -> float:
    """Compute the coefficient of variation of |v| (Fig. 1a); NaN for zeros and no elements.
    It is sqrt(pi / 2 - 1) = 0.76 for Gaussian values; delta of the block is 1 / (1 + variation^2).
    """
    magnitudes = np.abs(block, dtype=np.float64)
    mean = magnitudes.mean() if block.size else 0.0
    return float(magnitudes.std() / mean) if mean > 0 else np.nan


def delta(block: np.ndarray) -> float:
    """||v||_1^2 / (d ||v||_2^2), the delta of Definition 1 for one block; NaN for zeros and for no elements."""
    energy = float(np.square(block, dtype=np.float64).sum())
    return float(np.abs(block).sum(dtype=np.float64) ** 2 / (block.size * energy)) if energy > 0 else np.nan


def kept_energy(vector: np.ndarray, block_size: int) -> float:
    """Energy that signs with one scale per block keep: the sum over blocks of ||v_b||_1^2 / d_b."""
    magnitudes = np.abs(vector).astype(np.float64)
    sums = np.add.reduceat(magnitudes, range(0, len(magnitudes), block_size)) if len(magnitudes) else np.zeros(0)
    sizes = np.full(len(sums), block_size)
    if len(sums):
        sizes[-1] = len(magnitudes) - block_size * (len(sums) - 1)
    return float((sums**2 / sizes).sum())


def kept_energies(vector: np.ndarray) -> np.ndarray:
    """`kept_energy` for every size of `candidate_sizes`, (candidates,): large blocks add up from small ones."""
    count, sizes = len(vector), candidate_sizes(len(vector))
    if not count:
        return np.zeros(len(sizes))
    magnitudes, kept = np.abs(vector), {}
    smallest = sizes[-1]
    sums = np.add.reduceat(magnitudes, np.arange(0, count, smallest), dtype=np.float64)
    for size in reversed(sizes[1:]):
        while smallest < size:
            sums = np.add.reduceat(sums, np.arange(0, len(sums), 2))
            smallest *= 2
        last = count - size * (len(sums) - 1)
        kept[size] = float(np.square(sums[:-1]).sum() / size + sums[-1] ** 2 / last)
    kept[sizes[0]] = float(sums.sum() ** 2 / count)
    return np.array([kept[size] for size in sizes])


METHODS = ("full-precision SGD", "signSGD with majority vote", "dist-EF-blockSGD")


def bits_per_iteration(parameters: int, blocks: int, workers: int) -> dict[str, int]:
    """Table 1: bits that M workers push and pull in an iteration, d parameters, B blocks."""
    signs = 2 * workers * parameters
    return dict(zip(METHODS, (64 * workers * parameters, signs, signs + 64 * workers * blocks), strict=True))


def counted_bits(tensors: Sequence[np.ndarray], workers: int) -> dict[str, int]:
    """Count Table 1: bits of payloads for one gradient, push and pull, of all workers; tensors: (numel,) each."""
    vectors = [torch.from_numpy(np.ascontiguousarray(tensor)) for tensor in tensors]
    whole, numels = torch.cat(vectors), [vector.numel() for vector in vectors]
    bare, blocks = Sign(Sign.Settings(scale="one")), Sign().for_layers(Table.of_shapes([(numel,) for numel in numels]))
    payloads = ((whole,), *(codec.compress(whole, torch.Generator()) for codec in (bare, blocks)))
    sizes = (sum(part.nbytes for part in payload) for payload in payloads)
    return {name: 2 * workers * 8 * size for name, size in zip(METHODS, sizes, strict=True)}


def candidate_sizes(numel: int) -> list[int]:
    """List block sizes for a tensor: its size, then powers of two below it down to 16, which tensors can share."""
    below = (1 << bit for bit in reversed(range(max(1, numel - 1).bit_length())))
    return [max(1, numel), *(size for size in below if _SMALLEST_BLOCK <= size < numel)]


def share_out_blocks(numels: Sequence[int], kept: Sequence[Sequence[float] | np.ndarray], scales: int) -> list[int]:
    """Choose a candidate per tensor, greedily by energy per added scale, for at most `scales` blocks."""
    counts = [[-(-numel // size) for size in candidate_sizes(numel)] for numel in numels]
    least = sum(count[0] for count in counts)  # one each; a tensor without elements has none
    if scales < least:
        raise GradlabError(f"{scales} scales for {least} tensors: expected one each at least")
    chosen, left = [0] * len(numels), scales - least
    tensors = range(len(numels))
    queue = [item for tensor in tensors for item in _best_step(tensor, 0, counts[tensor], kept[tensor], left)]
    heapq.heapify(queue)
    while queue:
        _, tensor, candidate = heapq.heappop(queue)
        price = counts[tensor][candidate] - counts[tensor][chosen[tensor]]
        if price <= left:
            chosen[tensor], left = candidate, left - price
        for item in _best_step(tensor, chosen[tensor], counts[tensor], kept[tensor], left):
            heapq.heappush(queue, item)
    return chosen


def equal_blocks(numels: Sequence[int], scales: int) -> list[int]:
    """Choose a candidate for each tensor, so that all blocks have about one size, as small as `scales` allow."""
    candidates = [candidate_sizes(numel) for numel in numels]
    for wanted in sorted({size for sizes in candidates for size in sizes}):
        chosen = [max(place for place, size in enumerate(c) if place == 0 or size >= wanted) for c in candidates]
        if sum(-(-n // c[place]) for n, c, place in zip(numels, candidates, chosen, strict=True)) <= scales:
            return chosen
    return [0] * len(numels)


def _best_step(
    tensor: int, now: int, counts: Sequence[int], kept: Sequence[float] | np.ndarray, left: int
) -> list[tuple[float, int, int]]:
    """The affordable step of a tensor that gains most per scale, as (-gain, tensor, candidate); none if none gains."""
    steps = [
        (-(kept[to] - kept[now]) / (counts[to] - counts[now]), tensor, to)
        for to in range(now + 1, len(counts))
        if 0 < counts[to] - counts[now] <= left and kept[to] > kept[now]
    ]
    return [min(steps)] if steps else []


@dataclass(frozen=True)
class SignSeries(Jsonable):
    """Fig. 1 by window (w,), and the lower bounds of delta.

    iterations: the first of each window; variation: (a), means over tensors and gradients; delta_by_tensor,
    delta_of_model: (b), the smallest of any tensor and of all parameters as one block.
    """

    iterations: list[int]
    variation: list[float]
    delta_by_tensor: list[float]
    delta_of_model: list[float]
    bound_by_tensor: float
    bound_of_model: float


@dataclass(frozen=True)
class SharedBlocks(Jsonable):
    """Share of the energy that signs keep with this number of scales; block_sizes: by layer, those that keep `kept`."""

    scales: int
    bits_per_value: float
    kept: float
    kept_by_equal_blocks: float
    block_sizes: dict[str, int]


@dataclass(frozen=True)
class Suggestion(Jsonable):
    """Share of the energy that signs keep: with one scale for the model, and by number of scales."""

    kept_by_one_block: float
    rows: tuple[SharedBlocks, ...]


@dataclass(frozen=True)
class SignBlocks(Jsonable):
    """Fig. 1, Table 1 in bits by method, and suggested blocks. window: recorded iterations behind a point of Fig. 1."""

    window: int
    iterations: list[int]
    figure_1: SignSeries
    bits_per_iteration: dict[str, int]
    counted_bits_per_iteration: dict[str, int]
    suggestion: Suggestion


def measure_sign_blocks(
    trace: Trace,
    window: int | None = None,
    *,
    most_steps: int = 400,
    workers: int = 1,
    progress: Progress | None = None,
) -> SignBlocks:
    """Measure Fig. 1 and Table 1 on a trace, and suggest block sizes by layer.
    The paper compresses gradients with residuals, which a trace does not hold.
    """
    window = window or -(-len(trace.steps) // 20)
    positions = spread(len(trace.steps), most_steps)
    statistics = gather_statistics(trace, positions, window, workers=workers, progress=progress)
    steps = np.asarray(trace.steps).tolist()
    return SignBlocks(
        window,
        [steps[position] for position in positions],
        statistics.figure_1(steps, window),
        bits_per_iteration(sum(statistics.numels), len(statistics.numels), trace.world_size),
        counted_bits([np.zeros(numel, np.float32) for numel in statistics.numels], trace.world_size),
        statistics.suggestion([layer.name for layer in trace.layers]),
    )


def gather_statistics(
    trace: Trace,
    positions: Sequence[int] | np.ndarray,
    window: int = 1,
    *,
    workers: int = 1,
    progress: Progress | None = None,
) -> BlockStatistics:
    """Sum the energy that signs would keep of all ranks' gradients at rising positions of a trace."""
    wanted = np.asarray(positions, np.int64)
    sharing: dict[str, Any] = {"workers": workers, "progress": progress}
    found = share_out_layers(_tensor_sums, trace, trace.layers, wanted, what="sign blocks", **sharing)
    windows = np.repeat(wanted // window, trace.world_size)
    statistics = BlockStatistics([layer.numel for layer in trace.layers], found, windows)
    if not statistics.count:
        raise GradlabError(f"{trace.path}: no gradient that is finite and not zero")
    return statistics


@dataclass(frozen=True)
class _TensorSums:
    """Sums of one tensor over G gradients: those of all ranks at each position, one position after the other.

    variation: see `variation`; magnitude, energy: sums of |v| and v^2; each (G,), NaN of a rank's gradient that is not
    finite. kept: (candidates,), summed over the gradients, see `kept_energies`.
    """

    variation: np.ndarray
    magnitude: np.ndarray
    energy: np.ndarray
    kept: np.ndarray


def _tensor_sums(source: TraceSource, layer: Layer, positions: np.ndarray) -> _TensorSums:
    most = max(1, _BLOCK_VALUES // max(1, layer.numel))
    kept = np.zeros(len(candidate_sizes(layer.numel)))
    with source.open([layer.name]) as trace:
        rows = np.full((len(positions), trace.world_size, 3), np.nan)
        for first in range(0, len(positions), most):
            at = positions[first : first + most]
            for rank in range(trace.world_size):
                finite = trace.scalars(rank)["non_finite"][at] == 0
                block = read_positions(trace, layer.name, rank, at)
                for place in np.flatnonzero(finite):
                    rows[first + place, rank] = _sums(block[place])
                    kept += kept_energies(block[place])
    variations, magnitudes, energies = rows.reshape(-1, 3).T
    return _TensorSums(variations, magnitudes, energies, kept)


def _sums(tensor: np.ndarray) -> tuple[float, float, float]:
    """Variation, sum of magnitudes and energy of a tensor (numel,)."""
    energy = float(np.square(tensor, dtype=np.float64).sum())
    return variation(tensor), float(np.abs(tensor).sum(dtype=np.float64)), energy


def _mean_known(values: np.ndarray) -> np.ndarray:
    """Means over columns (G, n) that are not NaN."""
    known = np.isfinite(values)
    return np.where(known, values, 0.0).sum(1) / known.sum(1)


class BlockStatistics:
    """Sums over `count` gradients; kept: by tensor, energy by candidate; windows: (G,), the window of each gradient."""

    def __init__(self, numels: Sequence[int], tensors: Sequence[_TensorSums], windows: np.ndarray) -> None:
        self.numels = list(numels)
        self.kept = [tensor.kept for tensor in tensors]
        magnitude, energy, variations = (
            np.stack([getattr(tensor, name) for tensor in tensors], axis=1)
            for name in ("magnitude", "energy", "variation")
        )
        # Left out are gradients that are not finite, and those that are zero throughout.
        seen = np.isfinite(energy).all(1) & (energy > 0).any(1)
        magnitude, energy, variations = magnitude[seen], energy[seen], variations[seen]
        self.count, self._numbers = len(energy), windows[seen]
        with np.errstate(invalid="ignore", divide="ignore"):  # of tensors that are zero
            deltas = magnitude**2 / (np.array(self.numels) * energy)
        whole = magnitude.sum(1) ** 2 / sum(self.numels)
        self._energy, self._kept_by_model = float(energy.sum()), float(whole.sum())
        self._rows = np.stack(
            [_mean_known(variations), np.nanmin(deltas, axis=1, initial=np.inf), whole / energy.sum(1)], axis=1
        )

    def figure_1(self, steps: Sequence[int], window: int) -> SignSeries:
        """Fig. 1; steps: iterations by position of the trace."""
        numbers = np.unique(self._numbers).tolist()
        rows = [self._rows[self._numbers == number] for number in numbers]
        return SignSeries(
            iterations=[steps[number * window] for number in numbers],
            variation=[float(row[:, 0].mean()) for row in rows],
            delta_by_tensor=[float(row[:, 1].min()) for row in rows],
            delta_of_model=[float(row[:, 2].min()) for row in rows],
            bound_by_tensor=1 / max(self.numels),
            bound_of_model=1 / sum(self.numels),
        )

    def suggestion(self, names: Sequence[str]) -> Suggestion:
        """Energy kept at the bytes of one scale per tensor, and of 2 to 64 times as many, shared out in three ways."""
        rows = []
        for factor in (1, 2, 4, 8, 16, 32, 64):
            scales = factor * len(self.numels)
            best, equal = share_out_blocks(self.numels, self.kept, scales), equal_blocks(self.numels, scales)
            bits, sizes = 1 + 32 * scales / sum(self.numels), sizes_of(self.numels, best)
            kept = (self.share_kept(best), self.share_kept(equal))
            rows.append(SharedBlocks(scales, bits, *kept, dict(zip(names, sizes, strict=True))))
        return Suggestion(self.share_kept_by_model, tuple(rows))

    @property
    def share_kept_by_model(self) -> float:
        """Share of the energy that signs with one scale for all keep."""
        return self._kept_by_model / self._energy

    def share_kept(self, chosen: Sequence[int]) -> float:
        """Share of the energy that signs keep, with a candidate chosen for each tensor."""
        return sum(float(kept[place]) for kept, place in zip(self.kept, chosen, strict=True)) / self._energy


def sizes_of(numels: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The block sizes of the candidates chosen for tensors."""
    return [candidate_sizes(numel)[place] for numel, place in zip(numels, chosen, strict=True)]
