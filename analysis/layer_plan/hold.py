"""Whether a plan's error holds on windows that it was not chosen on, and the largest alpha whose plan's error does.

L-GreCo promises the error on the gradients that it looks at (section 3). Later ones have other errors. A plan holds
where its error on held-out windows is no larger than the uniform plan's there, or alpha times it where alpha above 1
asks for more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradlab.analysis.layer_plan.problem import Choice, Problem
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.progress import Progress

_STEPS = 100  # alphas are tried by hundredths: an error of 1 % more or less is a plan of about 1 % less or more


@dataclass(frozen=True)
class Hold(Jsonable):
    """Whether the error that was asked for holds on held-out windows, and which alpha's does.

    asked: alpha.
    holds: whether the error of its plan is no larger there than asked.
    largest: the largest alpha of which that is so: the one asked, or else one in hundredths below. None: of none.
    taken: whether the plan is that of `largest` where the one asked does not hold.
    """

    asked: float
    holds: bool
    largest: float | None
    taken: bool = False


def holds(problem: Problem, choice: Choice, metric: str, held_out: slice, alpha: float) -> bool:
    """Return whether a plan's error on held-out windows is within alpha; below 1, within the uniform plan's error."""
    table = problem.table
    error, uniform = (float(table.by_window(one, metric)[held_out].sum()) for one in (choice, problem.reference))
    return error <= max(1.0, alpha) * uniform


def largest_alpha(
    problem: Problem,
    metric: str,
    held_out: slice,
    asked: float,
    choose: Callable[[float], Choice],
    *,
    progress: Progress | None = None,
) -> float | None:
    """Find the largest alpha, in hundredths below the one asked, whose plan's error holds, or None.
    A smaller alpha's plan may have the larger error on windows that it was not chosen on, so all are tried.
    """
    first = math.ceil(_STEPS * asked) - 1
    for tried in range(first, 0, -1):
        if progress:
            progress("alphas tried", first - tried + 1, first)
        try:
            choice = choose(tried / _STEPS)
        except GradlabError:  # nor does any plan meet a smaller one
            return None
        if holds(problem, choice, metric, held_out, tried / _STEPS):
            return tried / _STEPS
    return None
