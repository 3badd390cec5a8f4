"""One pool of real ranks for the whole session: starting torch in a process costs seconds, a task milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from process_pool import ProcessPool


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Sums differ between one and two threads in the last bit; the ranks run with one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Four ranks under torchrun on Gloo, reused by all distributed tests."""
    with ProcessPool(world_size=4, log=tmp_path_factory.mktemp("pool") / "torchrun.log") as running:
        yield running
