"""Ctrl-C at random moments of every command, its imports included: one line, exit code 130, and nothing half written.

    PYTHONPATH=tests python tests/campaigns/interrupts.py [--count 6] [--seed N] [--only analyze ...]

prints a line per command and one per trial that went wrong; the exit code is 1 if there is one. As a terminal does, the
signal goes to all processes of the command. A command that ends before it is interrupted counts as ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gradlab.artifact import Artifact
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from support.recorded import random_gradients, record

LAYERS = (Layer("conv.weight", (16, 8, 3, 3), "convolution"), Layer("head.weight", (20, 64), "linear"))
PYTHON_STARTS = 0.06  # seconds in which Python itself is not there yet to be interrupted
# Words after `gradlab`, and what the command writes.
COMMANDS: dict[str, tuple[Sequence[str], str]] = {
    "methods": (["methods"], ""),
    "trace check": (["trace", "check", "trace"], ""),
    "trace info": (["trace", "info", "trace"], ""),
    "trace repair": (["trace", "repair", "trace"], ""),
    "analyze": (["analyze", "trace", "--out", "out", "--workers", "2"], "out"),
    "fit uniform": (["fit", "uniform", "trace", "--codec", "topk", "--out", "out"], "out"),
    "fit gradiveq": (["fit", "gradiveq", "trace", "--samples", "20", "--out", "out"], "out"),
    "fit lgreco": (["fit", "lgreco", "trace", "--codec", "topk", "--out", "out"], "out"),
    "evaluate": (["evaluate", "trace", "plan.safetensors", "--out", "out"], "out"),
    "inspect": (["inspect", "plan.safetensors"], ""),
    "predict": (["predict", "plan.safetensors", "--compute-seconds", "0.1"], ""),
    "train": (["train", "digits", "--steps", "40", "--out", "out"], "out"),
    "demo": (["demo", "--out", "out"], ""),  # a folder that fills
}


def run(words: Sequence[str], folder: Path, delay: float | None) -> tuple[int | None, str, float]:
    """Run a command, and interrupt it after a delay: its exit code (None: killed), standard error, and seconds."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "gradlab", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    try:
        if delay is not None:
            try:
                _, err = process.communicate(timeout=delay)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
                _, err = process.communicate(timeout=30)
        else:
            _, err = process.communicate(timeout=300)
        return process.returncode, err, time.monotonic() - began
    except subprocess.TimeoutExpired:
        return None, "", time.monotonic() - began
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trial(words: Sequence[str], out: str, source: Path, delay: float) -> tuple[str, str]:
    """Interrupt a command once: how that ended, and what is wrong with it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "work"
        shutil.copytree(source, folder)
        code, err, _ = run(words, folder, delay)
        if code == 0:
            return "ended", ""
        if code is None:
            return "stuck", f"it goes on 30 s after an interrupt at {delay:.3f} s"
        said = [line for line in err.splitlines() if not line.startswith("gradlab: warning") and not _is_a_stage(line)]
        # Python that is about to leave is ended by the signal itself, without a word: a shell says 130 then, too.
        late = code == -signal.SIGINT and said in ([], ["gradlab: interrupted"])
        if not late and (code != 130 or said != ["gradlab: interrupted"]):
            return "wrong", f"at {delay:.3f} s: exit code {code}, {' / '.join(said[-4:])[:400]}"
        if left := [path.name for path in folder.iterdir() if path.name.startswith(".")]:
            return "wrong", f"at {delay:.3f} s: {left} is left"
        if out and (folder / out).exists() and (problem := not_whole(folder / out)):
            return "wrong", f"at {delay:.3f} s: {out}: {problem}"
        return "interrupted", ""


def _is_a_stage(line: str) -> bool:
    """Whether a line is what `demo` says before each of its parts."""
    return line[1:4] in ("/4 ", "/3 ")


def not_whole(path: Path) -> str:
    """What is wrong with a result that is there: an artifact, a run's report, or a trace's."""
    if path.is_dir():
        missing = {"report.html", "report.json", "figures"} - {one.name for one in path.iterdir()}
        return f"without {sorted(missing)}" if missing else ""
    try:
        if path.read_bytes()[:1] == b"{":
            json.loads(path.read_text(encoding="utf-8"))
        else:
            Artifact.load(path)
    except (ValueError, GradlabError) as error:
        return str(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    wanted = parser.parse_args()
    draw, wrong = random.Random(wanted.seed), 0
    with tempfile.TemporaryDirectory() as place:
        source = Path(place)
        record(source / "trace", random_gradients(0, 40, 2, LAYERS), LAYERS).close()
        code, err, _ = run(["fit", "uniform", "trace", "--codec", "topk", "--out", "plan.safetensors"], source, None)
        assert code == 0, err
        for name in wanted.only:
            words, out = COMMANDS[name]
            whole = Path(place) / "whole"
            shutil.copytree(source, whole, ignore=shutil.ignore_patterns("whole"))
            code, err, took = run(words, whole, None)
            shutil.rmtree(whole)
            assert code == 0, (name, err)
            ends, problems = [], []
            for _ in range(wanted.count):
                ended, problem = trial(words, out, source, draw.uniform(PYTHON_STARTS, took))
                ends.append(ended)
                problems += [problem] if problem else []
            wrong += len(problems)
            counted = ", ".join(f"{ends.count(kind)} {kind}" for kind in sorted(set(ends)))
            print(f"{name:14s} {took:5.1f} s: {counted}", flush=True)
            print("\n".join(f"    {problem}" for problem in problems), end="\n" if problems else "", flush=True)
    print(f"{wrong} went wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
