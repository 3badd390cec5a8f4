"""Write one figure as a command's result: checked before the work, drawn after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = (".svg", ".pdf")


def require_figure(out: Path, overwrite: bool) -> None:
    """Refuse a name that no figure can have, or that is taken.

    Args:
        out: the figure's file.
        overwrite: whether a file that is there may be replaced.

    Raises:
        GradlabError: for another ending than those in `FIGURES`, or a file that is there if overwrite is false.
    """
    from gradlab.analysis.outputs import require_free

    if out.suffix not in FIGURES:
        raise GradlabError(f"{out}: a figure is written as {' or '.join(FIGURES)}")
    require_free(out, overwrite)


def write_figure(draw: Callable[[], Figure], out: Path) -> None:
    """Draw a figure and write it, whole or not at all.

    Args:
        draw: makes the figure.
        out: the file, whose ending is the format.
    """
    from gradlab.analysis.figures.style import drawing, render
    from gradlab.files import write_whole

    with drawing():
        files = render(draw(), out.stem)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, files[out.suffix.removeprefix(".")])
