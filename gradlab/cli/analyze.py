"""`gradlab analyze`: a trace's report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.cli.console import OUT, print_json, print_warnings, progress_bars
from gradlab.errors import GradlabError

# GradiVeQ's L_t; of a shorter trace the first half, so that the other can be held out.
SAMPLES = 100


def analyze(
    trace: Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")],
    out: Annotated[Path, typer.Option(metavar="REPORT", help="Folder for report.html, report.json and figures.")],
    overwrite: Annotated[bool, typer.Option(help="Replace a report that is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON too.")] = False,
) -> None:
    """Measure a trace: spectra, agreement between ranks, a GradiVeQ fit tried on later iterations; write a report.

    Also what GradiVeQ builds on, by layer: correlated neighbours, like slices, bases that last; and how well
    blocks of signs stand for gradients.

    Example:

      gradlab analyze trace --out report
    """
    import json

    from gradlab.analysis.gradiveq import NotFittable, fit_gradiveq
    from gradlab.analysis.report import write_trace_report
    from gradlab.analysis.sign_blocks import measure_sign_blocks
    from gradlab.analysis.slice_structure_trace import measure_slice_structure
    from gradlab.analysis.target import REPORT_FILES, require_free
    from gradlab.trace import Trace

    require_free(out, overwrite, contents=REPORT_FILES)
    with Trace(trace) as opened, progress_bars() as progress:
        fit, remarks = None, []
        try:
            fit = fit_gradiveq(opened, samples=max(2, min(SAMPLES, len(opened.steps) // 2)), progress=progress)
        except NotFittable as reason:
            remarks.append(f"No GradiVeQ fit: {reason}")
        structure = measure_slice_structure(opened, samples=SAMPLES, progress=progress)
        signs = None
        try:
            signs = measure_sign_blocks(opened, progress=progress)
        except GradlabError as reason:
            remarks.append(f"Nothing to say of signs: {reason}")
        page = write_trace_report(
            opened,
            out,
            fit=fit,
            structure=structure,
            signs=signs,
            remarks=remarks,
            overwrite=overwrite,
            progress=progress,
        )
    found = json.loads((page.parent / "report.json").read_text())
    if as_json:
        print_json(found)
    else:
        OUT.print(found["verdict"], markup=False)
        print_warnings(found["warnings"])
        OUT.print(str(page), markup=False)
