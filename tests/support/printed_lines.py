"""The lines to paste, out of what `gradlab recommend` prints."""

from __future__ import annotations

HEADING = "In the training script, "
RESUMING = "To resume bit for bit, "


def lines_of(printed: str) -> str:
    """The paragraph below the heading, as a person copies it; empty: nothing is to be pasted."""
    _, _, below = printed.partition(HEADING)
    return below.split("\n\n")[1] if below else ""


def lines_to_resume_of(printed: str) -> str:
    """The lines that save and load residuals; empty: there are none."""
    _, _, below = printed.partition(RESUMING)
    return below.split("\n\n")[1] if below else ""
