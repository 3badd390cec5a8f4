"""The DistributedDataParallel model and the optimizer inside what a framework prepared, or what to do instead.

No framework is imported here: what Accelerate's Accelerator, the Trainer of transformers and Lightning's Trainer
document as attributes is all that is read.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.wrapping import require_ddp, without_compile
from gradlab.errors import GradlabError

_LAUNCH = "launch two or more processes: torchrun --nproc-per-node 2 SCRIPT, or accelerate launch --num_processes 2"


def ddp_of_accelerate(accelerator: Any, model: object, caller: str) -> DistributedDataParallel:
    """Find the DDP model that `accelerator.prepare` made, also inside of a compiled one."""
    front = f"{caller}, {accelerator.num_processes} process(es)"
    return require_ddp(model, front, "prepare it first, and launch two or more processes")


def ddp_of_trainer(trainer: Any, caller: str) -> DistributedDataParallel:
    """Find the DDP model of a Hugging Face Trainer that has begun to train, also inside of a compiled one."""
    front = f"{caller}, {trainer.accelerator.num_processes} process(es)"
    return require_ddp(trainer.model_wrapped, front, _LAUNCH)


def ddp_of_lightning(trainer: Any, caller: str) -> DistributedDataParallel:
    """Find the DDP model of a Lightning Trainer whose strategy is set up, with no communication hook of its own."""
    strategy = trainer.strategy
    front = f"{caller}, strategy {type(strategy).__name__}"
    model = require_ddp(strategy.model, front, "use Trainer(strategy='ddp')")
    if getattr(strategy, "_ddp_comm_hook", None) is not None:  # on a CPU Lightning does not register it
        raise GradlabError(f"{caller}: DDPStrategy has a ddp_comm_hook, and DDP takes one only; leave it out")
    return model


def wrap_again(trainer: Any) -> None:
    """Have a Hugging Face Trainer wrap its model anew in its next `train`: DDP never gives a communication hook
    back."""
    if isinstance(without_compile(trainer.model_wrapped), DistributedDataParallel):
        trainer.model_wrapped = trainer.model
