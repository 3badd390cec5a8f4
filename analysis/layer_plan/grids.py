"""Choices of each layer: a range of settings around a uniform plan's, a codec's own grid, or families.

Alimohammadi et al., "L-GreCo", MLSys 2024, section 5.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradlab import codecs
from gradlab.analysis.fit.gradiveq import RECOMMENDED, GradiveqOptions, fit_gradiveq
from gradlab.codec import Codec
from gradlab.codec.settings import build_settings
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Plan, Wrap
from gradlab.plan.layer_errors import Candidate
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

# By family: a codec, and its wrappers where they differ from the codec's default. Signs are compressed one way only,
# because the loss of a server's second compression is in no rank's error.
FAMILIES: Mapping[str, tuple[str, tuple[Wrap, ...] | None]] = {
    "PCA": ("gradiveq", None),
    "PowerSGD": ("powersgd", None),
    "top-k": ("topk", None),
    "QSGD": ("qsgd", None),
    "ECSQ": ("ecsq", None),
    "signs": ("sign", FEEDBACK),
    "cast": ("cast", None),
}
DENSE = Candidate("identity")
_PCA_RATIOS = (8.0, 16.0, 32.0, 64.0)
_LEAST = 256  # elements of a layer with candidates, which also has two dimensions or more


def known_families(names: Sequence[str]) -> list[str]:
    """Spell families as `FAMILIES` does; case is ignored."""
    by_lower = {name.lower(): name for name in FAMILIES}
    if unknown := [name for name in names if name.lower() not in by_lower]:
        raise GradlabError(f"no family {unknown[0]!r}; there are: {', '.join(FAMILIES)}")
    return [by_lower[name.lower()] for name in names]


def family_candidates(
    trace: Trace,
    families: Sequence[str] = tuple(FAMILIES),
    *,
    start: int = 0,
    samples: int = 0,
    extra: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, list[Candidate]]:
    """List candidates by layer name: each codec's own grid, and dense. Vectors and small layers are left out."""
    names = known_families(families)
    layers = [layer for layer in trace.layers if layer.dimensions >= 2 and layer.numel >= _LEAST]
    candidates: dict[str, list[Candidate]] = {layer.name: [DENSE] for layer in layers}
    for family in names:
        codec, around = FAMILIES[family]
        if codec == "gradiveq":
            continue
        method = codecs.get(codec)
        grid = _unequal((*method.about.candidates, *(extra or {}).get(codec, ())))
        for layer in layers:
            if layer.role in method.about.defaults.roles:
                candidates[layer.name] += [Candidate(codec, settings, {}, around) for settings in grid]
    if "PCA" in names and samples:
        _add_bases(trace, layers, candidates, start, samples, workers, progress)
    return candidates


def _unequal(grid: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Settings of a grid, those that are equal once."""
    return [dict(settings) for place, settings in enumerate(grid) if settings not in grid[:place]]


def _add_bases(
    trace: Trace,
    layers: Sequence[Layer],
    candidates: dict[str, list[Candidate]],
    start: int,
    samples: int,
    workers: int,
    progress: Progress | None,
) -> None:
    if not any(layer.role in GradiVeQ.about.defaults.roles for layer in layers):
        return
    for ratio in _PCA_RATIOS:
        settings = dataclasses.replace(RECOMMENDED, ratio=ratio, sample_steps=samples, compressed_steps=4 * samples)
        options = GradiveqOptions(samples=samples, start=start, settings=settings)
        fitted = fit_gradiveq(trace, options, workers=workers, progress=progress)
        for group in fitted.plan.groups:
            if len(group.layers) == 1 and group.layers[0] in candidates and group.name in fitted.plan.learned:
                learned = dict(fitted.plan.learned[group.name])
                candidates[group.layers[0]].append(Candidate(group.codec, group.settings, learned, group.wrappers))


# --- candidates of several families -----------------------------------------------------------------------------------


_MOST_DENSITIES = 100
_LARGEST: Mapping[str, float] = {"bits": 8, "density": 1.0}


def paper_settings(codec: str, reference: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List settings in the paper's range around a reference D (section 5.1):
    [D/2, 2D] by ones for bits and ranks, and [D/10, 10 D] by tenths of D for densities.
    """
    name, method = main_setting(codec), codecs.get(codec)
    value = getattr(build_settings(method, reference), name)
    if type(value) not in (int, float):
        raise GradlabError(f"codec {codec}: setting {name} = {value!r} is no number to vary; use its own grid")
    most = _LARGEST.get(name, math.inf)
    if isinstance(value, int):
        values: list[Any] = [v for v in range(max(1, -(-value // 2)), 2 * value + 1) if v <= most]
    else:
        values = [value * tenth / 10 for tenth in range(1, _MOST_DENSITIES + 1)]
        values = [round(v, 12) for v in values if v <= most]
    if value not in values:
        values.append(value)
    return [settings for v in sorted(values) if _possible(method, settings := {**reference, name: v})]


def _possible(method: type[Codec], settings: Mapping[str, Any]) -> bool:
    try:
        build_settings(method, settings)
    except GradlabError:  # such as one bit with another norm than the largest magnitude
        return False
    return True


def own_settings(codec: str, reference: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the codec's own candidates with the reference's other settings, and the reference."""
    method = codecs.get(codec)
    build_settings(method, reference)
    grid = [{**reference, **settings} for settings in method.about.candidates]
    grid += [] if dict(reference) in grid else [dict(reference)]
    names = {name for settings in method.about.candidates for name in settings}
    values = [settings.get(name) for settings in grid for name in names]
    if len(names) == 1 and all(type(value) in (int, float) for value in values):
        grid.sort(key=lambda settings: settings[next(iter(names))])
    return grid


def main_setting(codec: str) -> str:
    """Name the one setting that a codec's candidates differ in."""
    names = {tuple(settings) for settings in codecs.get(codec).about.candidates}
    if len(names) != 1 or len(next(iter(names))) != 1:
        raise GradlabError(f"codec {codec} has no one setting to vary by layer; choose another as the reference")
    return next(iter(names))[0]


def candidates_of_grid(
    trace: Trace,
    codec: str,
    reference: Mapping[str, Any],
    *,
    grid: str = "paper",
    families: Sequence[str] = (),
    start: int = 0,
    samples: int = 0,
    workers: int = 1,
    progress: Progress | None = None,
) -> tuple[dict[str, list[Candidate]] | None, int]:
    """List candidates by layer name (None: the paper's grid), and the first position to measure errors on."""
    build_settings(codecs.get(codec), reference)
    if grid not in ("paper", "own"):
        raise GradlabError(f"grid {grid!r}, expected 'paper' or 'own'")
    if not families:
        if grid == "paper":
            return None, start
        names = [layer.name for layer in _compressed(trace, codec, reference)]
        return {
            name: [Candidate(codec, settings) for settings in own_settings(codec, reference)] for name in names
        }, start
    chosen = list(FAMILIES) if [name.lower() for name in families] == ["all"] else known_families(families)
    fitted = samples if "PCA" in chosen else 0
    extra = {codec: paper_settings(codec, reference)}
    candidates = family_candidates(
        trace, chosen, start=start, samples=fitted, extra=extra, workers=workers, progress=progress
    )
    return candidates, start + fitted


def _compressed(trace: Trace, codec: str, reference: Mapping[str, Any]) -> list[Layer]:
    plan = Plan.uniform(trace.model_layers, codec, group_bytes=0, **reference)
    return [layer for group in plan.compressed_groups if group.codec == codec for layer in plan.members(group)]
