"""Start one of the jobs under torchrun."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.warm_python import python

HERE = Path(__file__).parents[1]


@contextlib.contextmanager
def torchrun(script: str, ranks: int, *arguments: object, executable: str = "") -> Iterator[subprocess.Popen[str]]:
    """A running job; whatever happens, it has ended afterwards."""
    command = [executable or python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
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
