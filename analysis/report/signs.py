"""The page of signs with one scale per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlab.analysis.report.drawings import (
    sign_drawings,
)
from gradlab.analysis.report.page import Section
from gradlab.analysis.report.tables import (
    sign_table,
)

Json = Mapping[str, Any]


def signs_section(data: Json) -> Section | None:
    """Make the page; None: signs were not measured. data: a trace report's."""
    blocks = data.get("sign_blocks")
    if not blocks:
        return None
    return Section("signs", "How well signs stand for gradients", "", [sign_table(blocks)], sign_drawings(blocks))
