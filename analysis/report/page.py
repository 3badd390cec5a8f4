"""Write one report as a folder: report.html that needs no network, report.json with all data, and the figures.

A section answers one question; sections about single layers come last. Each figure is also an SVG and a PDF, with a
JSON file of what it shows.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from gradlab.analysis.figures.data import figure_data
from gradlab.analysis.figures.style import FORMATS, drawing, render
from gradlab.analysis.outputs import REPORT_FILES, require_free
from gradlab.analysis.parallel import Cluster, Workers, default_workers, share_out
from gradlab.errors import GradlabError
from gradlab.files import write_all
from gradlab.jsonable import plain
from gradlab.printable import visible
from gradlab.progress import Progress
from gradlab.version import VERSION


@dataclass(frozen=True)
class Drawing:
    """A figure that is not drawn yet.

    name: the name of its files.
    title, caption: shown with it.
    draw: makes the figure. It is called inside `gradlab.analysis.figures.style.drawing`.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Table:
    """A table of text cells. The first column names the row.

    title, note: shown above and below it.
    columns: the heads.
    rows: the cells, one per column.
    text_columns: number of leading columns that hold words instead of numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: int = 1


@dataclass(frozen=True)
class Section:
    """One question with its answer, on a page of its own when printed.

    name: the name of its anchor in the page.
    title: the question.
    answer: a sentence or two.
    tables, drawings: shown after the answer.
    of_layer: whether it shows one layer alone.
    """

    name: str
    title: str
    answer: str = ""
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    of_layer: bool = False

    @property
    def contents(self) -> str:
        """What folds out: "2 tables and 3 figures"."""
        parts = [(len(self.tables), "table"), (len(self.drawings), "figure")]
        return " and ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in parts if count)


@dataclass(frozen=True)
class Page:
    """Everything a report shows.

    title, verdict: its first two lines.
    data: plain JSON, written to report.json.
    warnings: one line each.
    facts: names with values, about the recording or the runs.
    sections: in order.
    formats: of the figures' files, "svg" and perhaps "pdf".
    play: plain JSON from which the page's script computes steps on the reader's own network, see `playable_data`; it
        stands in the section "payoff". None: there is nothing to play with.
    full: whether tables and figures are unfolded.
    repeat: the command that writes the report again; empty if there is none.
    """

    title: str
    verdict: str
    data: dict[str, Any]
    warnings: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = field(default=())
    formats: Sequence[str] = FORMATS
    play: Mapping[str, Any] | None = None
    full: bool = False
    repeat: str = ""

    @property
    def drawings(self) -> list[Drawing]:
        """All figures, in the order of the sections."""
        return [item for section in self.sections for item in section.drawings]


def write_page(
    page: Page, out: Path, *, overwrite: bool = False, workers: Workers = 1, progress: Progress | None = None
) -> Path:
    """Write report.html, report.json and figures/ into a folder.

    Args:
        page: what to write.
        out: the folder, made if it is missing.
        overwrite: whether to replace a report that is there.
        workers: processes that draw. A cluster does not: this machine's processes draw what its workers measured.
        progress: called after each figure.

    Returns:
        The path of report.html.

    Raises:
        GradlabError: if there is a report already and overwrite is false, or the folder cannot be written, as on a full
            disk. A report that was there is then still there.
    """
    require_free(out, overwrite, contents=REPORT_FILES)
    calls = [(item, page.formats) for item in page.drawings]
    here = default_workers() if isinstance(workers, Cluster) else workers
    drawn = share_out(_drawn, calls, workers=here, what="draw", progress=progress)
    files = {item.name: kinds for item, kinds in zip(page.drawings, drawn, strict=True)}
    text = render_html(page, {name: kinds["svg"] for name, kinds in files.items()})
    figures = [{"name": item.name, "title": item.title, "caption": item.caption} for item in page.drawings]
    head = {"gradlab": VERSION, "title": page.title, "verdict": page.verdict, "warnings": page.warnings}
    data = plain({**head, "figures": figures, **page.data})
    written = {f"figures/{name}.{kind}": content for name, kinds in files.items() for kind, content in kinds.items()}
    written["report.json"] = f"{json.dumps(data, indent=1, allow_nan=False)}\n".encode()
    written["report.html"] = text.encode()
    try:
        write_all(out, written)
    except OSError as error:
        raise GradlabError(f"cannot write the report to {out}: {error.strerror or error}") from None
    return out / "report.html"


def _drawn(item: Drawing, formats: Sequence[str]) -> dict[str, bytes]:
    """Draw a figure: its files' contents by format, and its data as JSON."""
    with drawing():
        figure = item.draw()
        shown = json.dumps({"name": item.name, "title": item.title, **figure_data(figure)}, allow_nan=False)
        return {**render(figure, item.name, formats), "json": shown.encode()}


def render_html(page: Page, svgs: dict[str, bytes]) -> str:
    """Render the page as one HTML document, with its figures inside.

    Args:
        page: what to render.
        svgs: SVG files by the drawing's name.

    Returns:
        The document.
    """
    here = resources.files("gradlab.analysis.report")
    source = here.joinpath("report.html.jinja").read_text(encoding="utf-8")
    names = ("tables", *(("forecast", "playable") if page.play is not None else ()))
    scripts = [Markup(here.joinpath(f"scripts/{name}.js").read_text(encoding="utf-8")) for name in names]
    play = None if page.play is None else Markup(_in_script(page.play))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    inline = {item.name: Markup(inline_svg(svgs[item.name], item.name, item.title)) for item in page.drawings}
    # Names come from files: nothing in the document may hide, or turn what follows it around.
    return visible(
        environment.from_string(source).render(page=page, svg=inline, version=VERSION, scripts=scripts, play=play)
    )


def _in_script(value: Any) -> str:
    """Write JSON that stands in a <script> element: nothing in it can end the element."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def inline_svg(svg: bytes, name: str, title: str) -> str:
    """Turn an SVG file into an element for HTML, with ids that no other figure has.

    Prolog, metadata, style and namespaces are left out.

    Args:
        svg: the file's contents.
        name: the figure's, which goes before its ids.
        title: the figure's, read aloud in its place.

    Returns:
        The <svg> element.
    """
    text = svg.decode()
    text = text[text.index("<svg") :]
    # Metadata name vocabularies by address; a figure's style sheet would style the whole page.
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    # A hundredth of a point is finer than any screen or printer; more digits are a third of the file.
    text = re.sub(r'\b(d|points|x|y)="([^"]*)"', lambda part: f'{part[1]}="{_shortened(part[2])}"', text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    label = html.escape(title, quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _shortened(numbers: str) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", numbers)
