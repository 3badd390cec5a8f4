"""What every codec and recipe computes stays the same to the bit, unless a commit says what changed and why."""

from __future__ import annotations

import pytest

from support.digests import changed, changes, computed, read, stamp
from support.laws import thorough

REMEDY = (
    "If that is meant: python tests/support/digests.py --write, and say in the commit which changed and what oracle "
    "says that the new numbers are right."
)


@pytest.mark.filterwarnings("ignore:gradlab. .*the autoencoder's error")
@pytest.mark.parametrize("every", [5, thorough(1)])
def test_no_digest_changed(every: int) -> None:
    written_with, here = read()[0], stamp()
    if written_with["torch"] != here["torch"]:
        pytest.skip(f"digests are of torch {written_with['torch']}, this is {here['torch']}")
    assert not (lines := changed(computed(every))), "\n".join([*lines, REMEDY])


def test_changes_are_named() -> None:
    before = {"a": {"means": "1", "bytes": "2"}, "b": {"means": "1", "bytes": "2"}, "c": {"means": "1", "bytes": "2"}}
    now = {"a": before["a"], "b": {"means": "3", "bytes": "2"}, "d": before["a"]}
    assert changes(before, now) == ["b: means", "c: gone", "d: new"]
