"""Every check that needs a GPU, in one table: `make gpu PYTHON=python3`, or `python tests/gpu`.

It installs and downloads nothing: it takes the interpreter's torch (2.6 or newer) and the checkout's own code. Checks:
each codec's exchange on the GPU against the CPU's; the engine in two processes that share one GPU (Gloo), and under
NCCL on as many GPUs as there are, against plain DDP and against lockstep, with a loss scaler, resumed, and with late
kernels; encoding and decoding of every codec beside a copy. A check that needs a package which is not there, or for
which there was no time, is listed as not run.

Exit codes: 0 all that ran passed; 1 a check failed; 2 wrong usage, or no torch from 2.6; 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from checkout import make_importable

if TYPE_CHECKING:
    from launch import Job, Row

CANNOT_RUN, NO_GPU = 2, 3
OLDEST_TORCH = (2, 6)
_MOST_RANKS = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the checks themselves")
    parser.add_argument("--seconds", type=float, default=440.0, help="after these no check begins (default: 440)")
    parser.add_argument("--numel", type=int, default=4096 * 2700, help="elements of what is timed (default: 11059200)")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="of '<where>: <check>'")
    parser.add_argument("--list", action="store_true", help="name the checks, and run none")
    return parser.parse_args()


def require_torch() -> str:
    """Why this interpreter cannot run the checks, or nothing."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch ({error})"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return "" if version >= OLDEST_TORCH else f"torch {torch.__version__}: 2.6 or newer is needed"


def jobs_for(device: str, patterns: Sequence[str]) -> list[Job]:
    """The jobs of this machine with the checks that are asked for: '<where>: <check>' matches a pattern."""
    import torch
    import torch.distributed as dist
    from launch import MODULES, Job

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    one = "cuda:0" if gpus else "cpu"
    reason = "needs a GPU" if not gpus else "" if dist.is_nccl_available() else "this torch has no NCCL"
    several = tuple(f"cuda:{n}" for n in range(min(gpus, _MOST_RANKS))) or ("cuda:0",)
    jobs = [
        Job("exchange", "exchange_checks", tuple(MODULES["exchange_checks"]), (one,)),
        Job("gloo x 2", "engine_checks", tuple(MODULES["engine_checks"]), (one, one), "gloo"),
        Job(f"nccl x {len(several)}", "engine_checks", tuple(MODULES["engine_checks"]), several, "nccl", reason),
        Job("speed", "speed_checks", tuple(MODULES["speed_checks"]), (one,)),
    ]

    def chosen(job: Job) -> tuple[str, ...]:
        return tuple(c for c in job.checks if any(fnmatch.fnmatchcase(f"{job.title}: {c}", p) for p in patterns))

    return [Job(j.title, j.module, chosen(j), j.devices, j.backend, j.unavailable) for j in jobs if chosen(j)]


def describe(device: str) -> str:
    import torch

    import gradlab

    name = torch.cuda.get_device_name(0) + f" x {torch.cuda.device_count()}" if device == "cuda" else "CPU"
    return f"gradlab {gradlab.__version__} of this checkout, torch {torch.__version__}, {name}"


def line(where: str, check: str, status: str, found: str, expected: str) -> str:
    return f"{where:9s} {check:56s} {status:8s} {found}" + (f"   [{expected}]" if expected else "")


def conclude(rows: Sequence[Row], seconds: float) -> int:
    """Print how many did what, and by name what did not run; the exit code."""
    from outcome import FAILED, NOT_RUN

    counts = Counter(outcome.status for _, _, outcome in rows)
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())) + f" in {seconds:.0f} s")
    for reason in dict.fromkeys(o.found for _, _, o in rows if o.status == NOT_RUN):
        names = [f"{where}: {check}" for where, check, o in rows if o.status == NOT_RUN and o.found == reason]
        print(f"not run, {reason}: {'; '.join(names)}")
    return 1 if counts[FAILED] or not rows else 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    began, options = time.time(), arguments()
    if reason := require_torch():
        say(f"gpu: {reason}")
        return CANNOT_RUN
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device, and nothing was checked (exit code {NO_GPU})")
        return NO_GPU
    make_importable()
    from launch import run

    print(describe(options.device))
    if not options.list:
        print(line("where", "check", "result", "found", "allowed"))
    rows: list[Any] = []
    for job in jobs_for(options.device, options.only):
        if options.list:
            print("\n".join(f"{job.title}: {check}" for check in job.checks))
            continue
        for row in run(job, began + options.seconds, options.numel, say):
            where, check, outcome = row
            print(line(where, check, outcome.status, outcome.found, outcome.expected), flush=True)
            rows.append(row)
    return 0 if options.list else conclude(rows, time.time() - began)


if __name__ == "__main__":
    sys.exit(main())
