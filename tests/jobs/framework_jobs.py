"""The frameworks' examples and scenarios, several in each process: a launch costs more than most of what it runs.

    framework_jobs.py first FOLDER       under torchrun, two ranks: scenarios, and examples as users start them
    framework_jobs.py resumed FOLDER     the same: the examples again, each from a checkpoint of its first run
    framework_jobs.py alone FOLDER       one process: what is refused there, and what needs no second one
    framework_jobs.py missing FOLDER     one process: the message where a framework is not installed

FOLDER is shared by the ranks. Each rank writes FOLDER/<what>-<rank>.json, results by name. A framework that is not
installed is left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FRAMEWORKS = ("transformers", "lightning", "accelerate")  # the last one's example ends the process group
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
Job = Callable[[Path], Any]


def example(name: str, *words: str) -> Job:
    """Run docs/examples/<name>_example.py; words: its arguments, in which {} is the folder."""

    def run(folder: Path) -> Any:
        script = str(EXAMPLES / f"{name}_example.py")
        sys.argv = [script, *(word.format(folder) for word in words)]
        with redirect_stdout(io.StringIO()) as output:
            runpy.run_path(script, run_name="__main__")
        return json.loads(output.getvalue().strip().splitlines()[-1])

    return run


def scenarios(name: str, function: str) -> Job:
    """Call a function of <name>_scenarios.py with a folder of its own."""

    def run(folder: Path) -> Any:
        place = folder / f"{name}-{function}"
        place.mkdir(exist_ok=True)
        return getattr(importlib.import_module(f"jobs.{name}_scenarios"), function)(place)

    return run


class Absent(MetaPathFinder):
    """A package that is not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == self.name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def missing_extras(folder: Path) -> dict[str, str]:
    """What is said where a framework is not installed; all of gradlab is imported anew."""
    said = {}
    for name in FRAMEWORKS:
        for loaded in [module for module in sys.modules if module.partition(".")[0] in ("gradlab", *FRAMEWORKS)]:
            del sys.modules[loaded]
        sys.meta_path.insert(0, Absent(name))
        for side in ("runtime", "capture"):
            importlib.import_module(f"gradlab.{side}")
            try:
                importlib.import_module(f"gradlab.{side}.{name}")
            except ModuleNotFoundError as error:
                said[f"{side}.{name}"] = str(error)
        sys.meta_path.pop(0)
    return said


JOBS: dict[str, dict[str, Job]] = {
    "first": {
        "transformers_scenarios": scenarios("transformers", "on_two_ranks"),
        "transformers": example("transformers", "--folder", "{}/transformers/whole"),
        "accelerate_scenarios": scenarios("accelerate", "on_two_ranks"),
        "accelerate": example("accelerate", "--folder", "{}/accelerate/whole"),
    },
    "resumed": {
        "transformers": example(
            *("transformers", "--folder", "{}/transformers/resumed"),
            *("--resume", "{}/transformers/resumed/checkpoint-16"),
        ),
        "lightning": example(
            "lightning", "--folder", "{}/lightning/resumed", "--resume", "{}/lightning/whole/epoch=1.ckpt"
        ),
        "lightning_local_steps": scenarios("lightning", "local_steps"),
        "accelerate": example(
            "accelerate", "--folder", "{}/accelerate/resumed", "--resume", "{}/accelerate/whole/epoch=1"
        ),
    },
    "alone": {
        "transformers_scenarios": scenarios("transformers", "alone"),
        "lightning_scenarios": scenarios("lightning", "alone"),
    },
    "missing": {"missing_extras": missing_extras},
}


def installed(job: str) -> bool:
    name = job.partition("_")[0]
    return name not in FRAMEWORKS or importlib.util.find_spec(name) is not None


def main(what: str, folder: Path) -> None:
    os.chdir(folder)
    results = {name: job(folder) for name, job in JOBS[what].items() if installed(name)}
    (folder / f"{what}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
