"""The page that explains gradlab: its codec prints what stands there, on a process group too."""

from __future__ import annotations

import re

import pytest
import torch

from gradlab.runtime import Communicator, drive
from support.reference import DOCS

PAGE = (DOCS / "how-it-works.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_codec_prints_what_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    [(code, printed)] = BLOCK.findall(PAGE)
    exec(compile(code, "how-it-works.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_the_same_generator_runs_on_a_process_group() -> None:
    """Of one rank, whose mean is what it decodes of itself."""
    [(code, _)] = BLOCK.findall(PAGE)
    names: dict[str, object] = {}
    exec(compile(code, "how-it-works.md", "exec"), names)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        assert group is not None
        mean = drive(names["signs"](torch.tensor([1.0, -3.0])), Communicator(group))  # type: ignore[operator]
    finally:
        torch.distributed.destroy_process_group()
    assert mean.tolist() == [2.0, -2.0]
