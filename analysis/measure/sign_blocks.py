"""How much of a gradient's energy blocks of signs keep: Fig. 1 and Table 1 of dist-EF-blockSGD, and better blocks.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
section 3.2. Of a block v of d elements, C(v) = ||v||_1 / d sign(v) keeps ||v||_1^2 / d of the energy ||v||_2^2.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradlab.analysis.gradients import step_gradients
from gradlab.analysis.measure.spectrum import spread
from gradlab.codecs.sign import Sign
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

_SMALLEST_BLOCK = 16  # elements: below it the scale weighs two bits per value and more


def variation(block: np.ndarray) -> float:
    """Coefficient of variation of |v|, its standard deviation over its mean (Fig. 1a); NaN for zeros and no elements.

    sqrt(pi / 2 - 1) = 0.76 for Gaussian values; delta of the block is 1 / (1 + variation^2).
    """
    magnitudes = np.abs(block)
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


METHODS = ("full-precision SGD", "signSGD with majority vote", "dist-EF-blockSGD")


def bits_per_iteration(parameters: int, blocks: int, workers: int) -> dict[str, int]:
    """Table 1: bits that M workers push and pull in an iteration, d parameters, B blocks."""
    signs = 2 * workers * parameters
    return dict(zip(METHODS, (64 * workers * parameters, signs, signs + 64 * workers * blocks), strict=True))


def counted_bits(tensors: Sequence[np.ndarray], workers: int) -> dict[str, int]:
    """Table 1 counted: bits of the codecs' payloads for one gradient, push and pull, of all workers.

    tensors: (numel,) each. A group's last byte of signs is counted whole.
    """
    vectors = [torch.from_numpy(np.ascontiguousarray(tensor)) for tensor in tensors]
    whole, numels = torch.cat(vectors), [vector.numel() for vector in vectors]
    bare, blocks = Sign(Sign.Settings(scale="one")), Sign().for_layers([(numel,) for numel in numels])
    payloads = ((whole,), *(codec.compress(whole, torch.Generator()) for codec in (bare, blocks)))
    sizes = (sum(part.nbytes for part in payload) for payload in payloads)
    return {name: 2 * workers * 8 * size for name, size in zip(METHODS, sizes, strict=True)}


def candidate_sizes(numel: int) -> list[int]:
    """Block sizes to choose from for a tensor: its size, then the powers of two below it down to 16 elements.

    Powers of two, so that tensors of different sizes can share a group.
    """
    below = (1 << bit for bit in reversed(range(max(1, numel - 1).bit_length())))
    return [max(1, numel), *(size for size in below if _SMALLEST_BLOCK <= size < numel)]


def share_out_blocks(numels: Sequence[int], kept: Sequence[Sequence[float] | np.ndarray], scales: int) -> list[int]:
    """Choose a candidate for each tensor, so that at most `scales` blocks in all keep much energy. Greedy.

    kept: by tensor, energy by candidate (`candidate_sizes`). Each step goes where it keeps most energy per added scale;
    a step may halve blocks several times. A step that no longer fits is passed over.

    Raises:
        GradlabError: for fewer scales than tensors.
    """
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
    trace: Trace, window: int | None = None, *, most_steps: int = 400, progress: Progress | None = None
) -> SignBlocks:
    """Measure Fig. 1 and Table 1 on a trace, and suggest block sizes by layer.

    Every tensor of every rank's gradient is a block. The paper compresses gradients with residuals, which a trace does
    not hold. Gradients that are zero or not finite are left out.

    window: recorded iterations behind a point of Fig. 1 (the paper's epoch), None for 20 points. most_steps: most
    iterations read, spread evenly.

    Raises:
        GradlabError: if there is none that is finite and not zero.
    """
    window = window or -(-len(trace.steps) // 20)
    positions = spread(len(trace.steps), most_steps)
    statistics, steps = gather_statistics(trace, positions, window, progress), np.asarray(trace.steps).tolist()
    return SignBlocks(
        window,
        [steps[position] for position in positions],
        statistics.figure_1(steps, window),
        bits_per_iteration(sum(statistics.numels), len(statistics.numels), trace.world_size),
        counted_bits(statistics.example, trace.world_size),
        statistics.suggestion([layer.name for layer in trace.layers]),
    )


def gather_statistics(
    trace: Trace, positions: Iterable[int], window: int = 1, progress: Progress | None = None
) -> BlockStatistics:
    """Sum up the energy that signs would keep of all ranks' gradients at these positions of a trace.

    Raises:
        GradlabError: if there is none that is finite and not zero.
    """
    layers, wanted = trace.layers, [int(position) for position in positions]
    statistics = BlockStatistics([layer.numel for layer in layers])
    for done, position in enumerate(wanted):
        step = next(iter(trace.iterate(position, position + 1)))
        for rank, gradients in enumerate(step_gradients(step)):
            if not step.non_finite[rank]:
                statistics.add(position // window, [gradients[layer.name].reshape(-1) for layer in layers])
        if progress:
            progress("sign blocks", done + 1, len(wanted))
    if not statistics.count:
        raise GradlabError(f"{trace.path}: no gradient that is finite and not zero")
    return statistics


class BlockStatistics:
    """Sums over the gradients seen. numels: of the tensors."""

    def __init__(self, numels: Sequence[int]) -> None:
        self.numels = list(numels)
        self.count = 0
        self.example: Sequence[np.ndarray] = ()  # the last gradient
        self._windows: dict[int, list[tuple[float, float, float]]] = {}
        self.kept = [np.zeros(len(candidate_sizes(numel))) for numel in numels]
        self._kept_by_model = self._energy = 0.0

    def add(self, window: int, tensors: Sequence[np.ndarray]) -> None:
        """Add one rank's gradient of one iteration. tensors: (numel,) each."""
        whole = np.concatenate(tensors)
        deltas = [delta(tensor) for tensor in tensors]
        if not np.isfinite(deltas).any():
            return  # all of it is zero
        self.count, self.example = self.count + 1, tensors
        row = (float(np.nanmean([variation(tensor) for tensor in tensors])), float(np.nanmin(deltas)), delta(whole))
        self._windows.setdefault(window, []).append(row)
        self._energy += float(np.square(whole, dtype=np.float64).sum())
        self._kept_by_model += kept_energy(whole, len(whole))
        for kept, tensor in zip(self.kept, tensors, strict=True):
            kept += [kept_energy(tensor, size) for size in candidate_sizes(len(tensor))]

    def figure_1(self, steps: Sequence[int], window: int) -> SignSeries:
        """Fig. 1; steps: iterations by position of the trace."""
        numbers = sorted(self._windows)
        rows = [np.array(self._windows[number]) for number in numbers]
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
