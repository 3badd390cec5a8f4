"""Lines to paste into a training script, which train as `gradlab recommend` says, and where they go."""

from __future__ import annotations

import json
from pathlib import Path

_FP16 = (
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\n"
    "ddp_model.register_comm_hook(None, fp16_compress_hook)"
)
_DDP = "import gradlab\nstate = gradlab.compress(ddp_model, {path}, optimizer=optimizer)"
_NODES = f"{_DDP}  # averages inside each node first; torchrun tells which ranks share one"
_FSDP = (
    "from gradlab.runtime import compress_fsdp\n"
    '# mesh = init_device_mesh("cuda", ({nodes}, {ranks}), mesh_dim_names=("replicate", "shard")), '
    'and every fully_shard has mesh=mesh["shard"]\n'
    'state = compress_fsdp(model, {path}, between=mesh["replicate"], optimizer=optimizer)'
)


def lines_to_paste(artifact: Path | None, nodes: int, ranks: int, fsdp: bool) -> str:
    """Write what goes into a training script, for nodes of so many ranks; without an artifact PyTorch's 16 bits."""
    if artifact is None:
        return _FP16
    lines = _FSDP if fsdp else _NODES if ranks > 1 else _DDP
    # JSON's text is one of Python too, whatever stands in the name.
    return lines.format(path=json.dumps(str(artifact)), nodes=nodes, ranks=ranks)


def where_to_paste(fsdp: bool) -> str:
    """Say where in a training script the lines go."""
    after = "model is sharded and optimizer is made" if fsdp else "ddp_model and optimizer are made"
    return f"In the training script, after {after}:"
