"""Start one of the jobs under torchrun."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.warm_python import python

HERE = Path(__file__).parents[1]


@contextlib.contextmanager
def torchrun(
    script: str, ranks: int, *arguments: object, executable: str = "", where: Sequence[str] = ("--standalone",)
) -> Iterator[subprocess.Popen[str]]:
    """A running job; whatever happens, it has ended afterwards. where: which of several nodes this is."""
    command = [executable or python(), "-m", "torch.distributed.run", *where, f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [*command, str(HERE / "jobs" / script), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its ranks
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def run_on_nodes(script: str, nodes: int, ranks: int, *arguments: object) -> None:
    """Run a job on several nodes of so many ranks each: a torchrun for every node, all on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(torchrun(script, ranks, *arguments, where=_node(node, nodes, port)))
            for node in range(nodes)
        ]
        for job in jobs:
            output, _ = job.communicate(timeout=120)
            assert job.returncode == 0, output[-4000:]


def _node(node: int, nodes: int, port: int) -> list[str]:
    return [f"--nnodes={nodes}", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
