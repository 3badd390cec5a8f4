"""Counts with their nouns."""

from __future__ import annotations

import pytest

from gradlab.analysis.forecast.speed import Configuration
from gradlab.formatting import format_counted


@pytest.mark.parametrize(("count", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes")])
def test_a_noun_follows_its_count(count: int, text: str) -> None:
    assert format_counted(count, "node") == text
    at = Configuration(count, 1e9, 1.0, "plain DDP", 1.0, {}, None, 0.0, None, 0.0)
    assert at.where == f"at 1 Gbit/s between {text}"
