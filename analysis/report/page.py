"""Write one report as a folder: report.html that needs no network, report.json with all data, and the figures.

A section answers one question, and its parts fold out beneath it. Each figure is also an SVG and a PDF, with a CSV file
of what it shows.
"""

from __future__ import annotations

import hashlib
import html
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from gradlab.analysis.figures.palette import FORMATS
from gradlab.analysis.outputs import REPORT_FILES, require_free
from gradlab.analysis.parallel import share_out
from gradlab.analysis.section import Drawing, Section
from gradlab.errors import GradlabError
from gradlab.files import write_all
from gradlab.formatting import format_counted
from gradlab.jsonable import plain
from gradlab.printable import visible
from gradlab.progress import Progress
from gradlab.version import VERSION


@dataclass(frozen=True)
class Page:
    """Everything a report shows.

    title, verdict: its first two lines; brief: text in place of the verdict in the page, if it is shorter.
    data: plain JSON, written to report.json.
    facts: names with values, about the recording or the runs.
    play: plain JSON from which the page's script computes steps on the reader's own network, see `playable_data`. None:
        there is nothing to play with.
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
    brief: str = ""

    @property
    def drawings(self) -> list[Drawing]:
        """All figures, in the order of the sections."""
        return [item for section in self.sections for item in section.all_drawings]


def write_page(
    page: Page, out: Path, *, overwrite: bool = False, workers: int = 1, progress: Progress | None = None
) -> Path:
    """Write report.html, report.json and figures/ into a folder."""
    require_free(out, overwrite, contents=REPORT_FILES)
    calls = [(item, page.formats) for item in page.drawings]
    drawn = share_out(_drawn, calls, workers=workers, what="draw", progress=progress)
    files = {item.name: kinds for item, (kinds, _) in zip(page.drawings, drawn, strict=True)}
    pointed = {item.name: panels for item, (_, panels) in zip(page.drawings, drawn, strict=True)}
    figures = [{"name": item.name, "title": item.title, "caption": item.caption} for item in page.drawings]
    head = {
        "gradlab": VERSION,
        "title": page.title,
        "verdict": page.verdict,
        "brief": page.brief or page.verdict,
        "warnings": page.warnings,
    }
    data = identified(plain({**head, "versions": versions(), "figures": figures, **page.data}))
    written = {f"figures/{name}.{kind}": content for name, kinds in files.items() for kind, content in kinds.items()}
    written["report.json"] = f"{json.dumps(data, indent=1, allow_nan=False)}\n".encode()
    svgs = {name: kinds["svg"] for name, kinds in files.items()}
    written["report.html"] = render_html(page, svgs, pointed, data["id"], data["versions"]).encode()
    try:
        write_all(out, written)
    except OSError as error:
        raise GradlabError(f"cannot write the report to {out}: {error.strerror or error}") from None
    return out / "report.html"


def _drawn(item: Drawing, formats: Sequence[str]) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Draw a figure: its files' contents by format, with its data as CSV, and its panels for the page's script."""
    from gradlab.analysis.figures.drawn import draw_files  # matplotlib takes long to import

    files, pointed = draw_files(item.chart, item.name, formats)
    return {**files, "csv": item.chart.csv().encode()}, pointed


def versions() -> dict[str, str]:
    """List what a report's numbers were computed with: versions by name."""
    return {"gradlab": VERSION, "python": platform.python_version(), "torch": version("torch"), "numpy": np.__version__}


def identified(data: Mapping[str, Any]) -> dict[str, Any]:
    """Put a report's id before its data: twelve hexadecimal digits of their SHA-256, the same for the same data."""
    content = json.dumps(data, sort_keys=True, allow_nan=False).encode()
    return {"id": hashlib.sha256(content).hexdigest()[:12], **data}


def render_html(
    page: Page,
    svgs: Mapping[str, bytes],
    pointed: Mapping[str, Any],
    report_id: str,
    computed_with: Mapping[str, str],
) -> str:
    """Render the page as one HTML document, with its figures inside."""
    from jinja2 import Environment, StrictUndefined  # which takes long to import, and few need

    here = resources.files("gradlab.analysis.report")
    source = here.joinpath("report.html.jinja").read_text(encoding="utf-8")
    names = ("tables", "folds", "figures", *(("forecast", "playable") if page.play is not None else ()))
    base = Markup(here.joinpath("base.css").read_text(encoding="utf-8"))
    scripts = [Markup(here.joinpath(f"scripts/{name}.js").read_text(encoding="utf-8")) for name in names]
    play = None if page.play is None else Markup(_in_script(page.play))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    inline = {item.name: Markup(inline_svg(svgs[item.name], item.name, item.title)) for item in page.drawings}
    # Names come from files: nothing in the document may hide, or turn what follows it around.
    return visible(
        environment.from_string(source).render(
            page=page,
            counted=format_counted,
            svg=inline,
            base=base,
            scripts=scripts,
            play=play,
            pointing=Markup(_in_script(pointed)),
            report_id=report_id,
            versions=computed_with,
        )
    )


def _in_script(value: Any) -> str:
    """Write JSON that stands in a <script> element: nothing in it can end the element."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def inline_svg(svg: bytes, name: str, title: str) -> str:
    """Turn an SVG file into an element for HTML, without prolog, metadata and style, and with ids of its own."""
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
