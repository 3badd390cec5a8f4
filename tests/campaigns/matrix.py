"""Print the matrix codec x DDP option x number of ranks; every cell trains in real processes.

    PYTHONPATH=tests python tests/campaigns/matrix.py [--ranks 2,4] [--rows TEXT] [--options TEXT]

A cell is what `matrix_cells.run_cell` says. The exit code is 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from gradlab.ddp.groups import Ranks
from jobs.matrix_cells import OPTIONS, rows, run_cell
from support.warm_python import python


def job(out: Path, size: int, chosen: list[list[str]]) -> None:
    """One rank: run cells on the first `size` ranks of the world, and write what came out of each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    whole = size == dist.get_world_size()
    # The last rank of a larger world sits out, so that ranks differ between the world and the group.
    group = dist.group.WORLD if whole else dist.new_group(list(range(1, size + 1)))
    results = {}
    if whole or dist.get_rank():
        for row, option in chosen:
            began = time.monotonic()
            results[f"{row} / {option}"] = together(group, row, option)
            if dist.get_rank(group) == 0:
                print(
                    f"{size} ranks, {row} / {option}: {results[f'{row} / {option}']} ({time.monotonic() - began:.1f} s)"
                )
                sys.stdout.flush()
                out.write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def together(group: dist.ProcessGroup, row: str, option: str) -> str:
    """What all ranks say of a cell, or the first that says otherwise."""
    try:
        verdict = run_cell(group, row, option)
    except Exception as error:
        verdict = f"FAILED: {type(error).__name__}: {error}"
        if os.environ.get("MATRIX_TRACEBACK"):
            traceback.print_exc()
    everyone = Ranks(group, torch.device("cpu")).gather(verdict)
    return next((text for text in everyone if text.startswith("FAILED")), everyone[0])


def launch(size: int, world_size: int, chosen: list[list[str]]) -> dict[str, str]:
    """Run cells under torchrun; what came out of each."""
    if not chosen:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "said.json"
        command = [python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        words = [__file__, "--job", str(out), str(size), json.dumps(chosen)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run([*command, *words], env=environment, check=False)
        verdicts = json.loads(out.read_text()) if out.exists() else {}
        ended = f"FAILED: the job ended with {done.returncode}"
        return {f"{row} / {option}": verdicts.get(f"{row} / {option}", ended) for row, option in chosen}


def show(sizes: list[int], names: list[str], options: list[str], verdicts: dict[int, dict[str, str]]) -> None:
    """The table, and below it each refusal and failure once."""
    notes: dict[str, int] = {}
    width, first = max(map(len, names)), max(map(len, options)) + 2
    print(f"\n{'option, ranks':<{first + 3}}" + "  ".join(f"{name:<{width}}" for name in names))
    for option in options:
        for size in sizes:
            cells = []
            for name in names if OPTIONS[option].fits(size) else ():
                text = verdicts[size][f"{name} / {option}"]
                known = text.startswith("passed")
                cells.append(text if known else f"{text.split(':')[0]} [{notes.setdefault(text, len(notes) + 1)}]")
            print(f"{option:<{first}}{size:<3}" + "  ".join(f"{cell:<{width}}" for cell in cells).rstrip())
    for text, number in notes.items():
        print(f"[{number}] {text}")


def main() -> int:
    if sys.argv[1:2] == ["--job"]:
        job(Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rows", default="")
    parser.add_argument("--options", default="")
    wanted = parser.parse_args()
    names = [name for name in rows() if wanted.rows in name]
    options = [option for option in OPTIONS if wanted.options in option]
    verdicts = {}
    for size in map(int, wanted.ranks.split(",")):
        cells = [[name, option] for option in options for name in names if OPTIONS[option].fits(size)]
        whole = [cell for cell in cells if not OPTIONS[cell[1]].part]
        part = [cell for cell in cells if OPTIONS[cell[1]].part]
        verdicts[size] = launch(size, size, whole) | launch(size, size + 1, part)
    show([*verdicts], names, options, verdicts)
    return int(any(text.startswith("FAILED") for cells in verdicts.values() for text in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
