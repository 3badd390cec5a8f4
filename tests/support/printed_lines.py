"""The lines to paste, out of what `gradlab recommend` prints."""

from __future__ import annotations

HEADING = "In the training script, "


def lines_of(printed: str) -> str:
    """The paragraph below the heading, as a person copies it; empty: nothing is to be pasted."""
    _, _, below = printed.partition(HEADING)
    return below.split("\n\n")[1] if below else ""
