"""Candidates of several families for one plan: what L-GreCo names as future work (section 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradlab import codecs
from gradlab.analysis.fit.gradiveq import RECOMMENDED, GradiveqOptions, fit_gradiveq
from gradlab.analysis.parallel import Workers
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Wrap
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
    workers: Workers = 1,
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
    workers: Workers,
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
