"""`gradlab compare`: set two reports side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.cli.console import command_line, tell_of_report


def compare(
    first: Annotated[Path, typer.Argument(metavar="REPORT", help="A folder that gradlab analyze wrote.")],
    second: Annotated[Path, typer.Argument(metavar="REPORT", help="Another one.")],
    out: Annotated[Path, typer.Option(metavar="REPORT", help="Folder for report.html, report.json and figures.")],
    overwrite: Annotated[bool, typer.Option(help="Replace a report that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON too.")] = False,
) -> None:
    """Set two reports of recordings side by side: answers, every plan, every layer.

    For the same model early and late in training, with another batch size, or before and after a change. Nothing is
    measured again.

    Examples:

      gradlab compare report-early report-late --out early-beside-late

      gradlab compare report-a report-b --out beside --json
    """
    from gradlab.analysis.report.beside import write_beside

    page = write_beside(first, second, out, overwrite=overwrite, repeat=command_line())
    tell_of_report(page, as_json)
