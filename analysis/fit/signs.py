"""Fit a plan of signs: block sizes that keep much energy of gradients, checked on later ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradlab.analysis.measure.sign_blocks import gather_statistics, share_out_blocks, sizes_of
from gradlab.analysis.replay.sampled import require_whole
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.plan import Group, Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace


@dataclass(frozen=True)
class EnergyShares(Jsonable):
    """Share of the gradients' energy that signs keep: with fitted blocks, a scale per tensor, and one for the model."""

    kept: float
    by_tensor: float
    by_model: float


@dataclass(frozen=True)
class BlockFit(Jsonable):
    """Blocks of signs for every layer: elements per block, number of scales, and energy kept, later too.

    iterations: the first fitted on, the first held out, the last held out.
    """

    block_sizes: Mapping[str, int]
    scales: int
    fitted: EnergyShares
    held_out: EnergyShares
    iterations: tuple[int, int, int]


def fit_block_sizes(
    trace: Trace,
    scales_per_tensor: float,
    samples: int,
    *,
    workers: int = 1,
    progress: Progress | None = None,
) -> BlockFit:
    """Share out scales among the layers where they keep most energy.

    >>> from gradlab.analysis import fit_block_sizes
    >>> with Trace("trace") as trace:
    ...     fit = fit_block_sizes(trace, scales_per_tensor=4, samples=20)
    >>> fit.block_sizes, fit.scales
    ({'conv.weight': 256, 'head.weight': 256}, 8)

    Args:
        trace: gradients of all ranks.
        scales_per_tensor: scales for each tensor, on average.
        samples: iterations at the start of the trace to fit on; as many later ones, at most, are held out.
        workers: processes that share the layers out.
        progress: called as the work goes on.

    Raises:
        GradlabError: for fewer scales than tensors, or a trace that leaves nothing to hold out.
    """
    require_whole(trace, trace.samples, "scales are shared out over the blocks of whole layers (--scales)")
    if not 0 < scales_per_tensor < math.inf:
        raise GradlabError(f"scales = {scales_per_tensor:g} per tensor, expected a number of at least 1")
    layers = [layer for layer in trace.layers if layer.numel]
    if not 1 <= samples < len(trace.steps):
        raise GradlabError(
            f"samples = {samples} of a trace of {len(trace.steps)} iterations, expected at least 1, and one more there "
            "to check the fit on"
        )
    last = min(len(trace.steps), 2 * samples)
    seen = gather_statistics(trace, range(samples), workers=workers, progress=progress)
    later = gather_statistics(trace, range(samples, last), workers=workers, progress=progress)
    chosen = share_out_blocks(seen.numels, seen.kept, round(scales_per_tensor * len(layers)))
    sizes = sizes_of(seen.numels, chosen)
    whole = [0] * len(chosen)
    fitted, held_out = (
        EnergyShares(part.share_kept(chosen), part.share_kept(whole), part.share_kept_by_model)
        for part in (seen, later)
    )
    return BlockFit(
        {layer.name: size for layer, size in zip(trace.layers, sizes, strict=True)},
        sum(-(-numel // size) for numel, size in zip(seen.numels, sizes, strict=True)),
        fitted,
        held_out,
        (int(trace.steps[0]), int(trace.steps[samples]), int(trace.steps[last - 1])),
    )


def with_block_sizes(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """Part a plan's groups of signs where layers need blocks of another size."""
    numels = {layer.name: layer.numel for layer in plan.layers}
    groups: list[Group] = []
    for group in plan.groups:
        if group.codec != "sign":
            groups.append(group)
            continue
        for size, names in _runs(group.layers, sizes, numels):
            title = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            others = {key: value for key, value in group.settings.items() if key != "block_size"}
            settings = {**others, **({} if size is None else {"block_size": size})}
            groups.append(replace(group, name=title, layers=tuple(names), settings=settings))
    return replace(plan, groups=tuple(groups))


def _runs(
    layers: Sequence[str], sizes: Mapping[str, int], numels: Mapping[str, int]
) -> Iterator[tuple[int | None, list[str]]]:
    """Block size and names of layers in a row that can share it; None where every layer is one block."""
    run: list[str] = []
    size: int | None = None
    for name in layers:
        wanted = sizes[name] if sizes[name] < numels[name] else None
        joined = wanted if size is None else size
        fits = joined is None or all(_sound(other, joined, sizes, numels) for other in [*run, name])
        if run and not fits:
            yield size, run
            run, joined = [], wanted
        run.append(name)
        size = joined
    if run:
        yield size, run


def _sound(name: str, size: int, sizes: Mapping[str, int], numels: Mapping[str, int]) -> bool:
    """Whether blocks of `size` cut a layer into the blocks that it was given."""
    return sizes[name] == size or (sizes[name] >= numels[name] and size >= numels[name])
