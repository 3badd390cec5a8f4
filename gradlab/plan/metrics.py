"""The measures that a plan by layer sums over layers: L2 norms of compression errors, as L-GreCo does, or squares.

Alimohammadi et al., "L-GreCo", MLSys 2024, section 3: error(l, c) is "the L2 norm of the compression error at layer l",
and the budget is on the sum of these norms over layers; its published code sums norms too. That is `l2`. The theory
that the section cites bounds the squared L2 error. Squares of layers add up to the square of the whole gradient's
error; norms do not. That is `squared-l2`.
"""

from __future__ import annotations

from typing import Any

from gradlab.errors import GradlabError

METRICS = ("l2", "squared-l2")


def require_metric(name: Any) -> str:
    """Return the name of a metric; refuse what is none of `METRICS`."""
    if name not in METRICS:
        raise GradlabError(f"metric {str(name)[:80]!r}, expected one of {', '.join(METRICS)}")
    return str(name)
