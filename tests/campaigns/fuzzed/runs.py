"""What a run leaves: its log, which grows while somebody watches it, and reports that are set side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from campaigns.fuzzed.case import Case, Format, altered_json, damaged, odd
from gradlab.analysis.report.beside import write_beside
from gradlab.cli.watch import drawn
from gradlab.errors import GradlabError
from gradlab.jsonable import plain
from gradlab.run_log import WatchedLog

NAMES = (
    "loss",
    "payload_bytes",
    "seconds",
    "compression_ratio",
    "relative_error/a.0",
    "relative_error/b",
    "residual_norm/b",
)
NUMBERS = (0.5, 2, 1e308, -1e308, 10**400, float("nan"), float("inf"), None, -3)


def lines_of(draw: np.random.Generator) -> list[dict[str, Any]]:
    """A log as `ScalarLog` writes it, now and then with numbers that no run has."""
    lines: list[dict[str, Any]] = [
        {"step": step, "time": 10.0 + step, **{name: float(draw.random()) for name in NAMES}}
        for step in range(1, int(draw.integers(2, 8)))
    ]
    lines[-1]["rules"] = ["residual_grows: a layer"]
    for line in lines:
        if draw.random() < 0.2:
            line[str(draw.choice([*NAMES, "step", "time"]))] = NUMBERS[int(draw.integers(len(NUMBERS)))]
    return [*lines, {"step": len(lines), "time": 99.0, "ended": True}] if draw.random() < 0.3 else lines


class Logs(Format):
    """A log of which lines are altered, or bytes damaged, and that is looked at twice while it grows."""

    file_name = "run.jsonl"

    def case(self, draw: np.random.Generator) -> Case:
        lines, way = lines_of(draw), int(draw.integers(4))
        if way == 0:
            kind, data = damaged("".join(f"{json.dumps(line)}\n" for line in lines).encode(), draw)
        elif way == 1:
            coding = str(draw.choice(["utf-16", "utf-32", "utf-8-sig", "latin-1", "cp037"]))
            kind, data = coding, "".join(f"{json.dumps(line)}\n" for line in lines).encode(coding)
        else:
            at = int(draw.integers(len(lines)))
            lines[at] = altered_json(lines[at], draw) if way == 2 else {**lines[at], "rules": odd_rules(draw)}
            kind, data = "a line", "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        return Case(kind, data, True, "", watched)


def odd_rules(draw: np.random.Generator) -> Any:
    return odd(draw) if draw.random() < 0.5 else altered_json(["a", "b"], draw)


def watched(path: Path) -> str:
    """Watch the file's first half, and then all of it: in a terminal, and as JSON."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    refused, log = None, None
    try:
        log = WatchedLog(path)
    except GradlabError as error:
        refused = error
    path.write_bytes(data)
    log = log or WatchedLog(path)
    for _ in range(3):  # each look goes on behind a line that the one before could not read
        try:
            log.look()
        except GradlabError as error:
            refused = error
    Console(file=io.StringIO(), width=100).print(drawn(log))
    json.dumps(plain(log.to_json()), allow_nan=False)
    if refused is not None:
        raise refused
    WatchedLog(path).require_lines()
    return ""


SUMMARY = {
    "judged_cosine": 0.9,
    "contribution_error": 0.1,
    "codec_seconds": 1e-4,
    "payload_bytes_per_step": {"mean": 74396.0},
}
PLACE = {"bits_per_second": 1e9, "nodes": 8, "dense_seconds": 0.4, "half_seconds": 0.3, "seconds": {"int8": 0.2}}
REPORT = {
    "kind": "trace",
    "id": "4d1f7edf0a81",
    "title": "Gradients of a trace",
    "brief": "Do not compress.",
    "warnings": ["A quick look."],
    "versions": {"gradlab": "0.1.0", "torch": "2.13.0"},
    "look": {"quick": True},
    "trace": {
        **{"path": "trace", "digest": "47a0ea66", "steps": 12, "world_size": 2, "parameters": 1000},
        **{"first_iteration": 0, "last_iteration": 11, "layers": [["a", [3, 4]]]},
    },
    "replays": {"int8": {"summary": SUMMARY}, "top-k": {"summary": {**SUMMARY, "codec_seconds": None}}},
    "spectrum": {
        "layers": [{"name": name, "mean_cosine": 0.9, "signal_to_noise": 3.0, "mean_share": 0.1} for name in "ab"]
    },
    "payoff": {"compute_seconds": 0.36, "places": [PLACE, {**PLACE, "bits_per_second": "inf"}]},
}


class Reports(Format):
    """report.json of `gradlab analyze`, altered, set beside a sound one."""

    file_name = "report.json"

    def case(self, draw: np.random.Generator) -> Case:
        if draw.random() < 0.2:
            kind, data = damaged(json.dumps(REPORT).encode(), draw)
        else:
            kind, data = "a value", json.dumps(altered_json(REPORT, draw)).encode()
        return Case(kind, data, True, "", compared)


def compared(path: Path) -> str:
    """Set it beside a sound report, in one order or the other, and write the page."""
    sound, out = path.parent / "sound", path.parent / "beside"
    sound.mkdir(exist_ok=True)
    (sound / "report.json").write_text(json.dumps(REPORT))
    folders = (sound, path.parent) if path.stat().st_size % 2 else (path.parent, sound)
    write_beside(*folders, out, overwrite=True)
    return ""
