"""`law`: hypothesis' `given` without a deadline, because timing never decides a test; `thorough`: rows left out.

The suite draws the same examples every time, so that it fails where something was changed, and a fifth of those that
are named. Others, and all of them, need the hypothesis profile `explore`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def draws_all() -> bool:
    """Whether everything is drawn, as under the profile `explore`, or a part."""
    return settings.default is None or not settings.default.derandomize


def law(*strategies: SearchStrategy[Any], examples: int = 100) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on values drawn from the strategies, `examples` times."""
    count = examples if draws_all() else -(-examples // 5)
    return lambda test: settings(max_examples=count, deadline=None)(given(*strategies)(test))


def thorough(*values: Any) -> Any:
    """Mark a row of `pytest.mark.parametrize` that only `-m thorough` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)
