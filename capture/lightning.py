"""Lightning: a callback that records the gradients of a training run."""

from __future__ import annotations

import os
from typing import Any

import torch

from gradlab.capture.recorder import TraceRecorder
from gradlab.capture.start import attached_by
from gradlab.ddp.model import ddp_of_lightning
from gradlab.lazy import needing

with needing(__name__, "Lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer


class RecordingCallback(Callback):
    """Record the gradients of `trainer.fit`.

        Trainer(strategy="ddp", callbacks=[RecordingCallback("trace")])

    Args:
        path: folder of the trace, new or empty.
        options: those of TraceRecorder. Optimizer and loss scaler are the trainer's.

    Attributes:
        recorder: the TraceRecorder of the current or the last fit, None before the first. Closed when fit ends.

    Raises:
        GradlabError: when fit starts, if the strategy does not train one DistributedDataParallel model, or has a
            communication hook already. See also TraceRecorder.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        self.recorder: TraceRecorder | None = None
        self._path, self._options = path, options

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the recorder to the model that the strategy has just wrapped."""
        model = ddp_of_lightning(trainer, "RecordingCallback")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options = {"optimizer": trainer.optimizers, "scaler": scaler, **attached_by("lightning", self._options)}
        self.recorder = TraceRecorder(model, self._path, **options)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep this rank's loss with the step. With gradient accumulation it is the loss of the last micro-batch."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.recorder is not None and isinstance(loss, torch.Tensor):
            self.recorder.annotate(loss=loss)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write what is left, and close the trace. Lightning calls it after an exception, too."""
        if self.recorder is not None:
            self.recorder.close()
