"""Train two workers that exchange how far they came after every 10 optimizer steps, in int4, as MuLoCo does.

Each worker has two optimizers: Muon for its matrices, and AdamW for the rest.

torchrun --standalone --nproc-per-node 2 local_steps_example.py
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import gradlab
from gradlab.runtime import OuterStep

STEPS, EVERY, BATCH = 200, 10, 32  # optimizer steps; of them between two exchanges; images per worker


def main() -> None:
    """Train, and print each worker's loss and what an exchange sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))  # not in DDP: no gradient is averaged
    matrices, others = ([one for one in model.parameters() if (one.ndim == 2) == wanted] for wanted in (True, False))
    muon = torch.optim.Muon(matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw")  # of AdamW's size of steps
    optimizers = [muon, torch.optim.AdamW(others, lr=1e-3)]
    criterion = nn.CrossEntropyLoss()
    images, digits = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    generator = torch.Generator().manual_seed(dist.get_rank())

    plan = gradlab.Plan.uniform(model, "block_scaled", dtype="int4", exchanges="pseudo-gradients")
    with OuterStep(plan, model, every=EVERY) as outer:
        for _ in range(STEPS):
            drawn = torch.randint(len(inputs), (BATCH,), generator=generator)
            model.zero_grad()
            loss = criterion(model(inputs[drawn]), targets[drawn])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            outer.step()  # exchanges in every tenth call
    with torch.no_grad():
        accuracy = (model(inputs).argmax(dim=1) == targets).float().mean()
    if dist.get_rank() == 0:
        dense = 4 * sum(parameter.numel() for parameter in model.parameters())
        sent = plan.payload_bytes(dist.get_world_size())
        print(f"{STEPS} steps, {STEPS // EVERY} exchanges, {accuracy:.1%} of all digits recognised")
        print(f"{sent / EVERY:.0f} bytes a step in place of {dense}")
    dist.barrier()
    time.sleep(0.1)  # Gloo's threads may ask for Python's lock after a collective: see "When a rank fails"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
