"""How well blocks of signs stand for gradients: Fig. 1 and Table 1 of dist-EF-blockSGD, and blocks that do better.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
section 3.2. Of a block v of d elements, C(v) = ||v||_1 / d sign(v) keeps ||v||_1^2 / d of the energy ||v||_2^2.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab.analysis.spectrum import spread
from gradlab.analysis.unscaled import step_gradients
from gradlab.errors import GradlabError
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
    """||v||_1^2 / (d ||v||_2^2), what Definition 1 holds with for one block; NaN for zeros and for no elements."""
    energy = float(np.square(block, dtype=np.float64).sum())
    return float(np.abs(block).sum(dtype=np.float64) ** 2 / (block.size * energy)) if energy > 0 else np.nan


def kept_energy(vector: np.ndarray, block_size: int) -> float:
    """Energy that signs with a scale per so many elements keep: the sum over blocks of ||v_b||_1^2 / d_b."""
    magnitudes = np.abs(vector).astype(np.float64)
    sums = np.add.reduceat(magnitudes, range(0, len(magnitudes), block_size)) if len(magnitudes) else np.zeros(0)
    sizes = np.full(len(sums), block_size)
    if len(sums):
        sizes[-1] = len(magnitudes) - block_size * (len(sums) - 1)
    return float((sums**2 / sizes).sum())


def bits_per_iteration(parameters: int, blocks: int, workers: int) -> dict[str, int]:
    """Table 1: bits that M workers push and pull in an iteration, d parameters, B blocks."""
    return {
        "full-precision SGD": 64 * workers * parameters,
        "signSGD with majority vote": 2 * workers * parameters,
        "dist-EF-blockSGD": 2 * workers * parameters + 64 * workers * blocks,
    }


def candidate_sizes(numel: int) -> list[int]:
    """Block sizes to choose from for a tensor: all of it, half (rounded up), a quarter, ... to 16 elements."""
    sizes = [max(1, numel)]
    while sizes[-1] > _SMALLEST_BLOCK:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def share_out_blocks(numels: Sequence[int], kept: Sequence[Sequence[float] | np.ndarray], scales: int) -> list[int]:
    """Which candidate each tensor gets, so that at most `scales` blocks in all keep much energy. Greedy.

    kept: by tensor, energy by candidate (`candidate_sizes`). The next scales always go where they keep most energy per
    scale, be it by several halvings at once; what no longer fits is passed over.

    Raises:
        GradlabError: for fewer scales than tensors.
    """
    counts = [[-(-numel // size) for size in candidate_sizes(numel)] for numel in numels]
    if scales < len(numels):
        raise GradlabError(f"{scales} scales for {len(numels)} tensors: expected one each at least")
    chosen, left = [0] * len(numels), scales - len(numels)
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
    """Which candidate each tensor gets if all shall have blocks of about one size, as small as `scales` allow."""
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


def measure_sign_blocks(
    trace: Trace, window: int | None = None, *, most_steps: int = 400, progress: Progress | None = None
) -> dict[str, Any]:
    """Fig. 1 and Table 1 from a trace, and block sizes by layer, as plain JSON.

    Of all ranks' gradients, every tensor a block; the paper compresses gradients with residuals, which a trace does not
    hold. window: recorded iterations behind a point of Fig. 1, the paper's epoch, None for 20 points; most_steps: of a
    longer trace so many iterations, spread evenly. Gradients that are zero or not finite are left out.

    Raises:
        GradlabError: if there is none that is finite and not zero.
    """
    positions = spread(len(trace.steps), most_steps)
    window = window or -(-len(trace.steps) // 20)
    layers = trace.layers
    found = _Found([layer.numel for layer in layers])
    for done, position in enumerate(positions):
        step = next(iter(trace.iterate(int(position), int(position) + 1)))
        for rank, gradients in enumerate(step_gradients(step)):
            if not step.non_finite[rank]:
                found.add(int(position) // window, [gradients[layer.name].reshape(-1) for layer in layers])
        if progress:
            progress("sign blocks", done + 1, len(positions))
    if not found.count:
        raise GradlabError(f"{trace.path}: no gradient that is finite and not zero")
    return {
        "window": window,
        "iterations": [int(trace.steps[int(position)]) for position in positions],
        "figure_1": found.figure_1([int(step) for step in trace.steps], window),
        "bits_per_iteration": bits_per_iteration(sum(found.numels), len(found.numels), trace.world_size),
        "suggestion": found.suggestion([layer.name for layer in layers]),
    }


class _Found:
    """Sums over the gradients seen. numels: of the tensors."""

    def __init__(self, numels: Sequence[int]) -> None:
        self.numels = list(numels)
        self.count = 0
        self._windows: dict[int, list[tuple[float, float, float]]] = {}
        self._kept = [np.zeros(len(candidate_sizes(numel))) for numel in numels]
        self._kept_by_model = self._energy = 0.0

    def add(self, window: int, tensors: Sequence[np.ndarray]) -> None:
        """One rank's gradient of one iteration: (numel,) each."""
        whole = np.concatenate(tensors)
        deltas = [delta(tensor) for tensor in tensors]
        if not np.isfinite(deltas).any():
            return  # all of it is zero
        self.count += 1
        row = (float(np.nanmean([variation(tensor) for tensor in tensors])), float(np.nanmin(deltas)), delta(whole))
        self._windows.setdefault(window, []).append(row)
        self._energy += float(np.square(whole, dtype=np.float64).sum())
        self._kept_by_model += kept_energy(whole, len(whole))
        for kept, tensor in zip(self._kept, tensors, strict=True):
            kept += [kept_energy(tensor, size) for size in candidate_sizes(len(tensor))]

    def figure_1(self, steps: Sequence[int], window: int) -> dict[str, Any]:
        """By window: the first iteration, the mean of (a) and the smallest of (b)'s; and the lower bounds."""
        numbers = sorted(self._windows)
        rows = [np.array(self._windows[number]) for number in numbers]
        return {
            "iterations": [steps[number * window] for number in numbers],
            "variation": [float(row[:, 0].mean()) for row in rows],
            "delta_by_tensor": [float(row[:, 1].min()) for row in rows],
            "delta_of_model": [float(row[:, 2].min()) for row in rows],
            "bound_by_tensor": 1 / max(self.numels),
            "bound_of_model": 1 / sum(self.numels),
        }

    def suggestion(self, names: Sequence[str]) -> dict[str, Any]:
        """Energy kept at the bytes of one scale per tensor, and of 2 to 64 times as many, shared out in three ways."""
        rows = []
        for factor in (1, 2, 4, 8, 16, 32, 64):
            scales = factor * len(self.numels)
            best, equal = share_out_blocks(self.numels, self._kept, scales), equal_blocks(self.numels, scales)
            sizes = [candidate_sizes(numel)[place] for numel, place in zip(self.numels, best, strict=True)]
            rows.append(
                {
                    "scales": scales,
                    "bits_per_value": 1 + 32 * scales / sum(self.numels),
                    "kept": self._share_kept(best),
                    "kept_by_equal_blocks": self._share_kept(equal),
                    "block_sizes": dict(zip(names, sizes, strict=True)),
                }
            )
        return {"kept_by_one_block": self._kept_by_model / self._energy, "rows": rows}

    def _share_kept(self, chosen: Sequence[int]) -> float:
        return sum(float(kept[place]) for kept, place in zip(self._kept, chosen, strict=True)) / self._energy
