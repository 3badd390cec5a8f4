"""One process of a job: runs its checks in order, and writes a line of JSON before and after each."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from outcome import FAILED, NOT_RUN, Check, Outcome, Place

# Short enough that ranks which wait for one another are told so within the time there is.
TIMEOUT = timedelta(seconds=60)


def main(task: dict[str, Any]) -> None:
    """Run a task as `launch` describes it. Ends at once, with exit code 1, after a check that raised."""
    place, store = enter(task)
    checks: dict[str, Check] = importlib.import_module(task["module"]).CHECKS
    with open(place.folder / f"{place.rank}.jsonl", "w", encoding="utf-8") as rows:
        for name in task["checks"]:
            if not goes_on(store, place.rank, name, task["deadline"]):
                break
            print(json.dumps({"check": name}), file=rows, flush=True)
            outcome, raised = attempt(checks[name], place)
            row = {"check": name, "outcome": asdict(outcome), "time": time.time()}
            print(json.dumps(row), file=rows, flush=True)
            if raised:
                os._exit(1)  # whatever else is left of the engine or the GPU would only wait
    if store is not None:
        dist.destroy_process_group()


def enter(task: dict[str, Any]) -> tuple[Place, dist.Store | None]:
    """Take this process's place: its device, arithmetic that another device can repeat, and its process groups."""
    warnings.filterwarnings("ignore", message="gradlab: world size 1")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    device, folder, rank = torch.device(task["devices"][task["rank"]]), Path(task["folder"]), task["rank"]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = Place(rank, len(task["devices"]), device, folder, task["numel"])
    if not task["backend"]:
        return place, None
    store = dist.FileStore(str(folder / "store"), place.world_size)
    dist.init_process_group(
        task["backend"],
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=place.world_size,
        timeout=TIMEOUT,
        device_id=device if task["backend"] == "nccl" else None,
    )
    spare = dist.new_group(list(range(place.world_size)), timeout=TIMEOUT)
    place = Place(rank, place.world_size, device, folder, task["numel"], dist.group.WORLD, spare)
    return place, dist.PrefixStore("checks", store)


def goes_on(store: dist.Store | None, rank: int, name: str, deadline: float) -> bool:
    """Whether there is time for one more check: rank 0's clock says so for all."""
    if store is None:
        return time.time() < deadline
    if rank == 0:
        store.set(name, "yes" if time.time() < deadline else "no")
    return bool(store.get(name) == b"yes")


def attempt(check: Check, place: Place) -> tuple[Outcome, bool]:
    """What a check finds, and whether it raised. A package that is not there is nobody's fault."""
    try:
        outcome = check(place)
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)  # an error of this check must not become the next one's
        return outcome, False
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("", "gradlab"):
            return Outcome(NOT_RUN, f"needs {package}"), False
        return Outcome(FAILED, str(error)), True
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        return Outcome(FAILED, f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]), True


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
