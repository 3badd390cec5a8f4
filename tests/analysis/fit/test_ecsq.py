"""The command that writes a plan of ecsq."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradlab.artifact import Artifact
from gradlab.layout import Layer
from gradlab.trace import Trace
from support.command_line import Command
from support.recorded import random_gradients, record

LAYERS = (Layer("large", (40, 60), "linear"), Layer("small", (40, 60), "linear"), Layer("bias", (40,), "bias"))
STEPS = 12


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Normal gradients, of which one matrix's are a tenth of the other's."""
    gradients = random_gradients(0, STEPS, 2, LAYERS)
    for step in gradients:
        for rank in step:
            rank["small"] *= np.float32(0.1)
    return record(tmp_path_factory.mktemp("trace") / "trace", gradients, LAYERS)


def test_the_command_writes_the_plan_and_what_speaks_for_it(trace: Trace, gradlab: Command, tmp_path: Path) -> None:
    out = tmp_path / "ecsq.safetensors"
    code, printed, err = gradlab("fit", "ecsq", trace.path, "--bits", 0.4, "--out", out)
    assert code == 0, err
    assert printed.startswith("ecsq sends ")
    saved = Artifact.load(out)
    (group,) = saved.plan.compressed_groups
    assert (group.codec, group.settings["bits"]) == ("ecsq", 0.4)
    assert [wrap.name for wrap in group.wrappers] == ["error_feedback", "two_way"]
    words = ["--error", 0.5, "--both-ways", "--warmup-steps", 3, "--overwrite", "--json"]
    code, printed, err = gradlab("fit", "ecsq", trace.path, *words, "--out", out)
    assert code == 0, err
    plan = Artifact.load(out).plan
    assert [wrap.name for wrap in plan.compressed_groups[0].wrappers] == ["error_feedback", "two_way"]
    assert plan.schedule.warmup_steps == 3
    assert gradlab("fit", "ecsq", trace.path, "--bits", 0, "--overwrite", "--out", out)[0] == 2
