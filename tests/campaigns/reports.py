"""What people reported of other tools, tried on this one: a row per public report with what came here.

    PYTHONPATH=tests python tests/campaigns/reports.py [--only h5py ...] [--markdown]

A case is a function of tests/campaigns/reported that does what the report did and returns what came, in some words. It
fails with an exception where that is not right; the exit code is then 1. Ranks are real processes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
import traceback
from pathlib import Path

from campaigns.reported import CASES, Workplace
from support.process_pool import ProcessPool

MODULES = ("training", "frameworks", "files", "estimates", "terminal")


def main() -> int:
    """Try all reports, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="reports whose address has TEXT")
    parser.add_argument("--markdown", action="store_true", help="rows of a table of Markdown")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in MODULES:
        importlib.import_module(f"campaigns.reported.{module}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ProcessPool(2, Path(folder) / "pool.log") as pool:
        for number, case in enumerate(one for one in CASES if any(text in one.where for text in arguments.only)):
            (place := Path(folder) / str(number)).mkdir()
            began = time.monotonic()
            try:
                came = case.tried(Workplace(place, pool))
            except Exception:
                failed += 1
                came = f"FAILED: {traceback.format_exc().strip()}"
            if arguments.markdown:
                print(f"| [{case.where}]({case.address}) | {case.met} | {case.name} | {came} |", flush=True)
            else:
                seconds = time.monotonic() - began
                print(f"{case.where} ({seconds:.0f} s): {case.met}\n  {case.name}: {came}", flush=True)
    print(f"{failed} failed" if failed else "all held")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
