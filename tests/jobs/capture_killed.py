"""Record until killed: torchrun starts this, tests/capture/test_capture.py kills each rank by its process id.

Every rank appends to progress-<rank>: its process id, then the number of steps that the recorder has acknowledged.

Usage: torchrun --nproc-per-node 2 capture_killed.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gradlab.capture import TraceRecorder
from jobs.capture_scenarios import batches, loss_of, parallel_model


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = parallel_model()
    recorder = TraceRecorder(model, folder / "trace", flush_seconds=0.05, segment_bytes=1)
    with open(folder / f"progress-{dist.get_rank()}", "w", encoding="utf-8") as progress:
        progress.write(f"{os.getpid()}\n")
        for batch in batches(100_000):
            loss_of(model, batch).backward()
            model.zero_grad()
            progress.write(f"{recorder.steps_written}\n")
            progress.flush()


if __name__ == "__main__":
    main()
