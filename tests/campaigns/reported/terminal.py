"""Reports of terminals and command lines."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from campaigns.reported import Workplace, report
from gradlab.artifact import Artifact
from gradlab.layout import Layer
from gradlab.plan import Plan
from support.recorded import random_gradients, record

GRADLAB = [sys.executable, "-m", "gradlab.cli.main"]


def artifact(path: Path) -> Path:
    """Save a plan of four layers."""
    layers = tuple(Layer(f"block.{number}.weight", (64, 40), "linear") for number in range(4))
    return Artifact(Plan.uniform(layers, "topk", density=0.01)).save(path)


def ran(*words: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command with output in pipes."""
    return subprocess.run([*GRADLAB, *map(str, words)], env={**os.environ, **environment}, capture_output=True)


@report("Textualize/rich#3203", "a path with square brackets is taken for markup, and ends in a MarkupError")
def brackets(work: Workplace) -> str:
    """`inspect` of an artifact in a folder "runs[" under the name "b][bold]x"."""
    done = ran("inspect", artifact(work.folder / "runs[" / "b][bold]x.safetensors"))
    assert done.returncode == 0, done.stderr
    assert b"runs[/b][bold]x.safetensors" in done.stdout
    return "mended: shown as it is; before, a traceback with MarkupError"


@report("Textualize/rich#2425", "colours in logs of continuous integration, where no terminal tells its width")
def forced_colours(work: Workplace) -> str:
    """`inspect` in a pipe with FORCE_COLOR=1 and COLUMNS=30."""
    path = artifact(work.folder / "plan.safetensors")
    plain, forced = ran("inspect", path), ran("inspect", path, FORCE_COLOR="1", COLUMNS="30")
    assert (plain.returncode, forced.returncode) == (0, 0)
    lost = [word for word in plain.stdout.split() if word not in forced.stdout]
    assert b"\x1b[" in forced.stdout
    assert not lost, lost
    return "mended: all words of the plain log are there; before, numbers ended in an ellipsis"


@report("freedomofpress/dangerzone#768", "a file name that is not UTF-8 ends in a UnicodeEncodeError after the work")
def other_bytes(work: Workplace) -> str:
    """`fit` and `inspect` of an artifact whose name is Latin-1, from a trace whose name is."""
    trace, plan = (work.folder / os.fsdecode(name) for name in (b"caf\xe9", b"caf\xe9.safetensors"))
    record(trace, random_gradients(0, 6, 2, layers := (Layer("w", (40, 60), "linear"),)), layers)
    for words in (["fit", "uniform", trace, "--codec", "topk", "--workers", "1", "--out", plan], ["inspect", plan]):
        done = subprocess.run([*GRADLAB, *map(os.fsencode, words)], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    return r"mended: shown as caf\udce9; before, the artifact was written, called no whole file, and exit code 2"


@report("pixelb/crudini#82", "in programs without a standard output Python's is None, which has no flush")
def no_output(work: Workplace) -> str:
    """`trace info` with standard output closed, then with all three streams closed."""
    record(work.folder / "t", random_gradients(0, 4, 2))
    command = " ".join([*GRADLAB, "trace", "info", str(work.folder / "t")])
    for closed in (">&-", ">&- 2>&- <&-"):
        done = subprocess.run(["sh", "-c", f"{command} {closed}"], stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
    return "held: exit code 0, nothing on standard error"


@report("Textualize/rich#3400", "`| head` ends in a cascade of errors")
def head(work: Workplace) -> str:
    """`methods` for a reader that takes one line and stops."""
    words = ["bash", "-c", f'{" ".join(GRADLAB)} methods | head -1; echo "${{PIPESTATUS[0]}}"']
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert done.stdout.split()[-1] in ("0", "141")
    return f"held: nothing on standard error, exit code {done.stdout.split()[-1]}"


@report("go-delve/delve#252", "escape codes although TERM=dumb says that the terminal has none")
def dumb(work: Workplace) -> str:
    """`inspect` on a pseudo-terminal with TERM=dumb."""
    path, (ours, theirs) = artifact(work.folder / "plan.safetensors"), pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    with subprocess.Popen([*GRADLAB, "inspect", str(path)], stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 2**16):
                shown += part
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    assert b"block.0." in shown, shown
    assert b"\x1b" not in shown
    return f"held: {len(shown)} bytes, none of them an escape"


@report("matplotlib/matplotlib#18011", "no home folder that can be written to: a confusing message, or an error")
def no_home(work: Workplace) -> str:
    """A figure drawn with HOME in a place that does not exist and cannot be made."""
    code = (
        "from gradlab.analysis.figures.style import drawing, panels, render\n"
        "with drawing():\n figure, axes = panels(1, 1)\n axes[0].plot([1, 2])\n render(figure, 'name')"
    )
    unset = ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    environment = {key: value for key, value in os.environ.items() if key not in unset} | {"HOME": "/proc/nobody"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return f"held: drawn, and {len(done.stderr.splitlines())} lines of matplotlib say where its cache is instead"
