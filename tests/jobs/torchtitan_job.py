"""torchtitan's trainer on four ranks, with gradlab's lines of docs/examples/torchtitan_example.py and without.

torchrun ... torchtitan_job.py FOLDER first|resumed: "first" trains every run, "resumed" those that save from the
checkpoint in their middle on, in new processes. Each writes losses, and what the parameters are, by rank.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradlab.capture import TraceRecorder
from gradlab.layout import layers_of
from gradlab.plan import Plan

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "torchtitan_example.py"
STEPS, SAVED = 6, 3


def example() -> Any:
    """The file that users copy."""
    spec = importlib.util.spec_from_file_location("torchtitan_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(titan: Any, folder: Path, around: Any, workers: int = 1, load: int = -1) -> dict[str, Any]:
    """One run: the loss of each step, a digest of this rank's parameters, and what gradlab reports."""
    config = titan.configuration(str(folder), STEPS)
    small = config.model_spec.model
    del small.layers[1:]
    small.vocab_size = small.tok_embeddings.num_embeddings = small.lm_head.out_features = 256
    parallelize = partial(titan.parallelize, workers=workers)
    config.model_spec = replace(config.model_spec, parallelize_fn=parallelize)
    config.checkpoint = replace(config.checkpoint, interval=SAVED, load_step=load)
    trainer = config.build()
    losses, log = [], trainer.metrics_processor.log

    def noted(step: int, loss: float, *rest: Any, **others: Any) -> None:
        losses.append(loss)
        log(step, loss, *rest, **others)

    trainer.metrics_processor.log = noted
    attached: AbstractContextManager[Any] = around(trainer)
    with attached as state:
        trainer.train()
        report = state.report() if hasattr(state, "plan") else {}
    trainer.close()
    digest = hashlib.sha256()
    for parameter in trainer.model_parts[0].parameters():
        digest.update(parameter.detach().to_local().numpy().tobytes())
    return {"losses": losses, "parameters": digest.hexdigest(), "report": report}


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    titan = example()
    saving: dict[str, dict[str, Any]] = {
        "compressed": {"around": partial(titan.compressed, plan=None)},
        "local steps": {"around": partial(titan.local_steps, plan=None, every=2), "workers": 2},
    }
    if what == "resumed":
        results = {name: trained(titan, folder / name, load=SAVED, **how) for name, how in saving.items()}
    else:
        results = {name: trained(titan, folder / name, **how) for name, how in saving.items()}
        results["alone"] = trained(titan, folder / "alone", lambda trainer: nullcontext())
        results["identity"] = trained(titan, folder / "identity", partial(identity, titan))
        results["recorded"] = trained(titan, folder / "recorded", partial(recorded, folder / "trace"))
    (folder / f"{what}-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    time.sleep(0.1)
    os._exit(0)


def identity(titan: Any, trainer: Any) -> Any:
    """The hooks alone: nothing is compressed."""
    (model,) = trainer.model_parts
    plan = Plan(layers_of(model))
    return titan.compress_fsdp(model, plan, optimizer=list(trainer.optimizers))


def recorded(path: Path, trainer: Any) -> TraceRecorder:
    return TraceRecorder(trainer.model_parts[0], path, optimizer=list(trainer.optimizers))


if __name__ == "__main__":
    main()
