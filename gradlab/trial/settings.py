"""The settings in a trial's folder: the plan, and how many steps to train."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gradlab.artifact import Artifact
from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.json_form import require_form
from gradlab.jsonable import read_json
from gradlab.plan import Plan

VARIABLE = "GRADLAB_PILOT"  # of the environment: a trial's folder
_STEPS, _PLAN = "trial.json", "plan.safetensors"
_MOST_BYTES = 10_000


@dataclass(frozen=True)
class TrialSettings:
    """A trial, as its folder has it.

    Attributes:
        plan: plan by which gradients are averaged; without groups: plain DDP.
        steps: synchronised backward passes after which the run ends.
    """

    plan: Plan
    steps: int

    def save(self, folder: Path) -> None:
        """Write into a folder that is there."""
        Artifact(self.plan, {"method": "pilot"}).save(folder / _PLAN)
        write_whole(folder / _STEPS, json.dumps({"steps": self.steps}).encode())

    @classmethod
    def load(cls, folder: Path) -> TrialSettings:
        """Read a trial's folder.

        Raises:
            GradlabError: for a folder that is none.
        """
        try:
            written = read_json(folder / _STEPS, "a trial of gradlab pilot", _MOST_BYTES)
        except OSError as error:
            raise GradlabError(
                f"{VARIABLE}={folder}: no trial of gradlab pilot ({error.strerror}); unset it to train as usual"
            ) from None
        return cls(Artifact.load(folder / _PLAN).plan, require_form(written, {"steps": int}, folder / _STEPS)["steps"])
