"""The look of all figures: one type size, no pyplot state."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FuncFormatter, LogFormatterSciNotation

from gradlab.analysis.figures.palette import FORMATS, GREY, MOST_NAMED_LAYERS, layer_colors
from gradlab.printable import printable

WIDTH = 6.6
_LONGEST_WORD = 80  # characters of a name
_CAPTION_COLUMNS = 150  # characters of 6 points in a line of that width
_POINTS_PER_INCH = 72  # the resolution of both formats

# Any: the keys that matplotlib's own types allow differ from version to version.
RC: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a layer's name is no formula; powers of ten are written without
}
_NO_GLYPH = (
    "figures: the font DejaVu Sans lacks characters of some names, which are boxes in PDF files; the page and SVG "
    "files show them in the viewer's fonts"
)
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def panels(count: int, columns: int, height: float = 2.0, **kwargs: Any) -> tuple[Figure, list[Axes]]:
    """Make a figure of equal panels."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height * rows + 0.35), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs).reshape(-1)
    for unused in axes[count:]:
        unused.remove()
    return figure, list(axes[:count])


def name_layers(figure: Figure, axes: Sequence[Axes], names: Sequence[str]) -> None:
    """Name the layers of a figure's lines: few in a legend, many by a colour bar from the first to the last."""
    if len(names) <= MOST_NAMED_LAYERS:
        handles, _ = axes[0].get_legend_handles_labels()
        columns = 3 if max(map(len, names), default=0) < 24 else 2
        figure.legend(handles[: len(names)], names, loc="outside lower center", ncols=columns)
        return
    colors = ListedColormap(layer_colors(len(names)))
    scale = ScalarMappable(BoundaryNorm(np.arange(len(names) + 1), len(names)), colors)
    bar = figure.colorbar(scale, ax=list(axes), ticks=[0.5, len(names) - 0.5], aspect=30, pad=0.02)
    bar.ax.set_yticklabels([f"first:\n{_wrapped(names[0])}", f"last:\n{_wrapped(names[-1])}"])
    bar.minorticks_off()
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)


def write_below(figure: Figure, caption: str) -> None:
    """Write what a figure was drawn with below its panels."""
    if caption:
        lines = [line for paragraph in caption.splitlines() for line in textwrap.wrap(paragraph, _CAPTION_COLUMNS)]
        size = figure.get_figheight() + 0.1 * len(lines)
        figure.set_figheight(size)
        figure.supxlabel("\n".join(lines), fontsize=6, color=GREY, x=0.02, ha="left")


def _wrapped(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"


def render(figure: Figure, name: str, formats: Sequence[str] = FORMATS) -> dict[str, bytes]:
    """Write a figure in several formats. Equal figures give equal bytes. Call it inside `drawing`."""
    files = {}
    _make_printable(figure)
    with rc_context({**RC, "svg.hashsalt": name}):
        canvas, image_dpi = FigureCanvasSVG(figure), figure.dpi
        figure.set_dpi(_POINTS_PER_INCH)
        # Places are found once and kept. `print_figure` would look for them before each of the formats.
        if (layout := figure.get_layout_engine()) is not None:
            with warnings.catch_warnings():  # names too long for the paper's width are cut off, and all else is drawn
                warnings.filterwarnings("ignore", "constrained_layout not applied")
                layout.execute(figure)
        figure.set_layout_engine("none")
        for kind, write, metadata in (
            ("svg", canvas.print_svg, {"Date": None, "Creator": "gradlab"}),
            ("pdf", FigureCanvasPdf(figure).print_pdf, {"CreationDate": None, "Creator": "gradlab"}),
        ):
            if kind not in formats:
                continue
            figure.set_dpi(image_dpi)  # of what is drawn as pixels; writing changes it
            buffer = io.BytesIO()
            write(buffer, metadata=metadata)
            files[kind] = buffer.getvalue()
    return files


def _make_printable(figure: Figure) -> None:
    """Let all text be such as a document can hold, and powers of ten be text: names come from files."""
    for text in figure.findobj(Text):
        text.set_text(_shown(text.get_text()))
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            for get, put in (
                (axis.get_major_formatter, axis.set_major_formatter),
                (axis.get_minor_formatter, axis.set_minor_formatter),
            ):
                formatter = get()
                if isinstance(formatter, LogFormatterSciNotation):
                    put(_PowersOfTen())
                elif isinstance(formatter, FixedFormatter):
                    formatter.seq = [_shown(label) for label in formatter.seq]
                elif isinstance(formatter, FuncFormatter):  # which labels of given ticks become
                    put(FuncFormatter(partial(_printed, formatter.func)))


def _shown(text: str) -> str:
    return printable(text, longest=_LONGEST_WORD)


def _printed(label: Callable[..., str], *given: Any) -> str:
    return _shown(label(*given))


class _PowersOfTen(LogFormatterSciNotation):
    """matplotlib's labels of logarithmic axes, without its mathematics."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        label = super().__call__(value, pos).removeprefix(r"$\mathdefault{").removesuffix("}$")
        label = re.sub(r"\^\{([-0-9]+)\}", lambda power: power[1].translate(_RAISED), label)
        return label.replace(r"\times", "\u00d7").replace("-", "\u2212")


@contextmanager
def drawing() -> Iterator[None]:
    """Set matplotlib up for gradlab's figures while the context lasts, and warn once of all glyphs that fonts lack."""
    with warnings.catch_warnings(record=True) as seen, rc_context(RC):
        warnings.simplefilter("always")
        yield
    others = {(str(one.message), one.category) for one in seen if not _is_of_glyph(one)}
    for text, category in sorted(others, key=str):
        warnings.warn(text, category, stacklevel=3)
    if any(map(_is_of_glyph, seen)):
        warnings.warn(_NO_GLYPH, stacklevel=3)


def _is_of_glyph(one: warnings.WarningMessage) -> bool:
    return "missing from font" in str(one.message)
