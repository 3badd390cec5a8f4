"""A checkup by `gradlab doctor`, on real ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradlab.runtime.doctor import measure


def checkup(group: dist.ProcessGroup, local: int) -> dict[str, Any]:
    """Measure for a second, as if so many ranks were on each node."""
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE=str(local)):
        return measure(torch.device("cpu"), 1.0, group).to_json()
