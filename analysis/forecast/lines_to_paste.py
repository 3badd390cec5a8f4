"""Lines to paste into a training script, which train as `gradlab recommend` says, and where they go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_IMPORT = "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n"
_FP16 = f"{_IMPORT}ddp_model.register_comm_hook(None, fp16_compress_hook)"
_DDP = "import gradlab\nstate = gradlab.compress(ddp_model, {path}, optimizer=optimizer{scaler})"
_NODES = f"{_DDP}  # averages inside each node first; torchrun tells which ranks share one"
_FSDP = (
    "from gradlab.runtime import compress_fsdp\n"
    '# mesh = init_device_mesh("cuda", ({nodes}, {ranks}), mesh_dim_names=("replicate", "shard")), '
    'and every fully_shard has mesh=mesh["shard"]\n'
    'state = compress_fsdp(model, {path}, between=mesh["replicate"], optimizer=optimizer)'
)

_LOCAL = (
    "from gradlab.runtime import OuterStep\n"
    "outer = OuterStep({path}, model, every={every})  # the bare model, not in DDP\n"
    "outer.step()  # after every optimizer.step()"
)


class _Framework(NamedTuple):
    """Lines for one framework: with a plan, with PyTorch's 16 bits; where they go, and how training resumes."""

    compress: str
    half: str
    after: str
    resume: str


# A callback each: the Trainer makes its DDP model when training begins, and Lightning ignores hooks on processors.
_HALF_IN_CALLBACK = _IMPORT + (
    "from {module} import {base}\n"
    "class HalfPrecisionGradients({base}):\n"
    "    def {method}:\n"
    "        {model}.register_comm_hook(None, fp16_compress_hook)\n"
    "{add}(HalfPrecisionGradients())"
)
_RECORDED_BY_CALLBACK = "trainer is made, in place of the RecordingCallback"
# By what attached the recorder.
_FRAMEWORKS: Mapping[str, _Framework] = {
    "transformers": _Framework(
        "from gradlab.runtime.transformers import CompressionCallback\n"
        "trainer.add_callback(CompressionCallback({path}, trainer=trainer))",
        _HALF_IN_CALLBACK.format(
            module="transformers",
            base="TrainerCallback",
            method="on_train_begin(self, args, state, control, **kwargs)",
            model="trainer.model_wrapped",
            add="trainer.add_callback",
        ),
        _RECORDED_BY_CALLBACK,
        "trainer.train(resume_from_checkpoint=True)",
    ),
    "lightning": _Framework(
        "from gradlab.runtime.lightning import CompressionCallback\n"
        "trainer.callbacks.append(CompressionCallback({path}))",
        _HALF_IN_CALLBACK.format(
            module="lightning.pytorch",
            base="Callback",
            method="on_fit_start(self, trainer, pl_module)",
            model="trainer.strategy.model",
            add="trainer.callbacks.append",
        ),
        _RECORDED_BY_CALLBACK,
        "trainer.fit(..., ckpt_path=...)",
    ),
    "accelerate": _Framework(
        "from gradlab.runtime.accelerate import compress\nstate = compress(accelerator, model, {path}, optimizer)",
        f"{_IMPORT}model.register_comm_hook(None, fp16_compress_hook)",
        "accelerator.prepare, in place of record",
        "accelerator.load_state(folder), where accelerator.save_state(folder) saved",
    ),
}
_SAVED = (
    "To resume bit for bit, every rank (not rank 0 alone) saves its residuals, and loads them:\n\n"
    'torch.save(state.state_dict(), f"gradlab-{torch.distributed.get_rank()}.pt")  # with each checkpoint\n'
    'state.load_state_dict(torch.load(f"gradlab-{torch.distributed.get_rank()}.pt"))  # once, when the run resumes'
)
_SAVED_BY_FRAMEWORK = "To resume bit for bit, add no line: checkpoints hold every rank's residuals. Resume by {}."
_SAVED_SHARDED = "To resume bit for bit, save state.stateful by torch.distributed.checkpoint, beside the model."


def lines_to_paste(
    artifact: Path | None, nodes: int, ranks: int, fsdp: bool, recorded: Mapping[str, Any] | None = None
) -> str:
    """Write what goes into a training script, for nodes of so many ranks; without an artifact PyTorch's 16 bits.

    recorded: metadata of the recording, which say what attached the recorder, and whether there was a loss scaler.
    """
    framework = _framework(recorded)
    if artifact is None:
        return framework.half if framework else _FP16
    lines = _FSDP if fsdp else framework.compress if framework else _NODES if ranks > 1 else _DDP
    scaler = ", scaler=scaler" if recorded and recorded.get("loss_scaler") is True else ""
    # JSON's text is one of Python too, whatever stands in the name.
    return lines.format(path=json.dumps(str(artifact)), nodes=nodes, ranks=ranks, scaler=scaler)


def local_lines(artifact: Path, every: int) -> str:
    """Write what goes into a training script that takes local steps."""
    return _LOCAL.format(path=json.dumps(str(artifact)), every=every)


def where_to_paste(fsdp: bool, recorded: Mapping[str, Any] | None = None) -> str:
    """Say where in a training script the lines go."""
    framework = None if fsdp else _framework(recorded)
    after = "model is sharded and optimizer is made" if fsdp else "ddp_model (your model in DDP) and optimizer are made"
    return f"In the training script, after {framework.after if framework else after}:"


def lines_to_resume(fsdp: bool, recorded: Mapping[str, Any] | None = None) -> str:
    """Say how residuals are saved and loaded; lines to paste where the script does it."""
    framework = None if fsdp else _framework(recorded)
    sharded = _SAVED_SHARDED if fsdp else _SAVED
    return _SAVED_BY_FRAMEWORK.format(framework.resume) if framework else sharded


def _framework(recorded: Mapping[str, Any] | None) -> _Framework | None:
    return _FRAMEWORKS.get(str((recorded or {}).get("attached_by")))
