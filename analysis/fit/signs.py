"""Fit a plan of signs: block sizes that keep much energy of gradients, checked on later ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradlab.analysis.measure.sign_blocks import gather_statistics, share_out_blocks, sizes_of
from gradlab.errors import GradlabError
from gradlab.plan import Group, Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace


@dataclass(frozen=True)
class BlockFit:
    """Block sizes by layer, and the share of energy that signs keep with them (`kept`), with a scale per tensor, and
    with one for the model: on the iterations that were fitted on, and on later ones ("held out").
    """

    block_sizes: Mapping[str, int]
    scales: int
    fitted: Mapping[str, float]
    held_out: Mapping[str, float]
    iterations: tuple[int, int, int]  # the first fitted on, the first held out, the last held out

    def to_json(self) -> dict[str, Any]:
        return {
            "block_sizes": dict(self.block_sizes),
            "scales": self.scales,
            "fitted": dict(self.fitted),
            "held_out": dict(self.held_out),
            "iterations": list(self.iterations),
        }


def fit_block_sizes(
    trace: Trace, scales_per_tensor: float, samples: int, *, progress: Progress | None = None
) -> BlockFit:
    """Share out `scales_per_tensor` times as many scales as there are tensors where they keep most energy.

    samples: iterations at the start of the trace to fit on; as many later ones, at most, are held out.

    Raises:
        GradlabError: for fewer scales than tensors, or a trace that leaves nothing to hold out.
    """
    layers = [layer for layer in trace.layers if layer.numel]
    if not 1 <= samples < len(trace.steps):
        raise GradlabError(
            f"samples = {samples} of a trace of {len(trace.steps)} iterations, expected at least 1, and one more there "
            "to check the fit on"
        )
    last = min(len(trace.steps), 2 * samples)
    seen = gather_statistics(trace, range(samples), progress=progress)
    later = gather_statistics(trace, range(samples, last), progress=progress)
    chosen = share_out_blocks(seen.numels, seen.kept, round(scales_per_tensor * len(layers)))
    sizes = sizes_of(seen.numels, chosen)
    whole = [0] * len(chosen)

    def shares(of: Any) -> dict[str, float]:
        return {"kept": of.share_kept(chosen), "by_tensor": of.share_kept(whole), "by_model": of.share_kept_by_model}

    return BlockFit(
        {layer.name: size for layer, size in zip(trace.layers, sizes, strict=True)},
        sum(-(-numel // size) for numel, size in zip(seen.numels, sizes, strict=True)),
        shares(seen),
        shares(later),
        (int(trace.steps[0]), int(trace.steps[samples]), int(trace.steps[last - 1])),
    )


def with_block_sizes(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """The plan with its groups of signs parted where layers need blocks of another size.

    sizes: by layer name; one that is all of a layer goes with any larger one, as a block ends with its layer.
    """
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
    """Layers that follow each other and can share a block size: that size (None: no block ends in a layer), names."""
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
    """Whether blocks of a size cut a layer as it was to be cut."""
    return sizes[name] == size or (sizes[name] >= numels[name] and size >= numels[name])
