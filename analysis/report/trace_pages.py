"""The four questions that a trace's report answers, each short, with all that was measured folded out beneath it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradlab.analysis.questions.accuracy import accuracy_section, replay_verdict
from gradlab.analysis.questions.gradients import agreement_line, gradients_section
from gradlab.analysis.questions.pays import pays_section, speed_verdict
from gradlab.analysis.questions.plans import plans_section
from gradlab.analysis.questions.slices import fit_verdict
from gradlab.analysis.report.look import THOROUGH, Look
from gradlab.analysis.section import Section

Json = Mapping[str, Any]


def trace_sections(data: Json, look: Look = THOROUGH) -> list[Section]:
    """Make the pages of a recording, one per question."""
    made = (
        pays_section(data),
        plans_section(data),
        accuracy_section(data),
        gradients_section(data, look.layer_figures),
    )
    return [_with_figures(section, look.figures) for section in made if section is not None]


def _with_figures(section: Section, most: int | None) -> Section:
    """Keep the first figures of a section, and of each of its parts."""
    parts = [_with_figures(part, most) for part in section.parts]
    return replace(section, drawings=section.drawings[:most], parts=parts)


def trace_verdict(data: Json) -> str:
    """Say what a recording tells about compressing this training. The decision comes first."""
    fit, replays = data["fit"], data["replays"]
    if data.get("payoff") is not None:
        local = data.get("local_steps")
        return str(local.verdict if local is not None and local.recorded is not None else speed_verdict(data))
    lines = []
    if fit is None and not replays:
        lines.append("A recording alone does not say that compression pays: fit a codec, or replay plans.")
    lines += [fit_verdict(fit)] if fit is not None else []
    lines += [replay_verdict(replays)] if replays else []
    return " ".join(line for line in (*lines, agreement_line(data["spectrum"])) if line)
