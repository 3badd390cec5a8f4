"""What `gradlab.runtime.accelerate.compress` refuses, on two ranks that share a folder; see framework_jobs.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
from torch import nn

from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime.accelerate import compress
from gradlab.runtime.checkpoint import sealed
from jobs.report_tasks_frameworks import prepared_again, two_optimizers_of_accelerate

PLAN = Plan.uniform(nn.Linear(32, 16), "topk", density=0.1)


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(GradlabError) as caught:
        call(*arguments)
    return str(caught.value)


def prepared(accelerator: Accelerator) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(32, 16)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def around(plan: Plan | Path, accelerator: Accelerator) -> tuple[Any, ...]:
    """The arguments of `compress` after the accelerator."""
    model, optimizer = prepared(accelerator)
    return model, plan, optimizer


def step(accelerator: Accelerator, model: nn.Module) -> None:
    accelerator.backward(model(torch.ones(4, 32)).square().mean())


def not_prepared() -> str:
    return refusal(compress, Accelerator(cpu=True), nn.Linear(32, 16), PLAN)


def hook_of_accelerate() -> str:
    # PyTorch's fp16 hook, which Accelerate registers itself
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]
    )
    return refusal(compress, accelerator, *around(PLAN, accelerator))


def no_artifact(folder: Path) -> str:
    accelerator = Accelerator(cpu=True)
    return refusal(compress, accelerator, *around(folder / "absent.safetensors", accelerator))


def checkpoints(folder: Path) -> dict[str, str | int]:
    """Checkpoints of which rank 1's part is unusable: both ranks hear of it."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    with compress(accelerator, model, PLAN, optimizer) as state:
        for name in ("before", "damaged", "missing", "mixed"):
            accelerator.save_state(str(folder / name))
            step(accelerator, model)
        file = f"gradlab_0_rank_{accelerator.process_index}.pt"
        if accelerator.process_index == 1:
            (folder / "damaged" / file).write_bytes((folder / "before" / file).read_bytes()[:100])
            (folder / "missing" / file).unlink()
            (folder / "mixed" / file).write_bytes((folder / "before" / file).read_bytes())
        accelerator.wait_for_everyone()
        refusals = {
            name: refusal(accelerator.load_state, str(folder / name)) for name in ("damaged", "missing", "mixed")
        }
        accelerator.load_state(str(folder / "before"))
        return refusals | {"iteration": state.iteration}


def another_world_size(folder: Path) -> dict[str, str | int]:
    """A checkpoint as if one rank had saved it: refused, and loaded where a policy for the residuals is given."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    with compress(accelerator, model, PLAN, optimizer) as state:
        for _ in range(3):
            step(accelerator, model)
        accelerator.save_state(str(folder / "one"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            torch.save(sealed({**state.state_dict(), "world_size": 1}), folder / "one" / "gradlab_0_rank_0.pt")
        accelerator.wait_for_everyone()
        refused = refusal(accelerator.load_state, str(folder / "one"))
    accelerator = Accelerator(cpu=True)
    with compress(accelerator, *around(PLAN, accelerator), residuals="split") as state:
        accelerator.load_state(str(folder / "one"))
        return {"another_world_size": refused, "another_world_size_split": state.iteration}


def unknown_policy() -> str:
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator)
    with pytest.raises(GradlabError) as caught:
        compress(accelerator, model, PLAN, optimizer, residuals="keep")
    return str(caught.value)


def on_two_ranks(folder: Path) -> dict[str, Any]:
    return {
        "not_prepared": not_prepared(),
        "hook_of_accelerate": hook_of_accelerate(),
        "no_artifact": no_artifact(folder),
        **checkpoints(folder),
        **another_world_size(folder),
        "unknown_policy": unknown_policy(),
        "prepared_again": prepared_again(dist.group.WORLD, str(folder / "again")),
        "two_optimizers": two_optimizers_of_accelerate(dist.group.WORLD),
    }
