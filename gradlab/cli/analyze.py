"""`gradlab analyze`: a trace's report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.cli.console import OUT, print_json, progress_bars


def analyze(
    trace: Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")],
    out: Annotated[Path, typer.Option(metavar="REPORT", help="Folder for report.html, report.json and figures.")],
    overwrite: Annotated[bool, typer.Option(help="Replace a report that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON too.")] = False,
) -> None:
    """Measure a trace: spectra, agreement between ranks, norms; write a report with plots.

    Example:

      gradlab analyze trace --out report
    """
    import json

    from gradlab.analysis.report import write_trace_report
    from gradlab.trace import Trace

    with Trace(trace) as opened, progress_bars() as progress:
        page = write_trace_report(opened, out, overwrite=overwrite, progress=progress)
    found = json.loads((page.parent / "report.json").read_text())
    if as_json:
        print_json(found)
    else:
        OUT.print(found["verdict"], markup=False)
        OUT.print(str(page), markup=False)
