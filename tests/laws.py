"""`law`: hypothesis' `given` without a deadline, because timing never decides a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def law(*strategies: SearchStrategy[Any], examples: int = 100) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on values drawn from the strategies, `examples` times."""
    return lambda test: settings(max_examples=examples, deadline=None)(given(*strategies)(test))
