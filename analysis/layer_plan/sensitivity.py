"""How much compression of one layer raises the loss in short runs from a checkpoint, and whether its L2 error tells.

Alimohammadi et al., "L-GreCo", MLSys 2024, sections 3 and 5.4: from a checkpoint, up to 50 iterations on the same data
with one layer compressed and all others untouched; the difference of the loss to an uncompressed run is the layer's
sensitivity at that setting. Fig. 11a shows its correlation over layers with the L2 error, setting by setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradlab.analysis.intervals import rank_correlation
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.plan.layer_errors import Candidate
from gradlab.progress import Progress

# A short run under a plan, from one checkpoint and on the same data each time: its loss.
ShortRun = Callable[[Plan], float]


@dataclass(frozen=True)
class Sensitivity:
    """Losses after short runs with one layer compressed.

    differences: by layer name (candidates,), the loss above the uncompressed run's.
    loss: of the uncompressed run.
    """

    differences: Mapping[str, np.ndarray]
    loss: float


def loss_sensitivity(
    run: ShortRun,
    layers: Sequence[Layer],
    candidates: Mapping[str, Sequence[Candidate]],
    *,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure the loss of one short, deterministic run per layer and candidate, and of one without compression."""
    known = {layer.name for layer in layers}
    if strangers := sorted(set(candidates) - known):
        raise GradlabError(f"sensitivity: no layer {strangers[0]!r} in the model")
    reference = run(Plan(tuple(layers)))
    if not np.isfinite(reference):
        raise GradlabError(
            f"sensitivity: the loss without compression is {reference}: there is nothing to compare with"
        )
    differences, done, total = {}, 0, sum(map(len, candidates.values()))
    for name, row in candidates.items():
        losses = []
        for candidate in row:
            losses.append(run(_alone(layers, name, candidate)))
            done += 1
            if progress:
                progress("short runs", done, total)
        differences[name] = np.array(losses) - reference
    return Sensitivity(differences, reference)


def _alone(layers: Sequence[Layer], name: str, candidate: Candidate) -> Plan:
    learned = {name: dict(candidate.learned)} if candidate.learned else {}
    return Plan(tuple(layers), (candidate.group(name),), learned=learned)


def correlations(errors: Sequence[np.ndarray], differences: Sequence[np.ndarray]) -> dict[str, list[Any]]:
    """Correlate errors and loss differences (candidates,) over layers: Pearson (Fig. 11a), Spearman, intervals."""
    from scipy import stats

    lengths = {len(row) for row in (*errors, *differences)}
    if len(errors) < 3 or len(errors) != len(differences) or len(lengths) != 1:
        raise GradlabError("correlation of sensitivities: expected at least three layers with the same candidates")
    values: dict[str, list[Any]] = {"pearson": [], "spearman": [], "spearman_intervals": []}
    for one, other in zip(np.array(errors).T, np.array(differences).T, strict=True):
        constant = bool(np.ptp(one) == 0 or np.ptp(other) == 0)
        ranks = rank_correlation(one, other)
        values["pearson"].append(float("nan") if constant else float(stats.pearsonr(one, other).statistic))
        values["spearman"].append(float("nan") if constant else ranks.rho)
        values["spearman_intervals"].append(ranks.interval)
    return values
