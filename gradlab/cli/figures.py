"""Write one chart as a command's result: checked before the work, drawn after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gradlab.analysis.figures.style import drawing, render
from gradlab.analysis.outputs import require_free
from gradlab.errors import GradlabError
from gradlab.files import write_whole

if TYPE_CHECKING:
    from gradlab.analysis.chart import Chart

FIGURES = (".svg", ".pdf")


def require_figure(out: Path, overwrite: bool) -> None:
    """Refuse a name that no figure can have, or that is taken."""
    if out.suffix not in FIGURES:
        raise GradlabError(f"{out}: a figure is written as {' or '.join(FIGURES)}")
    require_free(out, overwrite)


def write_chart(chart: Chart, out: Path) -> None:
    """Draw a chart and write it in the format of the file's ending, whole or not at all."""
    from gradlab.analysis.chart import draw

    with drawing():
        files = render(draw(chart), out.stem)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, files[out.suffix.removeprefix(".")])
