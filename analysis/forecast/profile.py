"""What was measured of a training step: the time of computing, and that of the codecs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlab.artifact import Artifact
from gradlab.errors import GradlabError

_HOW = (
    "give --compute-seconds, the time of a step without gradient exchange (DDP.no_sync), or --run, the report of a "
    "compressed run: gradlab train WORKLOAD --compress ARTIFACT --out run.json"
)


@dataclass(frozen=True)
class CodecTime:
    """The codecs' time in one step, in seconds, at `world_size` ranks. engine: whether the engine's own work is in."""

    seconds: float
    world_size: int
    engine: bool
    source: str


@dataclass(frozen=True)
class Profile:
    """Seconds of a step without gradient exchange, and the codecs'; None: as timed here and now."""

    compute_seconds: float
    compute_source: str
    codec: CodecTime | None = None

    def __post_init__(self) -> None:
        if not 0 < self.compute_seconds < math.inf:
            raise GradlabError(f"compute time = {self.compute_seconds:g} s, expected above 0")


def profile_of(
    artifact: Artifact, run: str | os.PathLike[str] | None = None, compute_seconds: float | None = None
) -> Profile:
    """What is known of an artifact's plan: from a run's report, from a number, and from its own replay.

    run: the JSON that `gradlab train --out` writes. Its codec time counts if the run was this plan's.

    Raises:
        GradlabError: if no computing time is known, or the report is not one of a compressed run.
    """
    report = _read(Path(run)) if run is not None else None
    codec = _codec_of_replay(artifact.origin)
    if report is not None and report.get("plan") == artifact.plan.digest:
        codec = CodecTime(_seconds(report, run, "compress"), _world_size(report, run), True, f"the run {run}")
    if compute_seconds is not None:
        return Profile(compute_seconds, "as given", codec)
    if report is None:
        raise GradlabError(f"no computing time is known for this artifact: {_HOW}")
    return Profile(_seconds(report, run, "compute"), f"the run {run}", codec)


def compute_seconds_of(run: str | os.PathLike[str]) -> float:
    """Seconds of a step without gradient exchange, from the JSON that `gradlab train --out` writes.

    Raises:
        GradlabError: for a file that is not the report of a compressed run.
    """
    return _seconds(_read(Path(run)), run, "compute")


def _codec_of_replay(origin: Mapping[str, Any]) -> CodecTime | None:
    """The replay's own time, where an artifact holds one."""
    replay, world_size = origin.get("replay"), origin.get("world_size")
    seconds = _time(replay.get("codec_seconds")) if isinstance(replay, Mapping) else None
    if seconds is None or type(world_size) is not int or world_size < 1:
        return None
    return CodecTime(seconds, world_size, False, f"the artifact's replay on {world_size} ranks")


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise GradlabError(f"{path} is not JSON: expected what gradlab train --out writes") from None
    if not isinstance(report, dict):
        raise GradlabError(f"{path}: expected a run's report, a JSON object")
    return report


def _seconds(report: Mapping[str, Any], path: object, part: str) -> float:
    times = report.get("time")
    value = _time(times.get(part)) if isinstance(times, Mapping) else None
    if value is None:
        raise GradlabError(f"{path}: holds no time.{part} above 0, as plain runs do not: {_HOW}")
    return value


def _world_size(report: Mapping[str, Any], path: object) -> int:
    size = report.get("world_size")
    if type(size) is not int or size < 1:
        raise GradlabError(f"{path}: world_size = {str(size)[:80]}, expected a whole number from 1")
    return size


def _time(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 < value < math.inf else None
