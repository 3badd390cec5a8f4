"""Under `torchrun --max-restarts 1`, 4 ranks: one kills itself, and the job goes on from its last checkpoints.

    restart_job.py FOLDER [outer]           outer: workers of local steps, with fragments on their way, instead of DDP

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
from typing import Any

import torch
import torch.distributed as dist

from gradlab.ddp.groups import Ranks
from gradlab.runtime import OuterStep
from jobs.outer_tasks import adamw, inner_step, network, plan_of
from jobs.resume_job import Run
from support.stacks import Stack

STEPS, EVERY, KILLED_AT, VICTIM = 12, 3, 7, 2
STACK = Stack("topk", "warm-up, two-way under feedback")


class OuterRun:
    """As `Run`, a worker that takes its outer steps in two fragments and two steps late."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.model = network()
        self.optimizer = adamw(self.model)
        plan = plan_of("topk", {"density": 0.1})
        self.state = OuterStep(plan, self.model, every=4, fragments=2, delay=2, group=group, deterministic=True)

    def train(self, steps: range) -> None:
        for step in steps:
            inner_step(self.model, self.optimizer, self.rank, step)
            self.state.step()

    def checkpoint(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "compression": self.state}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def end(self) -> dict[str, torch.Tensor]:
        common = {f"common/{n}": p.detach() for one in self.state.fragments for n, p in one.parameters.items()}
        return {f"model/{name}": value for name, value in self.model.state_dict().items()} | common

    def close(self) -> None:
        self.state.close()


def new_run(outer: bool) -> Run | OuterRun:
    assert dist.group.WORLD is not None
    return OuterRun(dist.group.WORLD) if outer else Run(STACK, dist.group.WORLD, deterministic=True)


def save(run: Run | OuterRun, step: int, folder: Path) -> None:
    """Write this rank's checkpoint; a file is there whole or not at all."""
    path = folder / f"rank-{run.rank}-step-{step}.pt"
    torch.save(run.checkpoint(), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def last_common_step(run: Run | OuterRun, folder: Path) -> int:
    """The last step of which every rank has its checkpoint; 0 for none."""
    steps = [int(path.stem.rpartition("-")[2]) for path in folder.glob(f"rank-{run.rank}-step-*.pt")]
    everyone = Ranks(dist.group.WORLD, torch.device("cpu")).gather(sorted(steps))
    return max(set(everyone[0]).intersection(*everyone[1:]), default=0)


def train(folder: Path, outer: bool) -> tuple[Run | OuterRun, int]:
    """A run that may have been killed before; and the step it began with."""
    run = new_run(outer)
    if start := last_common_step(run, folder):
        saved = torch.load(folder / f"rank-{run.rank}-step-{start}.pt", weights_only=True)
        run.load(saved)
        assert run.state is not None
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
    folder, outer = Path(sys.argv[1]), sys.argv[2:] == ["outer"]
    torch.set_num_threads(1)
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    join(restarts)
    run, start = train(folder, outer)
    undisturbed = new_run(outer)
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
