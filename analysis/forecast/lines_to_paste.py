"""Lines to paste into a training script, which train as `gradlab recommend` says, and where they go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FP16 = (
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n"
    "ddp_model.register_comm_hook(None, fp16_compress_hook)"
)
_DDP = "import gradlab\nstate = gradlab.compress(ddp_model, {path}, optimizer=optimizer{scaler})"
_NODES = f"{_DDP}  # averages inside each node first; torchrun tells which ranks share one"
_FSDP = (
    "from gradlab.runtime import compress_fsdp\n"
    '# mesh = init_device_mesh("cuda", ({nodes}, {ranks}), mesh_dim_names=("replicate", "shard")), '
    'and every fully_shard has mesh=mesh["shard"]\n'
    'state = compress_fsdp(model, {path}, between=mesh["replicate"], optimizer=optimizer)'
)
# By what attached the recorder: the lines, and where in the script they go.
_FRAMEWORKS: Mapping[str, tuple[str, str]] = {
    "transformers": (
        "from gradlab.runtime.transformers import CompressionCallback\n"
        "trainer.add_callback(CompressionCallback({path}, trainer=trainer))",
        "trainer is made, in place of the RecordingCallback",
    ),
    "lightning": (
        "from gradlab.runtime.lightning import CompressionCallback\n"
        "trainer.callbacks.append(CompressionCallback({path}))",
        "trainer is made, in place of the RecordingCallback",
    ),
    "accelerate": (
        "from gradlab.runtime.accelerate import compress\nstate = compress(accelerator, model, {path}, optimizer)",
        "accelerator.prepare, in place of record",
    ),
}
_SAVED = (
    "To resume bit for bit, every rank saves what has not been sent with each checkpoint, and loads it:\n\n"
    'torch.save(state.state_dict(), f"gradlab-{torch.distributed.get_rank()}.pt")\n'
    'state.load_state_dict(torch.load(f"gradlab-{torch.distributed.get_rank()}.pt"))'
)


def lines_to_paste(
    artifact: Path | None, nodes: int, ranks: int, fsdp: bool, recorded: Mapping[str, Any] | None = None
) -> str:
    """Write what goes into a training script, for nodes of so many ranks; without an artifact PyTorch's 16 bits.

    recorded: metadata of the recording, which say what attached the recorder, and whether there was a loss scaler.
    """
    if artifact is None:
        return _FP16
    framework = _framework(recorded)
    lines = _FSDP if fsdp else framework[0] if framework else _NODES if ranks > 1 else _DDP
    scaler = ", scaler=scaler" if recorded and recorded.get("loss_scaler") is True else ""
    # JSON's text is one of Python too, whatever stands in the name.
    return lines.format(path=json.dumps(str(artifact)), nodes=nodes, ranks=ranks, scaler=scaler)


def where_to_paste(fsdp: bool, recorded: Mapping[str, Any] | None = None, half: bool = False) -> str:
    """Say where in a training script the lines go. half: they are PyTorch's 16 bits."""
    framework = None if fsdp or half else _framework(recorded)
    after = "model is sharded and optimizer is made" if fsdp else "ddp_model and optimizer are made"
    return f"In the training script, after {framework[1] if framework else after}:"


def lines_to_resume(fsdp: bool, recorded: Mapping[str, Any] | None = None) -> str:
    """Write what saves and loads residuals; empty: the framework's checkpoints have them."""
    return "" if fsdp or _framework(recorded) else _SAVED


def _framework(recorded: Mapping[str, Any] | None) -> tuple[str, str] | None:
    return _FRAMEWORKS.get(str((recorded or {}).get("attached_by")))
