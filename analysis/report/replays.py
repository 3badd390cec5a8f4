"""The page of replays: what plans do to these gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gradlab.analysis.figures import information as information_plots
from gradlab.analysis.report.drawings import (
    replay_drawings,
)
from gradlab.analysis.report.page import Drawing, Section
from gradlab.analysis.report.tables import (
    replay_table,
)
from gradlab.analysis.report.verdict import (
    ranking_line,
    replay_verdict,
)

Json = Mapping[str, Any]


# Residual norm under error feedback: its growth from the last but one quarter of the steps to the last.
_GROWING, _SETTLED = 1.2, 200  # steps after a cold start, during which it grows in any case


def replays_section(data: Json) -> Section | None:
    """Make the page of what plans do to the recorded gradients. None: nothing was replayed."""
    replays = data["replays"]
    if not replays:
        return None
    drawings, answer = replay_drawings(replays), replay_verdict(replays)
    growing = [name for name, replay in replays.items() if _grows(replay["summary"])]
    if any(replay["summary"].get("unsent") for replay in replays.values()):
        drawings.append(
            Drawing(
                "waiting",
                "Residual norm under error feedback",
                "Norm of the compression error over that of the same iteration's gradient. Where it goes on growing, "
                "old gradients pile up.",
                partial(information_plots.plot_waiting, replays),
            )
        )
    if growing:
        answer += f" The residual norm still grows at the end with {', '.join(growing)}."
    ranking = data.get("ranking")
    if ranking:
        answer += f" {ranking_line(ranking)}"
        drawings.append(
            Drawing(
                "ranking",
                "Whether plans keep their order",
                "Plans by the cosine of their update with the true mean, in windows of the run. Bars: 95 % intervals "
                "of the rank correlation over plans (Bonett and Wright 2000), from five plans on.",
                partial(information_plots.plot_ranking, ranking),
            )
        )
    return Section("replays", "Errors of plans on these gradients", answer, [replay_table(replays)], drawings)


def _grows(summary: Json) -> bool:
    return summary["compressed_steps"] >= _SETTLED and (summary.get("residual_growth") or 0.0) > _GROWING
