"""Fit a recording into a number of bytes: fewer steps first, then samples of large layers, then fewer steps again.

A trace of S steps on N ranks takes about S N sum(numel) bytes times the size of the stored type. The budget is for the
whole trace, all ranks and all files. Its files never exceed it: what HDF5 and JSON add is counted from above.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradlab.capture.settings import StepSettings
from gradlab.capture.writing.rank_writer import segment_steps
from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, parse_bytes
from gradlab.layout import Layer
from gradlab.trace.sample import LEAST_NUMEL, LayerSample, describe_samples, runs_of, sample_layer, sampled_numel
from gradlab.trace.schema import STEP_DTYPE, STORED_DTYPE, block_steps, chunk_shape

# Steps below which layers are sampled before steps are left out: enough for windows, spectra and held-out steps.
ENOUGH_STEPS = 64
_FEWEST_STEPS = 2
# What files hold beside values, from above: of a file, of a layer in it, of a chunk in it; of a rank's index per file.
_FILE, _LAYER, _CHUNK, _INDEX = 2**15, 1536, 32, 128
_RECORDS_PER_CHUNK = 256
_RANK, _MANIFEST, _MANIFEST_LAYER, _MANIFEST_BLOCK = 1024, 4096, 384, 96


@dataclass(frozen=True)
class Recording:
    """Decide before the first step what will be recorded.

    settings: recording settings, `every` and `max_steps` as the budget leaves them.
    samples: blocks of the layers that are not held whole, by name.
    steps: at most; None: as many as the run has.
    nbytes: most bytes of all files; None: as many as the run has steps for.
    """

    settings: StepSettings
    layers: tuple[Layer, ...]
    samples: tuple[LayerSample, ...]
    world_size: int
    steps: int | None
    nbytes: int | None

    @property
    def row_bytes(self) -> int:
        """Bytes of one step's gradients on one rank, as stored."""
        return sum(layer.numel for layer in self.layers) * STORED_DTYPE[self.settings.dtype].itemsize

    def sample(self, name: str) -> LayerSample | None:
        """Return the sample of a layer; None: it is recorded whole."""
        return next((sample for sample in self.samples if sample.layer.name == name), None)

    def __str__(self) -> str:
        """Say how large the recording will be, in one line."""
        every = self.settings.every
        often = "every step" if every == 1 else f"every {every} steps"
        count = "as many steps as the run has" if self.steps is None else f"{self.steps} steps"
        at_most = "" if self.nbytes is None else f", {format_bytes(self.nbytes)} at most"
        share = describe_samples({sample.layer.name: sample for sample in self.samples}, self.layers)
        return (
            f"{format_bytes(self.row_bytes)} per step and rank, {self.world_size} ranks, {count} ({often}){at_most}; "
            f"{share}"
        )


def plan_recording(
    layers: Sequence[Layer], world_size: int, settings: StepSettings, metadata: dict[str, Any] | None = None
) -> Recording:
    """Decide which steps and which parts of layers are recorded.

    Without a budget all that the settings name is recorded. With one, steps are left out evenly as long as 64 are left.
    Then every large layer is sampled to one number of elements, the largest that fits, and no less than 65,536. Then
    further steps are left out. A budget that two steps of the smallest samples exceed is refused.
    """
    wanted = settings.wanted_steps
    if settings.budget is None:
        return Recording(settings, tuple(layers), (), world_size, wanted, None)
    fixed = len(json.dumps(metadata or {}, indent=1, default=str))
    files = _Files(tuple(layers), world_size, settings, fixed)
    budget = parse_bytes(settings.budget)
    fewest = min(_FEWEST_STEPS, wanted) if wanted is not None else _FEWEST_STEPS
    if files.nbytes(fewest, LEAST_NUMEL) > budget:
        needed = files.nbytes(fewest, LEAST_NUMEL)
        raise GradlabError(
            f"budget is {settings.budget}, but {fewest} steps of the smallest samples on {world_size} ranks take "
            f"{format_bytes(needed)}; the smallest budget that works is {needed} bytes: raise it, record fewer layers, "
            "or in bfloat16"
        )
    every, steps, numel = _share_out(files, wanted, settings.every, budget, fewest)
    samples = files.samples(numel)
    stored = files.stored(samples)
    chosen = dataclasses.replace(settings, every=every, max_steps=steps)
    return Recording(chosen, stored, samples, world_size, steps, files.nbytes(steps, numel))


def _share_out(files: _Files, wanted: int | None, every: int, budget: int, fewest: int) -> tuple[int, int, int]:
    """Every how many iterations, how many steps, and the elements that a layer keeps at most."""
    whole = files.largest
    if wanted is None:  # the run's length is not known: record every n-th step, as many as fit
        steps = _last(range(1, 2**40), lambda count: files.nbytes(count, whole) <= budget)
        if steps < ENOUGH_STEPS:
            steps = _last(range(fewest, ENOUGH_STEPS + 1), lambda count: files.nbytes(count, LEAST_NUMEL) <= budget)
        return every, steps, _most_numel(files, steps, budget)

    # Every `factor`-th of the wanted steps is recorded. `last`: the factor that leaves 64; a short run keeps all.
    last = 1 if wanted <= ENOUGH_STEPS else (wanted - 1) // (ENOUGH_STEPS - 1)

    def fits(factor: int, numel: int) -> bool:
        return files.nbytes(-(-wanted // factor), numel) <= budget

    factor = _first(range(1, last + 1), lambda number: fits(number, whole))
    if not fits(factor, whole):
        factor = _first(range(last, max(last, wanted - 1) + 1), lambda number: fits(number, LEAST_NUMEL))
    steps = -(-wanted // factor)
    return every * factor, steps, _most_numel(files, steps, budget)


def _most_numel(files: _Files, steps: int, budget: int) -> int:
    """The elements that a layer may keep at most, so that so many steps fit."""
    return _last(range(LEAST_NUMEL, max(LEAST_NUMEL, files.largest) + 1), lambda n: files.nbytes(steps, n) <= budget)


def _first(numbers: range, fits: Callable[[int], bool]) -> int:
    """The first of ascending numbers that fits, where all after it fit too; else the last one."""
    low, high = 0, len(numbers) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(numbers[middle]) else (middle + 1, high)
    return numbers[low]


def _last(numbers: range, fits: Callable[[int], bool]) -> int:
    """The last of ascending numbers that fits, where all before it fit too; the first one is taken to fit."""
    low, high = 0, len(numbers) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(numbers[middle]) else (low, middle - 1)
    return numbers[low]


@dataclass(frozen=True)
class _Files:
    """The files of a trace of these layers, and how large they are at most."""

    layers: tuple[Layer, ...]
    world_size: int
    settings: StepSettings
    metadata_bytes: int

    @property
    def largest(self) -> int:
        """Elements of the largest layer."""
        return max((layer.numel for layer in self.layers), default=0)

    def samples(self, numel: int) -> tuple[LayerSample, ...]:
        drawn = (sample_layer(layer, numel, self.settings.sample_seed) for layer in self.layers)
        return tuple(sample for sample in drawn if sample is not None)

    def stored(self, samples: Iterable[LayerSample]) -> tuple[Layer, ...]:
        by_name = {sample.layer.name: sample.stored for sample in samples}
        return tuple(by_name.get(layer.name, layer) for layer in self.layers)

    def nbytes(self, steps: int, numel: int) -> int:
        """Bytes of all files at most, for so many steps, and layers of at most so many elements."""
        kept = [sampled_numel(layer, numel) for layer in self.layers]
        itemsize = STORED_DTYPE[self.settings.dtype].itemsize
        row_bytes = itemsize * sum(kept)
        rows = block_steps(row_bytes, steps)
        per_file = segment_steps(rows, row_bytes, self.settings.segment_bytes)
        full, rest = divmod(steps, per_file)
        rank = full * self._file(kept, per_file, rows) + (self._file(kept, rest, rows) if rest else 0)
        rank += _RANK + _INDEX * (full + 1)
        blocks = sum(runs_of(x, numel)[1] for x, n in zip(self.layers, kept, strict=True) if n < x.numel)
        names = sum(len(layer.name.encode()) for layer in self.layers)
        manifest = _MANIFEST + _MANIFEST_LAYER * len(kept) + 2 * names + _MANIFEST_BLOCK * blocks
        return self.world_size * rank + manifest + 2 * self.metadata_bytes

    def _file(self, kept: Sequence[int], steps: int, rows: int) -> int:
        """Bytes of one file at most."""
        itemsize, blocks = STORED_DTYPE[self.settings.dtype].itemsize, -(-steps // rows)
        total = _FILE
        for layer, numel in zip(self.layers, kept, strict=True):
            width = chunk_shape(numel, rows)[1]
            pieces = -(-numel // max(1, width))
            total += _LAYER + 3 * len(layer.name.encode()) + blocks * pieces * (rows * width * itemsize + _CHUNK)
        records = (STEP_DTYPE.itemsize + -(-len(kept) // 8)) * -(-steps // _RECORDS_PER_CHUNK) * _RECORDS_PER_CHUNK
        return total + records + blocks * (rows * len(kept) * 4 + _CHUNK)
