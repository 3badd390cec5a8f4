"""A persistent pool of ranks under torchrun. Tasks and results travel as lines of JSON over a local socket."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

from support.warm_python import python

_LONGEST_TASK = 150.0
WORKER = Path(__file__).with_name("pool_worker.py")


class TaskFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


class ProcessPool:
    """`run("module:function", ranks=2, ...)` calls function(group, ...) on that many ranks at once."""

    def __init__(self, world_size: int, log: Path) -> None:
        self.world_size = world_size
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[Any] = []

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(120)
            port = server.getsockname()[1]
            # torchrun looks whether ranks have ended ten times a second, in 3 % of a core, if it is not told.
            launch = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval=1"]
            launch += [f"--nproc-per-node={self.world_size}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    [python(), *launch, str(WORKER), str(port)], stdout=log, stderr=log, env=environment
                )
            by_rank = {}
            for _ in range(self.world_size):
                accepted, _ = server.accept()
                accepted.settimeout(_LONGEST_TASK)
                stream = accepted.makefile("rw", encoding="utf-8")
                accepted.close()  # the stream keeps the connection
                by_rank[int(stream.readline())] = stream
            self._connections = [by_rank[rank] for rank in range(self.world_size)]

    def run(self, function: str, ranks: int, **arguments: Any) -> list[Any]:
        """Results of one task, by rank. Raises TaskFailed with the traceback of the first rank that failed."""
        if self._process is None:
            self._start()
        task = json.dumps({"function": function, "ranks": ranks, "arguments": arguments})
        for connection in self._connections[:ranks]:
            connection.write(task + "\n")
            connection.flush()
        lines = self._lines(ranks)
        if not all(lines):
            self.stop()
            raise TaskFailed(f"{function}: a rank died or is stuck\n{self._log.read_text()[-4000:]}")
        answers = [json.loads(line) for line in lines]
        if failed := [answer["error"] for answer in answers if "error" in answer]:
            self.stop()  # ranks may be out of step after an error
            raise TaskFailed(f"{function}\n{failed[0]}")
        return [answer["result"] for answer in answers]

    def _lines(self, ranks: int) -> list[str]:
        """One line from each rank; empty for one that died or is stuck."""
        lines = []
        for connection in self._connections[:ranks]:
            try:
                lines.append(connection.readline())
            except (TimeoutError, OSError):
                lines.append("")
                break
        return lines

    def stop(self) -> None:
        """End the ranks; the next task starts new ones."""
        for connection in self._connections:
            connection.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                self._process.wait(timeout=30)
        self._connections, self._process = [], None
