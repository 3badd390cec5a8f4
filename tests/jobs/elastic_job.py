"""A worker of its own that trains with others by OuterStep and torchft's manager: `elastic_job.py NAME FOLDER JSON`.

It prints a line of JSON per outer step, and at the end one with what all workers have to have alike.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from gradlab.codec import hash_tensor
from gradlab.errors import GradlabError
from gradlab.runtime import OuterStep
from gradlab.runtime.outer import membership
from jobs.outer_tasks import adamw, inner_step, network, plan_of


def manager_at(lighthouse: str, name: str, store: dist.TCPStore, given: Mapping[str, Any]) -> Any:
    from torchft import Manager, ProcessGroupGloo

    seconds = timedelta(seconds=given.get("timeout", 10))
    return Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=given.get("least", 1),
        use_async_quorum=False,
        timeout=seconds,
        quorum_timeout=timedelta(seconds=given.get("quorum_timeout", 60)),
        connect_timeout=timedelta(seconds=given.get("connect_timeout", 10)),
        rank=dist.get_rank() if dist.is_initialized() else 0,
        world_size=given.get("ranks", 1),
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        quorum_retries=given.get("quorum_retries", 10),
    )


def hashes_of(outer: OuterStep) -> dict[str, str]:
    """Return hashes of what all workers have alike: common parameters, the outer optimizer, tables and warm factors."""
    rounds = outer._rounds
    assert rounds is not None
    found: dict[str, str] = {}
    for number, (fragment, kept) in enumerate(zip(outer.fragments, rounds._for_others()["parts"], strict=True)):
        found |= {f"{number} {name}": hash_tensor(one) for name, one in fragment.parameters.items()}
        moments = [state["momentum_buffer"] for state in fragment.optimizers[0].state.values()]
        found |= {f"{number} momentum {at}": hash_tensor(one) for at, one in enumerate(moments)}
        for group, state in (kept["exchange"] or {"states": {}})["states"].items():
            shared = {key: one for key, one in state.items() if not key.endswith("/step")}  # ecsq's guess at its own
            found |= {f"{number} {group} {key}": hash_tensor(one.contiguous()) for key, one in shared.items()}
    return found


def digest_of(hashes: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:12]


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def last_of(given: Mapping[str, Any]) -> int:
    """Return the number of the last outer step, or of one that is not near: a file tells it in time."""
    told = Path(given.get("until", ""))
    return given.get("steps") or (int(told.read_text(encoding="utf-8") or 10**9) if told.is_file() else 10**9)


def told_of(message: Warning | str, *_: Any, **__: Any) -> None:
    if str(message).startswith(("OuterStep", "gradlab")):
        tell(warned=str(message))


def train(name: str, manager: Any, given: Mapping[str, Any]) -> None:
    """Train to the last step, or to `stop`, where all is saved; from what was saved at `resume`."""
    model: nn.Module = network()
    if inside := given.get("inside"):
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,))) if inside == "fsdp2" else DDP(model)
    synchronous = given.get("synchronous", False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if synchronous else adamw(model)
    plan = plan_of(given.get("codec", "several"), given.get("settings", {}))
    numbers = {"every": given.get("every", 4), "fragments": given.get("fragments", 1)}
    momentum = given.get("momentum", 0.9)
    make = partial(torch.optim.SGD, lr=0.7, momentum=momentum, nesterov=True)
    if synchronous:
        make = partial(torch.optim.SGD, lr=1.0)
    outer = OuterStep(plan, model, make, manager=manager, **numbers)
    if "resume" in given:
        saved = torch.load(f"{given['resume']}/{name}.pt", weights_only=True)
        for one, state in zip((model, optimizer, outer), saved, strict=True):
            one.load_state_dict(state)
    tell(joined=outer.outer_steps)
    while outer.outer_steps < (given.get("stop") or last_of(given)):
        inner_step(model, optimizer, int(name.rpartition("_")[2]), outer.local_steps)
        time.sleep(given.get("seconds", 0.0))
        if outer.step():
            tell(step=outer.outer_steps, workers=outer.workers.count, common=digest_of(hashes_of(outer)))
    if "stop" in given:
        torch.save([one.state_dict() for one in (model, optimizer, outer)], f"{given['folder']}/{name}.pt")
    with torch.no_grad():
        inputs = torch.randn(512, 20, generator=torch.Generator().manual_seed(1))
        loss = float((model(inputs) - inputs[:, :5].sin()).square().mean())
    weights = {} if inside else {"weights": model.get_parameter("6.weight").flatten().tolist()}
    tell(end=hashes_of(outer), loss=loss, **weights)
    outer.close()


def main(name: str, lighthouse: str, given: dict[str, Any]) -> None:
    """Be a worker, or its first rank, which starts the others. They tell nothing."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    others = [
        multiprocessing.get_context("fork").Process(target=be, args=(rank, store.port, name, lighthouse, given))
        for rank in range(1, given.get("ranks", 1))
    ]
    for one in others:
        one.start()
    be(0, store.port, name, lighthouse, given, store)
    for one in others:
        one.join()


def be(rank: int, port: int, name: str, lighthouse: str, given: dict[str, Any], store: Any = None) -> None:
    """Be one rank of a worker."""
    if rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    tell(pid=os.getpid())
    store = store or dist.TCPStore("localhost", port, is_master=False)
    if (ranks := given.get("ranks", 1)) > 1:
        dist.init_process_group("gloo", store=dist.PrefixStore("inside", store), rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    warnings.showwarning = told_of
    membership.VERSION = given.get("version", membership.VERSION)  # type: ignore[misc]
    manager = manager_at(lighthouse, name, store, given)
    try:
        train(name, manager, given)
    except GradlabError as error:
        tell(error=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    manager.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
