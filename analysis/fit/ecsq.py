"""Tables of entropy-coded scalar quantization that are fitted on a recording.

By default `ecsq` learns nothing beforehand: its tables travel in its messages, and its step follows from earlier ones.
So a recording says what it will do, and every iteration is held out. Tables can be fitted, too: on the earlier half of
the recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gradlab.analysis.gradients import step_gradients
from gradlab.codec import Tensors
from gradlab.codec.settings import build_settings
from gradlab.codecs.ecsq import ECSQ
from gradlab.errors import GradlabError
from gradlab.plan import Plan

if TYPE_CHECKING:
    from gradlab.trace import Trace


def earlier_half(trace: Trace) -> list[int]:
    """Return the iterations that tables are fitted on."""
    if len(trace.steps) < 2:
        raise GradlabError("a trace of 1 iteration, expected 2 or more: tables are fitted on the earlier half")
    return [int(step) for step in trace.steps[: len(trace.steps) // 2]]


def with_fitted_tables(trace: Trace, plan: Plan) -> Plan:
    """Fit the tables of a plan's groups of ecsq on the earlier half of a trace, one rank's contribution at a time."""
    groups, learned = list(plan.groups), dict(plan.learned)
    for at, group in enumerate(plan.groups):
        if group.codec != "ecsq":
            continue
        groups[at] = replace(group, settings={**group.settings, "tables": "fitted"})
        codec = ECSQ(build_settings(ECSQ, groups[at].settings))
        learned[group.name] = codec.fitted(plan.members(group), _contributions(trace, group.layers)).learned
    return replace(plan, groups=tuple(groups), learned=learned)


def _contributions(trace: Trace, names: Sequence[str]) -> Iterator[Tensors]:
    """Yield one rank's gradients of every iteration of a trace's earlier half."""
    for number, step in enumerate(trace.iterate(0, len(earlier_half(trace)), names)):
        yield {name: torch.from_numpy(one) for name, one in step_gradients(step)[number % trace.world_size].items()}
