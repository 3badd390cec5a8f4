"""Hugging Face Trainer: a callback that trains compressed, on the CPU as on CUDA.

The Trainer lets Accelerate wrap the model when training begins, and hands callbacks the bare model; the wrapped one is
`trainer.model_wrapped`, so the callback is given the Trainer.

The Trainer saves model and optimizer once, but every rank has residuals of its own: after each save every rank writes
a file into the folder checkpoint-N. Callbacks are not told which folder `resume_from_checkpoint` named. A number drawn
by the run that saved stands in the Trainer's own state, which is restored, and in the files; so they are found, and a
file of another run is never taken for them.
"""

from __future__ import annotations

import os
import secrets
import warnings
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.model import ddp_of_trainer, wrap_again
from gradlab.errors import GradlabError
from gradlab.lazy import needing
from gradlab.plan import Plan
from gradlab.runtime.attach import attach
from gradlab.runtime.outer.in_ddp import LocalSteps
from gradlab.runtime.saved import RankFiles, check_policy

with needing(__name__, "transformers"):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

# Where the Trainer's state keeps which run saved it. Not a callback's name: the Trainer then leaves it alone.
_ENTRY = "gradlab"
_MISSING = (
    "if the checkpoint lies elsewhere, give CompressionCallback(resume_from_checkpoint=) its folder; if the run ended "
    "while it saved, resume from an earlier one (resume_from_checkpoint=False starts the compression states anew)"
)


class _RankStates(TrainerCallback):
    """A callback whose state on every rank becomes a file of each checkpoint, named after `_stem`."""

    _stem = "gradlab"

    def __init__(self, trainer: Trainer, resume: str | os.PathLike[str] | bool | None = None) -> None:
        self.state: Any = None
        self._trainer, self._resume = trainer, resume
        self._files: RankFiles | None = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop exchanging."""
        self._close()
        wrap_again(self._trainer)

    def _begin(self, state: Any, model: DistributedDataParallel, residuals: str | None = None) -> RankFiles:
        """Begin with a state of the model that the Trainer has just wrapped."""
        self.state, self._files = state, RankFiles(state, model, residuals)
        return self._files

    def _place(self, args: TrainingArguments, state: TrainerState) -> Path:
        """The folder that the user names; else the first that has files."""
        if isinstance(self._resume, (str, os.PathLike)):
            return Path(self._resume)
        named = args.resume_from_checkpoint  # scripts hand it to `train` themselves
        places = [*([Path(named)] if isinstance(named, (str, os.PathLike)) else []), _folder(args, state)]
        return next((place for place in places if any(place.glob(f"{self._stem}_rank_*"))), places[-1])

    def _close(self) -> None:
        if self.state is not None:
            self.state.close()
        self._files = None


class CompressionCallback(_RankStates):
    """Compress the gradients of `trainer.train`.

        trainer = Trainer(model, args, train_dataset=dataset)
        trainer.add_callback(CompressionCallback("plan.safetensors", trainer=trainer))
        trainer.train()

    Start it with torchrun or accelerate launch. Each checkpoint-N then holds a file per rank, and
    `trainer.train(resume_from_checkpoint=...)` continues with them, exactly. A checkpoint of a run without the callback
    starts the states anew, with a warning. (A checkpoint without optimizer, of `save_only_model`, gets no files. Nor do
    those of a hyperparameter search, and what is pushed to the Hub while saving is without them.)

    Args:
        plan: plan of the model's trainable parameters, or the path of an artifact.
        trainer: the Trainer that the callback is added to.
        log: send `state.scalars()` to the Trainer's log whenever it logs the loss.
        residuals: use of the residuals in a checkpoint of another world size: "split", "sum" or "drop", see
            `CompressionState.load_state_dicts`. Every rank then reads the files of all. None refuses such a
            checkpoint.
        resume_from_checkpoint: the folder that `trainer.train` is given, if it is not in the Trainer's `output_dir`
            or was renamed. False starts the states anew. None looks in `output_dir`.
        options: those of CompressionState. Optimizer and loss scaler are the Trainer's.

    Attributes:
        state: the CompressionState of the current or the last training, None before the first. Closed when training
            ends; its report and statistics can still be read.

    Raises:
        GradlabError: when training begins, if the model is not in DistributedDataParallel (one process, DataParallel,
            FSDP and DeepSpeed are named, with what to do instead), or if the files of a checkpoint are missing or of
            another run. See also CompressionState.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        *,
        trainer: Trainer,
        log: bool = False,
        residuals: str | None = None,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(trainer, resume_from_checkpoint)
        check_policy(residuals)
        self._plan, self._log, self._options = plan, log, options
        self._residuals, self._logging = residuals, False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register the hook on the model that the Trainer has just wrapped, and take back what a checkpoint holds."""
        self._close()
        model = ddp_of_trainer(self._trainer, "CompressionCallback")
        given = {"optimizer": kwargs.get("optimizer"), "scaler": self._trainer.accelerator.scaler}
        files = self._begin(attach(model, self._plan, **{**given, **self._options}), model, self._residuals)
        if state.global_step > 0:
            self._restore(files, args, state)
        elif isinstance(self._resume, (str, os.PathLike)) and files.rank == 0:
            warnings.warn(
                f"gradlab: CompressionCallback(resume_from_checkpoint={os.fspath(self._resume)!r}), but the Trainer "
                "begins anew, and so do the compression states; give trainer.train(resume_from_checkpoint=...) it too",
                stacklevel=2,
            )
        saved = not args.save_only_model and not state.is_hyper_param_search
        _entries(state)[_ENTRY] = {"run": files.agree(secrets.token_hex(8)), "saved": saved}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write this rank's file into the checkpoint that the Trainer has just written."""
        entry = _entries(state).get(_ENTRY, {})
        if self._files is not None and entry.get("saved"):
            self._files.save(_folder(args, state), self._stem, _marks(entry, state))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the state's numbers after the loss, if `log` is set."""
        if self._log and self.state is not None and not self._logging and "loss" in (kwargs.get("logs") or {}):
            self._logging = True  # the Trainer calls this again for these numbers
            try:
                self._trainer.log(self.state.scalars())
            finally:
                self._logging = False

    def _restore(self, files: RankFiles, args: TrainingArguments, state: TrainerState) -> None:
        if self._resume is False:
            return
        entry = _entries(state).get(_ENTRY)
        if not isinstance(entry, dict) or not entry.get("saved"):
            if files.rank == 0:
                warnings.warn("gradlab: the checkpoint holds no compression states, they start anew", stacklevel=2)
            return
        files.load(self._place(args, state), self._stem, _MISSING, _marks(entry, state))


class LocalStepsCallback(_RankStates):
    """Take local steps in `trainer.train`, and exchange through a plan how far every worker came (`OuterStep`).

        trainer.add_callback(LocalStepsCallback("plan.safetensors", trainer=trainer, every=30))

    DDP then no longer averages gradients between workers. Each checkpoint-N holds a file per rank with its model, its
    optimizer and its outer steps, and `trainer.train(resume_from_checkpoint=...)` continues with them, on as many
    ranks. The Trainer's own files are rank 0's.

    Args:
        plan: plan of the model's trainable parameters, or the path of an artifact.
        trainer: the Trainer that the callback is added to.
        within: ranks of one worker: "node" for the machine, a process group, or None, each rank.
        options: those of `OuterStep`: outer_optimizer, every, fragments, delay, mixing and others.

    Attributes:
        state: steps of the current or the last training; None before the first.

    Raises:
        GradlabError: when training begins, as CompressionCallback does. See also OuterStep.
    """

    _stem = "gradlab_local_steps"

    def __init__(self, plan: Plan | str, *, trainer: Trainer, within: object = None, **options: Any) -> None:
        super().__init__(trainer)
        self._plan, self._options = plan, {"within": within, **options}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register the hook on the model that the Trainer has just wrapped, and take back what a checkpoint holds."""
        self._close()
        model = ddp_of_trainer(self._trainer, "LocalStepsCallback")
        files = self._begin(LocalSteps(model, kwargs.get("optimizer"), self._plan, **self._options), model)
        if state.global_step > 0:
            missing = "local steps continue from a file of every rank in the checkpoint's folder"
            files.load(self._place(args, state), self._stem, missing, _step_mark(state))
            self.state.begins_after(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the optimizer's step."""
        if self.state is not None:
            self.state.after(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write this rank's file into the checkpoint that the Trainer has just written."""
        if self._files is not None and not args.save_only_model:
            self._files.save(_folder(args, state), self._stem, _step_mark(state))


def _step_mark(state: TrainerState) -> dict[str, Any]:
    return {"global_step": state.global_step}


def _entries(state: TrainerState) -> dict[str, Any]:
    entries: Any = state.stateful_callbacks  # declared as a list; the Trainer makes it a dict at once
    states: dict[str, Any] = entries
    return states


def _marks(entry: dict[str, Any], state: TrainerState) -> dict[str, Any]:
    return {"run": str(entry.get("run")), "global_step": state.global_step}


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    if args.output_dir is None:
        raise GradlabError("CompressionCallback: TrainingArguments has no output_dir")
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
