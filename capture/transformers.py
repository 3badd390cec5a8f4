"""Hugging Face Trainer: a callback that records the gradients of a training run."""

from __future__ import annotations

import os
from typing import Any

from gradlab.capture.recorder import TraceRecorder
from gradlab.capture.start import attached_by
from gradlab.ddp.model import ddp_of_trainer, wrap_again
from gradlab.lazy import needing

with needing(__name__, "transformers"):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RecordingCallback(TrainerCallback):
    """Record the gradients of `trainer.train`.

        trainer = Trainer(model, args, train_dataset=dataset)
        trainer.add_callback(RecordingCallback("trace", trainer=trainer))
        trainer.train()

    Start it with torchrun or accelerate launch. The trace holds the loss of the steps in which the Trainer logs it
    (`logging_steps=1`: of all): the mean over ranks, and over the steps since it was last logged.

    Args:
        path: folder of the trace, new or empty.
        trainer: the Trainer that the callback is added to.
        options: those of TraceRecorder. Optimizer and loss scaler are the Trainer's.

    Attributes:
        recorder: the TraceRecorder of the current or the last training, None before the first. Closed when training
            ends.

    Raises:
        GradlabError: when training begins, if the model is not in DistributedDataParallel (one process, DataParallel,
            FSDP and DeepSpeed are named, with what to do instead). See also TraceRecorder.
    """

    def __init__(self, path: str | os.PathLike[str], *, trainer: Trainer, **options: Any) -> None:
        self.recorder: TraceRecorder | None = None
        self._path, self._trainer, self._options = path, trainer, options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the recorder to the model that the Trainer has just wrapped."""
        model, scaler = ddp_of_trainer(self._trainer, "RecordingCallback"), self._trainer.accelerator.scaler
        left = max(1, int(state.max_steps) - state.global_step)  # a budget spreads the recorded steps over them
        given = {"optimizer": kwargs.get("optimizer"), "scaler": scaler, "expected_steps": left}
        options = {**given, **attached_by("transformers", self._options)}
        self.recorder = TraceRecorder(model, self._path, **options)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the loss with the step that came last."""
        logs = kwargs.get("logs") or {}
        if self.recorder is not None and "loss" in logs:
            self.recorder.annotate(loss=logs["loss"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write what is left, and close the trace."""
        if self.recorder is not None:
            self.recorder.close()
        wrap_again(self._trainer)
