"""Train a small GPT-2 compressed with the Trainer of transformers, on two processes, and continue from a checkpoint.

torchrun --standalone --nproc-per-node 2 transformers_example.py --steps 32
torchrun --standalone --nproc-per-node 2 transformers_example.py --steps 48 --resume transformers-run/checkpoint-32
torchrun --standalone --nproc-per-node 2 transformers_example.py --steps 32 --record trace

Needs: pip install 'gradlab[transformers]'
"""

from __future__ import annotations

import argparse
import hashlib
import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from gradlab.capture.transformers import RecordingCallback
from gradlab.plan import Plan
from gradlab.runtime.transformers import CompressionCallback


def sentences() -> list[dict[str, torch.Tensor]]:
    """128 rows of 16 tokens, each a count upwards from a random number; the Trainer gives each rank its share."""
    starts = torch.randint(64, (128, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 64]


def main() -> None:
    """Train, saving a checkpoint every 8 steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--folder", default="transformers-run", help="for checkpoints")
    parser.add_argument("--resume", help="continue from this checkpoint")
    parser.add_argument("--record", help="record a trace here instead of compressing")
    arguments = parser.parse_args()

    set_seed(0)
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    settings = TrainingArguments(
        arguments.folder,
        use_cpu=True,
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=8,
        logging_steps=8,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,  # the Trainer's default is True for its own models, which costs time
    )
    trainer = Trainer(model, settings, train_dataset=sentences())
    if arguments.record:
        trainer.add_callback(RecordingCallback(arguments.record, trainer=trainer))
        trainer.train()
        return

    # The largest 5 % of each matrix with error feedback, after 8 dense steps; or the path of a fitted artifact.
    plan = Plan.uniform(model, "topk", density=0.05, warmup_steps=8)
    compression = CompressionCallback(plan, trainer=trainer, deterministic=True)
    trainer.add_callback(compression)
    trainer.train(resume_from_checkpoint=arguments.resume)

    assert compression.state is not None
    values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    result = compression.state.report() | {"parameters_sha256": hashlib.sha256(values).hexdigest()}
    print(json.dumps(result), flush=True)  # one line per rank: the parameters are the same, the residuals are not


if __name__ == "__main__":
    main()
