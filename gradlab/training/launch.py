"""Start the reference trainer under torchrun on this machine, follow its progress, and bring back its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.jsonable import plain
from gradlab.progress import Progress
from gradlab.training.limited_link import on_limited_link
from gradlab.training.settings import TrainSettings


def launch(
    settings: TrainSettings, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Run `settings.ranks` processes and return the run's report.

    Args:
        settings: the run's.
        progress: receives the run's name, steps made and all steps. None: nobody.
        say: receives remarks of rank 0, and what ranks print. None: nobody.

    Raises:
        GradlabError: the first error of a rank, or the end of the log of a run that failed otherwise.
    """
    settings.check()
    command = [interpreter(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.ranks}"]
    command += ["-m", "gradlab.training.trainer", settings.to_json()]
    if settings.link is not None:
        command = on_limited_link(command, settings.link, settings.ranks)
    environment = {"OMP_NUM_THREADS": str(settings.threads), "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    # Started in an empty folder: `python -m` would import from the current one, and a checkout is not the package.
    # What ranks say may be in any encoding, that of an error of the C library for one.
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "encoding": "utf-8", "errors": "replace"}
        with subprocess.Popen(command, env=environment, cwd=here, **pipe) as process:
            try:
                result, error = _follow(process, settings.name, progress, say or (lambda line: None))
            finally:
                process.terminate()  # no-op for one that has ended; torchrun passes it on to the ranks
        log.seek(0)
        if error is None and result is None:
            raise GradlabError(
                f"training run {settings.name} failed (exit code {process.returncode}):\n{_reason(log.read())}"
            )
    if result is None:
        raise GradlabError(str(error))
    return result


def interpreter() -> str:
    """The Python that ranks are started with: this one."""
    return sys.executable


def _reason(log: str, longest: int = 25) -> str:
    """The lines of a log that say why: the first traceback is a rank's own, torchrun's comes after it."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), None)
    return "\n".join(lines[-longest:] if first is None else lines[first : first + longest])


def _follow(
    process: subprocess.Popen[str], name: str, progress: Progress | None, say: Callable[[str], None]
) -> tuple[dict[str, Any] | None, str | None]:
    """Read lines until the run ends: the result of rank 0, and the first error."""
    result, error = None, None
    assert process.stdout is not None
    for text in process.stdout:
        try:
            line = json.loads(text)
        except ValueError:
            say(text.removesuffix("\n"))
            continue
        if "note" in line:
            say(line["note"])
        if "step" in line and progress:
            progress(name, line["step"], line["steps"])
        result = line.get("result", result)
        error = error or line.get("error")
    process.wait()
    return result, error


def save_report(report: Mapping[str, Any], path: Path) -> Path:
    """Write a run's report as JSON, whole or not at all; a file that is there stays."""
    if path.exists():
        raise GradlabError(f"{path} exists already: choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain(report), indent=1, allow_nan=False).encode())
    except OSError as error:
        raise GradlabError(f"cannot write {path}: {error.strerror}") from None
    return path
