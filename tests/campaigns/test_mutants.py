"""The faults of the campaign are faults of these sources: none of them can rot unseen."""

from __future__ import annotations

from collections import Counter

import pytest

from campaigns.mutant_records import MUTANTS, Mutant
from campaigns.mutants import problem_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.what}")
def test_a_fault_is_one_of_these_sources(mutant: Mutant) -> None:
    """Its text occurs once, it changes something, and its tests are there."""
    assert problem_of(mutant) == ""
    assert mutant.tests
    assert mutant.what.endswith(".")


def test_each_fault_is_told_once() -> None:
    assert [what for what, times in Counter(mutant.what for mutant in MUTANTS).items() if times > 1] == []
