"""The page of structure within one rank: what GradiVeQ would find."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradlab.analysis.report.drawings import (
    fit_drawings,
    slice_structure_drawings,
    spectrum_drawings,
)
from gradlab.analysis.report.page import Section
from gradlab.analysis.report.tables import (
    fit_table,
    slice_structure_table,
)
from gradlab.analysis.report.verdict import fit_verdict

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement

Json = Mapping[str, Any]


def within_rank_section(data: Json) -> Section:
    """Make the page. data: a trace report's, "fit" as a `GradiveqMeasurement`, or None."""
    fit: GradiveqMeasurement | None = data["fit"]
    structure = data.get("slice_structure")
    shown = structure if structure and structure["layers"] else None
    tables = [*([fit_table(fit)] if fit else []), *([slice_structure_table(shown)] if shown else [])]
    drawings = [
        *(fit_drawings(fit) if fit else []),
        *(slice_structure_drawings(shown) if shown else []),
        *spectrum_drawings(data["spectrum"]),
    ]
    answer = fit_verdict(fit) if fit else ""
    return Section("within", "Structure within a rank", answer, tables, drawings)
