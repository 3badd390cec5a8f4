"""The page of training runs, with what was predicted of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradlab.analysis.report.drawings import (
    fit_drawings,
    run_drawings,
    spectrum_drawings,
)
from gradlab.analysis.report.page import Section
from gradlab.analysis.report.tables import (
    comparison_table,
    fit_table,
)
from gradlab.analysis.report.verdict import (
    agreement_line,
    comparison_verdict,
    fit_verdict,
)

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement

Json = Mapping[str, Any]


def comparison_sections(
    runs: Json, replays: Json, fits: Mapping[str, GradiveqMeasurement], spectrum: Json | None
) -> list[Section]:
    """Make the pages of training runs, with what was predicted of them."""
    sections = [
        Section(
            "runs",
            "What happened in training, and what was predicted",
            comparison_verdict(runs),
            [comparison_table(runs, replays)],
            run_drawings(runs, replays),
        )
    ]
    if fits:
        tables = [fit_table(fit) for fit in fits.values()]
        drawings = [item for name, fit in fits.items() for item in fit_drawings(fit, name)]
        answer = " ".join(fit_verdict(fit) for fit in fits.values())
        sections.append(Section("fits", "Do fits hold on later iterations?", answer, tables, drawings))
    if spectrum:
        answer = agreement_line(spectrum)
        sections.append(Section("spectrum", "How correlated are gradients?", answer, [], spectrum_drawings(spectrum)))
    return sections
