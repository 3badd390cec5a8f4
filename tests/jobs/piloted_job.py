"""Under torchrun: a small training with the recording lines, as `gradlab pilot` finds it.

piloted_job.py FOLDER            FOLDER: of a trace that is there already
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import TraceRecorder


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = Path(os.environ["GRADLAB_PILOT"]) / f"seen-{dist.get_rank()}"
    with TraceRecorder(model, sys.argv[1], optimizer=optimizer) as recorder, open(seen, "w", encoding="utf-8") as file:
        for _ in range(100):
            inputs = torch.randn(8, 16, generator=generator)
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
            print(float(loss), file=file, flush=True)
            optimizer.zero_grad()
            loss.backward()
            recorder.annotate(loss=loss)
            optimizer.step()
    (seen.parent / "went on").touch()


if __name__ == "__main__":
    main()
