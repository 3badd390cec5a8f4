"""Faults on purpose; `python tests/campaigns/faults.py` runs more of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.warm_python import python


@pytest.mark.thorough
def test_survivors_end_with_a_reason() -> None:
    """A rank is killed, stopped or has a defect in a codec, or is killed under FSDP2: faults.py says what is asked."""
    counts = {"--kills": 3, "--stops": 1, "--fsdp-kills": 1, "--fsdp-stops": 0}
    words = [str(word) for pair in counts.items() for word in pair]
    command = [python(), str(Path(__file__).with_name("faults.py")), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "0 went wrong" in done.stdout
