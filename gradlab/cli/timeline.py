"""Read a trace of torch.profiler: how long a step computes, exchanges and waits, and what fewer bytes would leave.

Take the file that export_chrome_trace wrote on one rank of a DDP training, .json or .json.gz. Times are means over the
steps that the profiler marks (call its step()), or from one optimizer step to the next. An exchange is waited for while
nothing else computes. With record_shapes=True, or NCCL, the trace has the bytes of all-reduces, and the wait is
forecast for 16 bits and int4 on a link as fast as they were.

Examples:

  gradlab timeline rank0.json

  gradlab timeline rank0.json.gz --json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.analysis.forecast.profiled import read_profile
from gradlab.cli.console import Answer, print_json
from gradlab.cli.options import AsJson


def timeline(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace of torch.profiler, .json or .json.gz.")],
    as_json: AsJson = False,
) -> None:

    steps = read_profile(file)
    if as_json:
        print_json({**steps.to_json(), "computing_seconds": steps.computing_seconds})
    else:
        Answer(steps.sentences).print()
