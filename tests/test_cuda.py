"""What needs a GPU: models on CUDA under NCCL. Skipped where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_codecs_on_cuda_give_what_they_give_on_the_cpu(ranks: int) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, there are {GPUS}")
    script = Path(__file__).with_name("cuda_job.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert set(differences) >= {"identity", "topk", "powersgd", "cast", "gradiveq"}
    assert max(differences.values()) < 1e-3, differences
