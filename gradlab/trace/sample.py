"""Samples of layers: a trace may hold blocks of a large layer in place of the whole.

A block is a run of whole outputs: of rows of the first axis (outputs of a linear layer, filters of a convolution, rows
of an embedding), or along the axis where a transposed layer or an expert stack keeps its outputs. So a filter, an
output with all its inputs, and, as runs are aligned, an attention head stay whole. All ranks and steps hold the same
blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradlab.codec import seeded_generator
from gradlab.errors import GradlabError
from gradlab.formatting import format_counted, format_percent
from gradlab.layout import Layer
from gradlab.roles import STACKS, TRANSPOSED

# Rows of a run: attention heads are 64 or 128 wide, so that aligned runs of 128 hold whole heads.
RUN_ROWS = 128
# Elements of a run where rows are short, so that blocks of signs and quantizers stay whole.
_RUN_NUMEL = 2**14
# Elements that a sample of a layer keeps at least, but for the rest of its last run.
LEAST_NUMEL = 2**16


@dataclass(frozen=True)
class LayerSample:
    """The part of a layer that a trace holds.

    layer: the whole layer, as the model has it.
    axis: axis that is sampled.
    blocks: [start, stop) along that axis, ascending, apart.
    """

    layer: Layer
    axis: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def stored(self) -> Layer:
        """The layer as the trace holds it: name and role of the whole, the sample's shape."""
        shape = list(self.layer.shape)
        shape[self.axis] = sum(stop - start for start, stop in self.blocks)
        return Layer(self.layer.name, tuple(shape), self.layer.role)

    @property
    def share(self) -> float:
        """Share of the layer's elements that the trace holds."""
        return self.stored.numel / self.layer.numel

    def copy(self, target: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy the sampled blocks of a gradient to `target`. whole: of the layer's shape; target: of the sample's."""
        place = 0
        for start, stop in self.blocks:
            part = target.narrow(self.axis, place, stop - start)
            part.copy_(whole.narrow(self.axis, start, stop - start), non_blocking=True)
            place += stop - start

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the blocks of a gradient, joined: in the layer's shape -> in the sample's shape, a copy."""
        return torch.cat([whole.narrow(self.axis, start, stop - start) for start, stop in self.blocks], self.axis)

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.layer.shape), "axis": self.axis, "blocks": [list(block) for block in self.blocks]}

    @classmethod
    def from_json(cls, value: Any, stored: Layer, where: Path) -> LayerSample:
        """Read what `to_json` wrote; blocks out of order or range, or that do not make up `stored`, are refused."""
        sound = isinstance(value, dict) and {"shape", "axis", "blocks"} <= set(value)
        try:
            whole = Layer.from_json({"name": stored.name, "shape": value["shape"], "role": stored.role})
            blocks = tuple((start, stop) for start, stop in value["blocks"])
            edges = [edge for block in blocks for edge in block]
            axis = value["axis"]
            sound = sound and type(axis) is int and 0 <= axis < len(whole.shape) and len(blocks) > 0
            sound = sound and all(type(edge) is int for edge in edges) and all(a < b for a, b in blocks)
            sound = sound and edges == sorted(edges) and edges[0] >= 0 and edges[-1] <= whole.shape[axis]
            sound = sound and cls(whole, axis, blocks).stored == stored
        except (TypeError, ValueError, KeyError, GradlabError):
            sound = False
        if not sound:
            raise GradlabError(f"{where}: the sample of layer {stored.name!r} is not sound: {str(value)[:200]}")
        return cls(whole, axis, blocks)


def sample_axis(layer: Layer) -> int:
    """Return the axis that whole outputs lie along, in expert stacks those of every expert."""
    matrix = 1 if layer.role in STACKS else 0
    outputs = matrix + 1 if layer.role in TRANSPOSED else matrix
    return min(outputs, max(0, len(layer.shape) - 1))


def sample_layer(layer: Layer, numel: int, seed: int = 0) -> LayerSample | None:
    """Draw aligned runs of a layer, at most `numel` elements but one row, from equal stretches of the axis; None: it is
    kept whole. The draw follows from the seed and the layer's name alone."""
    axis = sample_axis(layer)
    run, runs = runs_of(layer, numel)
    if layer.numel <= numel or run * runs >= layer.shape[axis]:
        return None
    places = layer.shape[axis] // run
    generator = seeded_generator("trace sample", seed, layer.name)
    blocks: list[tuple[int, int]] = []
    for number in range(runs):
        first, last = number * places // runs, (number + 1) * places // runs
        start = run * int(torch.randint(first, last, (), generator=generator))
        if blocks and blocks[-1][1] == start:
            blocks[-1] = (blocks[-1][0], start + run)
        else:
            blocks.append((start, start + run))
    return LayerSample(layer, axis, tuple(blocks))


def sampled_numel(layer: Layer, numel: int) -> int:
    """Return the number of elements that `sample_layer` keeps of a layer."""
    if layer.numel <= numel or not layer.numel:
        return layer.numel
    run, runs = runs_of(layer, numel)
    return min(layer.numel, run * runs * (layer.numel // layer.shape[sample_axis(layer)]))


def runs_of(layer: Layer, numel: int) -> tuple[int, int]:
    """Return the rows of a run, a power of two, and the number of runs, for at most `numel` elements; at least 1, 1."""
    if not layer.numel or not layer.shape:
        return 1, 1
    rows = layer.shape[sample_axis(layer)]
    width = layer.numel // rows
    kept = max(1, min(rows, numel // width))
    run = _power_of_two(min(kept, max(RUN_ROWS, _RUN_NUMEL // width)))
    return run, max(1, min(kept // run, rows // run))


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to a number from 1 on."""
    return 1 << (number.bit_length() - 1)


def describe_samples(samples: Mapping[str, LayerSample], layers: Sequence[Layer]) -> str:
    """Return one phrase: "3.1 % of the values: 1.2 % to 8.3 % of 50 layers (h.0.attn.c_attn.weight, ...), 98 layers
    whole"."""
    if not samples:
        return f"all values of {len(layers)} layers"
    whole = sum(layer.numel for layer in layers if layer.name not in samples)
    kept = whole + sum(sample.stored.numel for sample in samples.values())
    total = whole + sum(sample.layer.numel for sample in samples.values())
    shares = sorted(sample.share for sample in samples.values())
    ends = [format_percent(shares[0]), format_percent(shares[-1])]
    between = ends[0] if ends[0] == ends[1] else " to ".join(ends)
    names = [*list(samples)[:2], *["..."] * (len(samples) > 2)]
    count = format_counted(len(samples), "layer")
    rest = len(layers) - len(samples)
    return (
        f"{format_percent(kept / total)} of the values: {between} of {count} ({', '.join(names)})"
        + f", {format_counted(rest, 'layer')} whole" * (rest > 0)
    )
