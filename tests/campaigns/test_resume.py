"""Resume: in new processes, at 2 and 3 ranks, at another number of ranks, and after torchrun's restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from campaigns.resume import launch, problems, results
from gradlab import wrappers
from support.stacks import WRAPPINGS, all_stacks


@pytest.mark.thorough
def test_resumed_is_never_stopped(tmp_path: Path) -> None:
    """A selection of what `python tests/campaigns/resume.py` runs for every stack, there at 2 and 4 ranks: bit for bit
    in deterministic mode, through DDP's bucket rebuild, with optimizer and schedule; and what is owed to the model
    survives a change of ranks."""
    rows = results(tmp_path, ranks=3)
    at = [[result["ranks"] for result in row] for row in rows]
    assert at[0] == at[1]
    assert at[2] == [3] * at[0].count(3)
    assert at[0].count(3) > 15
    assert at[0].count(2) == 2
    assert sum("rescaled" in result for result in rows[0]) == 4
    assert [(result["stack"], problem) for row in rows for result in row for problem in problems(result)] == []


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["ddp", "outer"])
def test_restart_by_torchrun(tmp_path: Path, what: str) -> None:
    """One rank is killed; started again, the ranks continue from their own files, and end where an undisturbed run
    does, bit for bit."""
    launch("restart_job.py", str(tmp_path), what, torchrun=("--max-restarts=1",))
    for result in json.loads((tmp_path / "results.json").read_text()):
        assert result["equal"]
        assert result["restarts"] == 1
        assert result["resumed from"] in (3, 6)


def test_every_stack_is_valid_or_refused_with_a_reason() -> None:
    """No wrapper is missing from the stacks; a refusal names the wrapper."""
    assert {wrap.name for around in WRAPPINGS.values() for wrap in around} == set(wrappers.names())
    stacks = all_stacks()
    assert sum(not stack.refusal for stack in stacks) > len(stacks) / 2
    for stack in stacks:
        if stack.refusal:
            assert any(wrap.name in stack.refusal for wrap in stack.wrappers)
            assert "\n" not in stack.refusal
