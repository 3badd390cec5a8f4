"""The lines to paste, out of what `gradlab recommend` prints."""

from __future__ import annotations

from textwrap import dedent

HEADING = "In the training script, "


def lines_of(printed: str) -> str:
    """The indented lines below the heading, as a person copies them; empty: nothing is to be pasted."""
    _, _, below = printed.partition(HEADING)
    return dedent("\n".join(line for line in below.splitlines() if line.startswith("    ")))
