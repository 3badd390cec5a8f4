"""Train compressed with Accelerate, on two processes of this machine, and continue from a checkpoint.

torchrun --standalone --nproc-per-node 2 accelerate_example.py --epochs 4
torchrun --standalone --nproc-per-node 2 accelerate_example.py --epochs 6 --resume accelerate-run/epoch=3

Needs: pip install 'gradlab[accelerate]'
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradlab.plan import Plan
from gradlab.runtime.accelerate import compress


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    """256 labelled points in 32 dimensions, four classes; Accelerate gives each rank its share."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 32, generator=generator)
    targets = (inputs @ torch.randn(32, 4, generator=generator)).argmax(dim=1)
    return DataLoader(TensorDataset(inputs, targets), batch_size=16)


def main() -> None:
    """Train, saving a checkpoint after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("accelerate-run"), help="for checkpoints")
    parser.add_argument("--resume", type=Path, help="continue from this checkpoint")
    arguments = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    # The largest 5 % of each matrix with error feedback, after one dense epoch; or the path of a fitted artifact.
    plan = Plan.uniform(model, "topk", density=0.05, warmup_steps=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())

    with compress(accelerator, model, plan, optimizer, deterministic=True) as state:
        first = 0
        if arguments.resume:
            accelerator.load_state(str(arguments.resume))
            first = int(arguments.resume.name.removeprefix("epoch=")) + 1
        for epoch in range(first, arguments.epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
            accelerator.save_state(str(arguments.folder / f"epoch={epoch}"))

    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    result = state.report() | {"parameters_sha256": hashlib.sha256(values).hexdigest()}
    print(json.dumps(result), flush=True)  # one line per rank: the parameters are the same, the residuals are not
    accelerator.end_training()


if __name__ == "__main__":
    main()
