"""Train compressed with Lightning, on two processes of this machine, and continue from a checkpoint.

python lightning_example.py --epochs 4
python lightning_example.py --epochs 6 --resume lightning-run/epoch=3.ckpt

Needs: pip install 'gradlab[lightning]'
"""

from __future__ import annotations

import argparse
import hashlib
import json

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradlab.plan import Plan
from gradlab.runtime.lightning import CompressionCallback


class Classifier(LightningModule):
    """Four classes of points in 32 dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    """256 labelled points; Lightning gives each rank its share."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 32, generator=generator)
    targets = (inputs @ torch.randn(32, 4, generator=generator)).argmax(dim=1)
    return DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)


def main() -> None:
    """Train, saving a checkpoint after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", default="lightning-run", help="for checkpoints")
    parser.add_argument("--resume", help="continue from this checkpoint")
    arguments = parser.parse_args()

    seed_everything(0)
    model = Classifier()
    # The largest 5 % of each matrix with error feedback, after one dense epoch; or the path of a fitted artifact.
    plan = Plan.uniform(model, "topk", density=0.05, warmup_steps=8)
    compression = CompressionCallback(plan, deterministic=True)
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=arguments.epochs,
        callbacks=[compression, ModelCheckpoint(arguments.folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, batches(), ckpt_path=arguments.resume)

    assert compression.state is not None
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    result = compression.state.report() | {"parameters_sha256": hashlib.sha256(values).hexdigest()}
    print(json.dumps(result), flush=True)  # one line per rank: the parameters are the same, the residuals are not


if __name__ == "__main__":
    main()
