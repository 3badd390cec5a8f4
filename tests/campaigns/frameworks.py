"""Print framework x what: GPT-2 and BERT (tiny, random) in DDP, Accelerate, Lightning and Trainer, on real ranks.

    PYTHONPATH=tests python tests/campaigns/frameworks.py [--only Trainer]

A cell is "passed", or why not in a line below the table. "compresses", "accumulation" and "bf16" mean parameters,
optimizer and residuals that are, bit for bit, those of a loop without DDP on the same batches; "compile" that they are
near those (its backend is aot_eager, or BACKEND of the environment); "records" that the trace is sound and holds the
gradients that each rank has alone; "resumes bit for bit" that new processes, from the checkpoint after half of the
steps, end where the first did; "other world size" that three ranks go on from what two have saved (residuals="split")
as a loop without DDP does, bit for bit. The exit code is 1 if a cell did not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support.warm_python import python

HERE = Path(__file__).parents[1]
FRAMEWORKS = ("DDP", "Accelerate", "Lightning", "Trainer")
COLUMNS = ("records", "compresses", "resumes bit for bit", "other world size", "accumulation", "bf16", "compile")
LAUNCHES = {"first": 2, "resumed": 2, "rescaled": 3}  # ranks of each
MODULES = ("accelerate", "lightning.pytorch", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
Cells = dict[str, dict[str, str]]  # by model and column


def run(framework: str, folder: Path, ranks: int, what: str) -> Cells:
    """All ranks of one framework; what each model did."""
    script = str(HERE / "jobs" / "framework_cells.py")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    log, results = folder / f"{framework}.log", folder / f"{framework}.json"
    results.unlink(missing_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        command = [python(*MODULES), *launch, script, framework, str(folder), what]
        done = subprocess.run(command, env=environment, stdout=file, stderr=file, timeout=1800, check=False)
    if done.returncode or not results.exists():
        sys.exit(f"{framework}: the ranks ended with {done.returncode}\n{log.read_text()[-4000:]}")
    cells: Cells = json.loads(results.read_text())
    return cells


def row(framework: str, model: str, texts: list[str]) -> str:
    """One line of the table."""
    padded = (f"{text:<{max(len(name), len('refused'))}}" for text, name in zip(texts, COLUMNS, strict=True))
    return f"{framework:<11} {model:<6} {'  '.join(padded)}".rstrip()


def word(verdict: str) -> str:
    """What the table says of a cell; its line stands below."""
    first = verdict.partition(":")[0]
    return first if first in ("passed", "refused") else "FAILED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=FRAMEWORKS)
    only = parser.parse_args().only
    print(row("framework", "model", list(COLUMNS)), flush=True)
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for framework in [only] if only else FRAMEWORKS:
            parts = [run(framework, folder, ranks, what) for what, ranks in LAUNCHES.items()]
            for model in parts[0]:
                cells = {column: verdict for part in parts for column, verdict in part[model].items()}
                print(row(framework, model, [word(cells[column]) for column in COLUMNS]), flush=True)
                lines += [f"{framework}, {model}, {what}: {cells[what]}" for what in COLUMNS if cells[what] != "passed"]
    print("\n".join(lines) if lines else "every cell passed")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
