"""Set two reports of recordings side by side: answers, every plan, every layer.

For the same model early and late in training, with another batch size, or before and after a change. Nothing is
measured again.

Examples:

  gradlab compare report-early report-late --out early-beside-late

  gradlab compare report-a report-b --out beside --json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.analysis.report.beside import write_beside
from gradlab.cli.console import command_line, print_report
from gradlab.cli.options import AsJson, Overwrite, Report


def compare(
    first: Annotated[Path, typer.Argument(metavar="REPORT", help="A folder that gradlab analyze wrote.")],
    second: Annotated[Path, typer.Argument(metavar="REPORT", help="Another one.")],
    out: Report,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:

    page = write_beside(first, second, out, overwrite=overwrite, repeat=command_line())
    print_report(page, as_json)
