"""The page of local steps: how many, and which plan, where pseudo-gradients were recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.forecast.local_speed import MOST_WAITING, LocalSpeed
from gradlab.analysis.forecast.local_steps import CLOSE, LocalSteps
from gradlab.analysis.report.page import Section, Table
from gradlab.formatting import format_count, format_percent, format_ratio


def local_steps_section(data: Mapping[str, Any]) -> Section | None:
    """Make the page, a row per number of nodes, link and plan; None without forecasts of pseudo-gradients."""
    local: LocalSpeed | None = data.get("local_steps")
    if local is None or local.recorded is None:
        return None
    rows = [
        [str(item.nodes), spell_rate(item.bits_per_second), name, *_cells(times, local)]
        for item in local.configurations
        for name, times in item.plans.items()
    ]
    heads = [f"H = {every}{' (recorded)' * (every == local.recorded)}" for every in local.numbers]
    limits = [
        f"within {format_percent(CLOSE - 1, 0)} of computing from",
        f"waiting at most {format_percent(MOST_WAITING, 0)} from",
    ]
    note = (
        "A local step's time over that of computing alone, with its share of the exchange of a whole model, for which "
        "a worker waits. Every step: gradients are exchanged in every step, beside computing. Last two columns: the "
        "least H from which on it is so. Streaming (`OuterStep(fragments=, delay=)`) hides more; its times are in "
        "report.json."
    )
    table = Table("Local steps", ["nodes", "link", "plan", "every step", *heads, *limits], rows, note, text_columns=3)
    return Section("local-steps", "How many local steps, and which plan?", local.verdict, [table])


def _cells(times: LocalSteps, local: LocalSpeed) -> list[str]:
    seconds = [times.compressed, *(times.seconds(every) for every in local.numbers)]
    ratios = [format_ratio(one / times.compute) for one in seconds]
    return [*ratios, *(format_count(every) for every in (times.close, times.least(MOST_WAITING)))]
