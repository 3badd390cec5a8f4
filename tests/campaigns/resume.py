"""Resume against never stopped, for every valid stack, at 2 and 4 ranks, in new processes; and one rank killed.

    PYTHONPATH=tests python tests/campaigns/resume.py [NAME ...] [--ranks 4]

prints one line per stack (whose name ends with a NAME) and number of ranks; exit code 1 if one is wrong. At many ranks:
--ranks 16 "| none" "| feedback" "| two-way under feedback"
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.warm_python import python

HERE = Path(__file__).parents[1]
INT8 = 0.01  # what storing anew in 8 bits may move, as a share of the largest


def launch(script: str, *words: str, ranks: int = 4, torchrun: tuple[str, ...] = ()) -> None:
    """Run one of the jobs under torchrun.

    Raises:
        AssertionError: with the end of what it printed, if it failed.
    """
    command = [python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *torchrun]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*command, str(HERE / "jobs" / script), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def results(folder: Path, *words: str, ranks: int = 4) -> list[list[dict[str, Any]]]:
    """Both jobs, one after the other; what each rank found."""
    launch("resume_job.py", "straight", str(folder), *words, ranks=ranks)
    launch("resume_job.py", "resume", str(folder), *words, ranks=ranks)
    rows: list[list[dict[str, Any]]] = json.loads((folder / "results.json").read_text())
    return rows


def problems(result: dict[str, Any]) -> list[str]:
    """What is wrong with one rank's result for one stack."""
    lines = [] if result["equal"] or not result["deterministic"] else [f"differs by {result['largest']}"]
    for policy, after in result.get("rescaled", {}).items():
        lines += [f"{policy}: not {what}" for what in ("shared", "finite", "agree") if not after[what]]
        lines += [f"{policy}: what is owed is not finite" for row in after["owed"] if None in row]
        for gap, scale, now in (row for row in after["owed"] if None not in row):
            if policy == "drop" and now:
                lines.append(f"drop: {now} is left")
            if policy != "drop" and gap > (INT8 if "int8" in result["stack"] else 1e-6) * scale:
                lines.append(f"{policy}: {gap:.1e} of {scale:.1e} is lost")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*")
    parser.add_argument("--ranks", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = results(Path(folder), "all", *asked.names, ranks=asked.ranks)
        launch("restart_job.py", folder, "ddp", ranks=asked.ranks, torchrun=("--max-restarts=1",))
        restarted = json.loads((Path(folder) / "results.json").read_text())
    wrong = sum(not result["equal"] or result["restarts"] != 1 for result in restarted)
    print(f"{asked.ranks} ranks, of which one is killed: {'wrong' if wrong else 'bit for bit'}")
    for position, result in enumerate(rows[0]):
        ranks = [row[position] for row in rows[: result["ranks"]]]
        lines = sorted({text for rank in ranks for text in problems(rank)})
        wrong += bool(lines)
        how = "deterministic" if result["deterministic"] else "all-reduce"
        apart = [rank["largest"] for rank in ranks]
        largest = "not finite" if None in apart else f"{max(apart):.1e}"
        off = "bit for bit" if all(rank["equal"] for rank in ranks) else f"largest difference {largest}"
        print(f"{result['ranks']} ranks  {result['stack']:<46} {how:<14} {off}  {'; '.join(lines)}".rstrip())
    print(f"{len(rows[0])} cases, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
