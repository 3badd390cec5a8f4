"""Under `torchrun --max-restarts 1`, 4 ranks: one kills itself, and the job goes on from its last checkpoints.

    restart_job.py FOLDER

Each rank writes a file of its own every 3 steps; rank 2 is killed in step 7, before its peers have written theirs or
after, as it comes. Started again, the ranks continue from the last step that all of them have, and compare their end
with an undisturbed run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gradlab.ddp.agreement import Ranks
from jobs.resume_job import Run
from support.stacks import Stack

STEPS, EVERY, KILLED_AT, VICTIM = 12, 3, 7, 2
STACK = Stack("topk", "warm-up, two-way under feedback")


def save(run: Run, step: int, folder: Path) -> None:
    """Write this rank's checkpoint; a file is there whole or not at all."""
    path = folder / f"rank-{run.rank}-step-{step}.pt"
    torch.save(run.checkpoint(), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def last_common_step(run: Run, folder: Path) -> int:
    """The last step of which every rank has its checkpoint; 0 for none."""
    steps = [int(path.stem.rpartition("-")[2]) for path in folder.glob(f"rank-{run.rank}-step-*.pt")]
    everyone = Ranks(dist.group.WORLD, torch.device("cpu")).gather(sorted(steps))
    return max(set(everyone[0]).intersection(*everyone[1:]), default=0)


def train(folder: Path) -> tuple[Run, int]:
    """A run that may have been killed before; and the step it began with."""
    run = Run(STACK, dist.group.WORLD, deterministic=True)
    if start := last_common_step(run, folder):
        saved = torch.load(folder / f"rank-{run.rank}-step-{start}.pt", weights_only=True)
        run.load(saved)
        run.state.load_state_dict(saved["compression"])
    for step in range(start, STEPS):
        if step == KILLED_AT and run.rank == VICTIM and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        run.train(range(step, step + 1))
        if (step + 1) % EVERY == 0:
            save(run, step + 1, folder)
    return run, start


def join(attempt: int) -> None:
    """The default group. torchrun may keep its store over a restart: Gloo would find dead ranks' addresses there."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    join(restarts)
    run, start = train(folder)
    undisturbed = Run(STACK, dist.group.WORLD, deterministic=True)
    undisturbed.train(range(STEPS))
    wanted, got = undisturbed.end(), run.end()
    equal = wanted.keys() == got.keys() and all(torch.equal(got[key], wanted[key]) for key in wanted)
    result = {"equal": equal, "resumed from": start, "restarts": restarts, "tensors": len(got)}
    rows = Ranks(dist.group.WORLD, torch.device("cpu")).gather(result)
    run.close()
    undisturbed.close()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
