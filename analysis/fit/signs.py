"""Fit a plan of signs: block sizes that keep much energy of gradients, checked on later ones; and the method that goes
with an optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradlab.analysis.measure.sign_blocks import gather_statistics, share_out_blocks, sizes_of
from gradlab.analysis.replay.sampled import require_all_layers, require_whole
from gradlab.ddp.optimizers import OptimizerSettings
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.plan import Group, Plan, recipes
from gradlab.plan.optimizer_rules import applied_by
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
    require_all_layers(trace, "scales are shared out over all layers (--scales)")
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


def sign_method(name: str | None, optimizer: OptimizerSettings | None) -> tuple[str, list[str | None]]:
    """The method given, or the one that trains under the optimizer, with a note on the choice."""
    if name is not None:
        return recipes.known_name(name, recipes.SIGN_METHODS), []
    if optimizer is None or not (optimizer.adaptive and optimizer.momentum):
        return "dist-EF-blockSGDM", []
    note = (
        f"made by method dist-EF-blockSGD, without momentum in the plan: {optimizer.name} has momentum of its own "
        f"({optimizer.momentum})"
    )
    return "dist-EF-blockSGD", [note]


def residuals_follow(method: str, optimizer: OptimizerSettings | None) -> bool | None:
    """Whether residuals follow the rate: as in the papers, but not where the optimizer keeps momentum of its own."""
    if optimizer is None or not optimizer.momentum:
        return True
    return None if optimizer.adaptive or recipes.METHODS[method].momentum is None else True


def decay_after_momentum(plan: Plan, optimizer: OptimizerSettings | None) -> str | None:
    """A note on weight decay that the optimizer applies after the plan's momentum."""
    momentum, decay = applied_by(plan)
    if optimizer is None or momentum is None or decay or optimizer.adaptive:
        return None
    if optimizer.weight_decay is None:
        return None
    _, _, rate = optimizer.weight_decay.rpartition(" ")
    return (
        f"the optimizer's {optimizer.weight_decay} does not pass through the plan's momentum, and is (1 - momentum) as "
        f"strong; --weight-decay {rate} puts it into the plan (then set the optimizer's to 0)"
    )


def require_blocks(method: str, settings: Mapping[str, Any]) -> None:
    """Refuse a method without blocks, or settings that choose the blocks too."""
    chosen = recipes.METHODS[method]
    if chosen.codec != "sign" or chosen.one_block or chosen.settings.get("scale") == "one":
        raise GradlabError(f"--scales shares out the scales of blocks, and {method} has none: use dist-EF-blockSGD(M)")
    if given := sorted(set(settings) & {"block_size", "across_layers", "scale"}):
        raise GradlabError(f"--scales chooses blocks by measured energy, and -s {given[0]} chooses them too: use one")
