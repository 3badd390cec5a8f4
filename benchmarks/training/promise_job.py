"""A task of pilot_tasks.py under DDP, as a user's script has it: recorded, or compressed, or plain.

    torchrun --nproc-per-node 2 benchmarks promise_job TASK --data FOLDER [--seed 0] [--stop STEPS]
        [--record TRACE | --plan ARTIFACT] [--result FILE]

Prints the mean loss on batches that no step has, which --result writes as JSON.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pilot_tasks import made, parameters_of
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.capture import TraceRecorder

CHECKED = 16  # batches of a validation


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record")
    parser.add_argument("--plan")
    parser.add_argument("--stop", type=int)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task, training = made(options.task, options.seed, options.data)
    model = DistributedDataParallel(training.model)
    with _gradlab(options, model, training.optimizer):
        for step in range(min(task.steps, options.stop or task.steps)):
            generator = torch.Generator().manual_seed((options.seed * 100_003 + step) * 64 + dist.get_rank())
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            training.optimizer.zero_grad()
            training.loss(model, training.draw(generator)).backward()
            if training.clip:
                torch.nn.utils.clip_grad_norm_(parameters_of(training).values(), training.clip)
            for group in training.optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * training.rate(step / task.steps)
            training.optimizer.step()
    if dist.get_rank() == 0:
        generator = torch.Generator().manual_seed(77_777_777 + options.seed)
        training.model.eval()
        with torch.no_grad():
            losses = [training.loss(training.model, training.draw(generator)) for _ in range(CHECKED)]
        found = float(torch.stack(losses).mean())
        print(f"{options.task}: {found:.6f}")
        if options.result:
            options.result.write_text(json.dumps({"loss": found}))
    dist.destroy_process_group()


def _gradlab(options: argparse.Namespace, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    if options.record:
        return TraceRecorder(model, options.record, optimizer=optimizer, overwrite=True)
    if options.plan:
        return gradlab.compress(model, options.plan, optimizer=optimizer)
    return nullcontext()


if __name__ == "__main__":
    main()
