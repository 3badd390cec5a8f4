"""Lightning: a callback that trains compressed under Trainer(strategy="ddp"), on the CPU as on CUDA.

DDPStrategy(ddp_comm_hook=...) registers a hook on CUDA only, and says nothing on a CPU; and a CompressionState needs
the DDP model, which that strategy has yet to make. The callback registers when the strategy is set up.

Lightning writes rank 0's checkpoint, but every rank has residuals of its own. They are sent to rank 0 and become part
of the one checkpoint: it is complete, written whole, and may be moved, ranked, deleted or kept in the cloud as any
other. The price is that a checkpoint carries N ranks' states over the network: with error feedback, N gradients.
"""

from __future__ import annotations

import io
import os
from typing import Any

import torch
import torch.distributed as dist

from gradlab.ddp.groups import Ranks, group_or_world
from gradlab.ddp.model import ddp_of_lightning
from gradlab.lazy import needing
from gradlab.plan import Plan
from gradlab.runtime.attach import attach
from gradlab.runtime.outer.in_ddp import LocalSteps
from gradlab.runtime.saved import check_policy, go_on, load_saved

with needing(__name__, "Lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_warn


class _RankStates(Callback):
    """A callback whose state on every rank becomes a part of rank 0's checkpoint, under `_key`."""

    _key = "gradlab"
    _without = "the checkpoint holds no compression states, they start anew"

    def __init__(self, residuals: str | None = None) -> None:
        check_policy(residuals)
        self.state: Any = None
        self._residuals = residuals
        self._restored: list[dict[str, Any]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the last fit. Lightning restores checkpoints after this and before it wraps the model."""
        if stage == "fit":
            self.state = self._restored = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the states of all ranks into rank 0's checkpoint. Lightning calls it on all ranks."""
        if self.state is None:
            checkpoint[self._key] = []  # as the learning rate finder does it, before our turn
        elif trainer.interrupted:
            # Other ranks may have failed, or have not: to wait for them could cost this checkpoint.
            rank_zero_warn("gradlab: saved after an exception, this checkpoint is without the ranks' states")
        else:
            checkpoint[self._key] = _gather(self.state.state_dict(), trainer.strategy.root_device)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the states out of a checkpoint that fit continues from."""
        if trainer.state.fn != "fit":
            return
        self._restored = checkpoint.get(self._key)
        if self._restored is None:
            rank_zero_warn(f"gradlab: {self._without}")
        elif self.state is not None:  # within fit, as the learning rate finder may do it
            self._go_on(trainer)

    def _go_on(self, trainer: Trainer) -> bool:
        """Continue with this rank's state of a checkpoint, if there is one."""
        everyone, self._restored = self._restored, None
        if not everyone:
            return False
        go_on(self.state, self._residuals, lambda rank: everyone[rank % len(everyone)])  # there may be fewer
        return True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop exchanging. The other ranks learn of the exception."""
        if self.state is not None:
            self.state.__exit__(type(exception), exception, None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop exchanging."""
        if self.state is not None:
            self.state.close()


class CompressionCallback(_RankStates):
    """Compress the gradients of `trainer.fit`.

        Trainer(strategy="ddp", callbacks=[CompressionCallback("plan.safetensors")])

    One checkpoint holds all ranks' states, and `trainer.fit(ckpt_path=...)` continues with them. A checkpoint without
    them (of a run without the callback, or saved while an exception was on its way) starts them anew, with a warning.

    Args:
        plan: plan of the LightningModule's trainable parameters, or the path of an artifact.
        log: send `state.scalars()` to the trainer's loggers every `log_every_n_steps` steps.
        residuals: use of the residuals in a checkpoint of another world size: "split", "sum" or "drop", see
            `CompressionState.load_state_dicts`. None refuses such a checkpoint.
        options: those of CompressionState. Optimizer and loss scaler are the trainer's.

    Attributes:
        state: the CompressionState of the current or the last fit, None before the first. Closed when fit ends; its
            report and statistics can still be read.

    Raises:
        GradlabError: when fit starts, if the strategy does not train one DistributedDataParallel model, or has a
            communication hook already. See also CompressionState.
    """

    def __init__(
        self, plan: Plan | str | os.PathLike[str], *, log: bool = False, residuals: str | None = None, **options: Any
    ) -> None:
        super().__init__(residuals)
        self._plan, self._log, self._options = plan, log, options

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook on the model that the strategy has just wrapped."""
        model = ddp_of_lightning(trainer, "CompressionCallback")
        options = {"optimizer": trainer.optimizers, **self._options}
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            options["scaler"] = scaler
        self.state = attach(model, self._plan, **options)
        self._go_on(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the state's numbers, if `log` is set."""
        interval: int = getattr(trainer, "log_every_n_steps", 0)  # 0 too where nothing is to be logged
        if self._log and self.state is not None and interval and trainer.global_step % interval == 0:
            for logger in trainer.loggers:
                logger.log_metrics(self.state.scalars(), step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan's digest: Lightning warns if a checkpoint is resumed without a callback that saved one."""
        return {} if self.state is None else {"plan": self.state.plan.digest}


class LocalStepsCallback(_RankStates):
    """Take local steps in `trainer.fit`, and exchange through a plan how far every worker came (`OuterStep`).

        Trainer(strategy="ddp", callbacks=[LocalStepsCallback("plan.safetensors", every=30)])

    DDP then no longer averages gradients between workers. One checkpoint holds all ranks' models, optimizers and outer
    steps beside rank 0's own, and `trainer.fit(ckpt_path=...)` continues with them, on as many ranks.

    Args:
        plan: plan of the LightningModule's trainable parameters, or the path of an artifact.
        within: ranks of one worker: "node" for the machine, a process group, or None, each rank.
        options: those of `OuterStep`: outer_optimizer, every, fragments, delay, mixing and others.

    Attributes:
        state: steps of the current or the last fit; None before the first.

    Raises:
        GradlabError: when fit starts, as CompressionCallback does. See also OuterStep.
    """

    _key = "gradlab local steps"
    _without = "the checkpoint holds no local steps: every worker begins with rank 0's model"

    def __init__(self, plan: Plan | str, *, within: object = None, **options: Any) -> None:
        super().__init__()
        self._plan, self._options = plan, {"within": within, **options}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook on the model that the strategy has just wrapped."""
        model = ddp_of_lightning(trainer, "LocalStepsCallback")
        self.state = LocalSteps(model, trainer.optimizers, self._plan, **self._options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take back what a checkpoint holds of this rank: Lightning has restored rank 0's on all of them."""
        if self._go_on(trainer):
            self.state.begins_after(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch's optimizer step, if it took one."""
        if self.state is not None:
            self.state.after(trainer.global_step)


def _gather(state: dict[str, Any], device: torch.device) -> list[dict[str, Any]] | None:
    """All ranks' state dicts in rank order, on rank 0; None on the others. A collective of the whole world.

    As bytes: ranks need not know the keys and shapes of one another.
    """
    file = io.BytesIO()
    torch.save(state, file)
    own = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    ranks = Ranks(group_or_world(None, "CompressionCallback"), device)
    wire = device if "nccl" in dist.get_backend() else torch.device("cpu")
    sizes = ranks.gather(own.numel())
    if ranks.rank != 0:
        dist.send(own.to(wire), dst=0)
        return None
    return [state] + [_receive(source, sizes[source], wire) for source in range(1, ranks.size)]


def _receive(source: int, size: int, wire: torch.device) -> dict[str, Any]:
    packed = torch.empty(size, dtype=torch.uint8, device=wire)
    dist.recv(packed, src=source)
    received: dict[str, Any] = load_saved(io.BytesIO(packed.cpu().numpy().tobytes()), size)
    return received
