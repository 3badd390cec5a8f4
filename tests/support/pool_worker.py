"""One rank of the pool: reads tasks until the test session closes the socket."""

from __future__ import annotations

import importlib
import json
import socket
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from support import pool_groups


def serve(port: int) -> None:
    torch.set_num_threads(1)
    # Short enough that a hang shows as this test's failure, not as a suite that never ends.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world_size)} | {world_size: dist.group.WORLD}
    # Some tasks need a second group of the same ranks; ranks that sat out earlier tasks could not make one later.
    pool_groups.SPARE.update({n: dist.new_group(list(range(n))) for n in range(1, world_size)})
    with socket.create_connection(("127.0.0.1", port)) as connection:
        stream = connection.makefile("rw", encoding="utf-8")
        print(rank, file=stream, flush=True)
        for line in stream:
            print(json.dumps(_answer(json.loads(line), groups)), file=stream, flush=True)
    dist.destroy_process_group()


def _answer(task: dict[str, Any], groups: dict[int, Any]) -> dict[str, Any]:
    module, _, function = task["function"].partition(":")
    try:
        call = getattr(importlib.import_module(module), function)
        return {"result": call(groups[task["ranks"]], **task["arguments"])}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    serve(int(sys.argv[1]))
