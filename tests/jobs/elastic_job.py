"""A worker of its own that trains with others by OuterStep and torchft's manager: `elastic_job.py NAME FOLDER JSON`.

It prints a line of JSON per outer step, and at the end one with what all workers have to have alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradlab.codec import hash_tensor
from gradlab.errors import GradlabError
from gradlab.runtime import OuterStep
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
        rank=0,
        world_size=1,
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
        for group, state in kept["exchange"]["states"].items():
            shared = {key: one for key, one in state.items() if not key.endswith("/step")}  # ecsq's guess at its own
            found |= {f"{number} {group} {key}": hash_tensor(one.contiguous()) for key, one in shared.items()}
    return found


def digest_of(hashes: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:12]


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main(name: str, lighthouse: str, given: dict[str, Any]) -> None:
    tell(pid=os.getpid())
    torch.set_num_threads(1)
    warnings.showwarning = lambda message, *_, **__: (
        tell(warned=str(message)) if "gradlab" in str(message) or "Outer" in str(message) else None
    )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = manager_at(lighthouse, name, store, given)
    model = network()
    optimizer = adamw(model)
    plan = plan_of(given.get("codec", "several"), given.get("settings", {}))
    number = int(name.rpartition("_")[2])
    try:
        outer = OuterStep(
            plan, model, every=given.get("every", 4), fragments=given.get("fragments", 1), manager=manager
        )
        tell(joined=outer.outer_steps, local_steps=outer.local_steps)
        while outer.outer_steps < given["steps"]:
            inner_step(model, optimizer, number, outer.local_steps)
            time.sleep(given.get("seconds", 0.0))
            if outer.step():
                tell(step=outer.outer_steps, workers=outer.workers.count, common=digest_of(hashes_of(outer)))
    except GradlabError as error:
        tell(error=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    with torch.no_grad():
        inputs = torch.randn(512, 20, generator=torch.Generator().manual_seed(1))
        loss = float((model(inputs) - inputs[:, :5].sin()).square().mean())
    tell(end=hashes_of(outer), loss=loss)
    outer.close()
    manager.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
