"""Train torchtitan's debug model by torchtitan's own trainer on two "nodes" of two ranks, all on this machine.

torchrun --standalone --nproc-per-node 4 torchtitan_example.py --record trace   # without compression
torchrun --standalone --nproc-per-node 4 torchtitan_example.py plan.safetensors # compressed; without a plan in int4
torchrun --standalone --nproc-per-node 4 torchtitan_example.py --every 5 --out local # local steps of two workers

A run goes on from the last checkpoint in its folder. `compressed` and `local_steps` have the lines that a script of
yours needs; most others are there for a machine without GPUs and without a network.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as machine
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

from datasets import Dataset

if not hasattr(dist, "set_timeout"):  # torch 2.13 has it under another name
    dist.set_timeout = distributed_c10d._set_pg_timeout
if not torch.cuda.is_available():  # torchtitan asks torch.cuda, which has no answer: before more of it is imported
    machine.device_type = "cpu"
    machine.device_module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in ("set_device", "synchronize")},
        **{name: lambda: None for name in ("reset_peak_memory_stats", "empty_cache")},
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1),
        memory_stats=lambda device: {},
    )

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from gradlab.capture import TraceRecorder
from gradlab.plan import Plan
from gradlab.runtime import OuterStep, compress_fsdp

NODES, LAYERS = 2, 2  # layers: of the debug model's six


class Bytes(BaseTokenizer):
    """A tokenizer that needs no file: a token per byte, and 0 at both ends."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [0] * add_bos + list(text.encode()) + [0] * add_eos

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


def python_help(path: str) -> Dataset:
    """Pages that come with Python."""
    return Dataset.from_list([{"text": text} for text in pydoc_data.topics.topics.values()])


DATASETS["python_help"] = DatasetConfig(path="", loader=python_help, sample_processor=lambda sample: sample["text"])


def configuration(folder: str, steps: int) -> Trainer.Config:
    """Return torchtitan's configuration of its debug model, with what a CPU asks for."""
    config = llama3_debugmodel()
    config.dump_folder = folder
    config.tokenizer, config.dataloader = Bytes.Config(), HuggingFaceTextDataLoader.Config(dataset="python_help")
    config.training = replace(config.training, local_batch_size=2, seq_len=64, steps=steps, disable_cuda_graphs=True)
    config.parallelism = replace(
        config.parallelism, data_parallel_replicate_degree=NODES, spmd_backend="partial_dtensor"
    )
    config.checkpoint = replace(config.checkpoint, enable=True, interval=10)
    config.validator.enable = False
    config.debug.seed = 0
    del config.model_spec.model.layers[LAYERS:]
    # FlexAttention has no backward pass on a CPU.
    for _, _, parent, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.model_spec = replace(config.model_spec, parallelize_fn=partial(parallelize, workers=1))
    return config


def parallelize(model: Any, *, workers: int, parallel_dims: ParallelDims, **others: Any) -> Any:
    """Do as torchtitan does; of several workers each for itself."""
    if workers > 1:
        parallel_dims = replace(parallel_dims, dp_replicate=1, world_size=parallel_dims.dp_shard)
    model = parallelize_llama(model, parallel_dims=parallel_dims, **others)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1 / workers)  # the loss is divided by the tokens of all workers
            module.set_force_sum_reduction_for_comms(True)  # Gloo does not divide
    return model


@contextmanager
def compressed(trainer: Trainer, plan: Any) -> Iterator[Any]:
    """Compress what nodes exchange, and FSDP's all-gathers. The state goes into torchtitan's checkpoints."""
    (model,) = trainer.model_parts
    plan = plan or Plan.uniform(model, "block_scaled", dtype="int4")
    with compress_fsdp(model, plan, parameters="int8", optimizer=list(trainer.optimizers)) as state:
        trainer.checkpointer.states["gradlab"] = state.stateful
        yield state


@contextmanager
def local_steps(trainer: Trainer, plan: Any, every: int) -> Iterator[OuterStep]:
    """Exchange every so many steps how far workers came. Each has a model and an optimizer of its own to save."""
    (model,) = trainer.model_parts
    mesh = trainer.parallel_dims.get_mesh(["dp_replicate", "fsdp"])
    with OuterStep(plan or "block_scaled", model, every=every, within=mesh["fsdp"]) as outer:
        trainer.optimizers.register_step_post_hook(lambda *_: outer.step())
        states = trainer.checkpointer.states
        states["gradlab"] = outer.stateful
        for name in ("model", "optimizer"):
            states[f"{name} of worker {mesh.get_local_rank(0)}"] = states.pop(name)
        yield outer


def main() -> None:
    """Record, or train compressed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?")
    parser.add_argument("--record", metavar="FOLDER")
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="titan")
    options = parser.parse_args()
    if os.environ["RANK"] == "0":
        init_logger()
    config = configuration(options.out, options.steps)
    config.checkpoint.enable = not options.record
    if options.every:
        config.model_spec = replace(config.model_spec, parallelize_fn=partial(parallelize, workers=NODES))
    trainer = config.build()
    if options.record:
        around: Any = TraceRecorder(trainer.model_parts[0], options.record, optimizer=list(trainer.optimizers))
    elif options.every:
        around = local_steps(trainer, options.plan, options.every)
    else:
        around = compressed(trainer, options.plan)
    with around as state:
        trainer.train()
        if dist.get_rank() == 0 and not options.record:
            print(state.table() if hasattr(state, "table") else f"{state.outer_steps} outer steps")
    trainer.close()
    time.sleep(0.1)  # Gloo's threads may ask for Python's lock after a collective
    os._exit(0)


if __name__ == "__main__":
    main()
