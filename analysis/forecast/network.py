"""The network of a forecast: links, numbers of nodes, and the processors of each rank."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.simulator import FLAT, FSDP, SHARDS, Node
from gradlab.artifact import Artifact
from gradlab.errors import GradlabError
from gradlab.formatting import format_counted
from gradlab.jsonable import read_json

if TYPE_CHECKING:
    from gradlab.analysis.forecast.processors import Processor
    from gradlab.trace.times import RecordedTimes

_HOW = (
    "give --compute-seconds, the time of a step without gradient exchange, a recording that timed its steps, or the "
    "report of a compressed run: gradlab train WORKLOAD --compress ARTIFACT --out run.json"
)


@dataclass(frozen=True)
class CodecTime:
    """The codecs' time in one step at `world_size` ranks; engine: whether it includes the engine's own work; nodes:
    number of ranks whose form of the plan took it, None: `world_size`."""

    seconds: float
    world_size: int
    engine: bool
    source: str
    nodes: int | None = None


@dataclass(frozen=True)
class Profile:
    """The seconds of computing in a training step, with their origin; codec: the codecs' time, None: timed here;
    recorded: whether a recording timed them."""

    compute_seconds: float
    compute_source: str
    codec: CodecTime | None = None
    recorded: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.compute_seconds < math.inf:
            raise GradlabError(f"compute time = {self.compute_seconds:g} s, expected above 0")

    @classmethod
    def as_recorded(cls, times: RecordedTimes, codec: CodecTime | None = None) -> Profile:
        """Take the time of computing that a recording has."""
        return cls(
            times.computing, f"as recorded on {format_counted(times.ranks, times.recorded)}", codec, recorded=True
        )


# A computing time that nobody gave: next to nothing, so that a step is the exchange alone.
NOT_MEASURED = Profile(1e-9, "not known")


def profile_of(
    artifact: Artifact,
    run: str | os.PathLike[str] | None = None,
    compute_seconds: float | None = None,
    recorded: RecordedTimes | None = None,
) -> Profile:
    """Collect what is known of an artifact's times: from a run, `compute_seconds`, a recording, its replay."""
    report = _read(Path(run)) if run is not None else None
    codec = _codec_of_replay(artifact.provenance)
    if report is not None and report.get("plan") == artifact.plan.digest:
        codec = CodecTime(_seconds(report, run, "compress"), _world_size(report, run), True, f"the run {run}")
    if compute_seconds is not None:
        return Profile(compute_seconds, "as given", codec)
    if recorded is not None:
        return Profile.as_recorded(recorded, codec)
    if report is None:
        if (seconds := _time(artifact.provenance.get("recorded_computing"))) is not None:
            return Profile(seconds, "as recorded for this artifact", codec, recorded=True)
        raise GradlabError(f"no computing time is known for this artifact: {_HOW}")
    return Profile(_computing(report, run), f"the run {run}", codec)


def compute_seconds_of(run: str | os.PathLike[str]) -> float:
    """Read the computing time of a step, in seconds, from the JSON that `gradlab train --out` writes."""
    return _computing(_read(Path(run)), run)


def _codec_of_replay(provenance: Mapping[str, Any]) -> CodecTime | None:
    """Read the codecs' time in the replay that an artifact's provenance may hold."""
    replay, world_size = provenance.get("replay"), provenance.get("world_size")
    seconds = _time(replay.get("codec_seconds")) if isinstance(replay, Mapping) else None
    if seconds is None or type(world_size) is not int or world_size < 1:
        return None
    nodes = replay.get("nodes") if isinstance(replay, Mapping) else None
    form = nodes if type(nodes) is int and nodes > 0 else None
    return CodecTime(seconds, world_size, False, f"the artifact's replay on {world_size} ranks", form)


def _read(path: Path) -> dict[str, Any]:
    report = read_json(path, "what gradlab train --out writes")
    if not isinstance(report, dict):
        raise GradlabError(f"{path}: expected a run's report, a JSON object")
    return report


def _computing(report: Mapping[str, Any], path: object) -> float:
    if report.get("emulated"):
        raise GradlabError(
            f"{path}: its computing time is that of all emulated workers in turn; give --compute-seconds"
        )
    return _seconds(report, path, "compute")


def _seconds(report: Mapping[str, Any], path: object, part: str) -> float:
    times = report.get("time")
    value = _time(times.get(part)) if isinstance(times, Mapping) else None
    if value is None:
        raise GradlabError(
            f"{path}: holds no time.{part} above 0, as plain runs and reports of your own script do not: {_HOW}"
        )
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


# --- the measured times of a step -------------------------------------------------------------------------------------


#: Most nodes of a forecast: the fabricated answers of one exchange hold something of each.
MOST_NODES = 16384


@dataclass(frozen=True)
class Network:
    """Links and numbers of nodes: a forecast is made for every pair of them.

    links: at least one. They may differ in speed alone.
    nodes: numbers of nodes, from 1 to `MOST_NODES`; at least one.
    node: several ranks to a node, which `links` connect; None: one rank each.
    profile: the measured times of a step; `NOT_MEASURED` makes a forecast of the exchange alone.
    cores: processor cores per rank, for its two threads, computing and codecs. With one core or less the threads take
        turns. Below one core codecs take as many times longer as ranks share a core.
    bucket_cap_mb: DDP's bucket size in MiB. None: DDP's default.
    processor: the one that codecs run on; None: this one. On an accelerator they take turns with computing.
    parameters: format of FSDP2's gathers of parameters, see `gradlab.runtime.compress_fsdp`; "": as they are.
    gpu: whether training computes on GPUs, although codecs are timed on this processor.
    sharded: whether FSDP2 shards parameters over all nodes, of one rank each, and plans run in its reduce-scatter.

    >>> from gradlab.analysis import Network
    >>> from gradlab.analysis.forecast.link import Link
    >>> network = Network(links=[Link(1e9, 1e-4)], nodes=(4, 64))
    >>> network.dense, network.speed
    ('plain DDP', 1.0)

    Raises:
        GradlabError: for an impossible number of nodes or cores, or no links or nodes at all.
    """

    links: Sequence[Link] = (Link(1e9, 1e-4), Link(2.5e10, 1e-4))
    nodes: Sequence[int] = (8,)
    profile: Profile = NOT_MEASURED
    cores: float = 2.0
    bucket_cap_mb: float | None = None
    node: Node | None = None
    processor: Processor | None = None
    parameters: str = ""
    gpu: bool = False
    sharded: bool = False

    def __post_init__(self) -> None:
        if not self.nodes or not self.links:
            raise GradlabError("nothing to predict: name at least one number of nodes and one bandwidth")
        for count in self.nodes:
            if not 1 <= count <= MOST_NODES:
                raise GradlabError(f"nodes = {count}, expected 1 to {MOST_NODES}")
        if not 0 < self.cores < math.inf:
            raise GradlabError(f"cores = {self.cores:g} per rank, expected above 0")

    @property
    def dense(self) -> str:
        """Name of the uncompressed step, for labels."""
        if self.sharded:
            return FSDP
        return FLAT if self.node is None else "the fastest dense way"

    @property
    def speed(self) -> float:
        """Speed of computing and of codecs while both run, see `gradlab.analysis.forecast.simulator.Clock`."""
        return 0.5 if self.on_accelerator else min(1.0, max(1.0, self.cores) / 2)

    @property
    def on_accelerator(self) -> bool:
        """Whether codecs run on an accelerator, which computes too."""
        return self.processor is not None and self.processor.accelerator

    @property
    def overlaps(self) -> bool:
        """Whether all collectives that are not compressed travel beside computing: FSDP2's do not on a CPU."""
        fsdp = self.sharded or (self.node is not None and self.node.plans == SHARDS)
        return self.on_accelerator or self.gpu or not fsdp

    @property
    def crowding(self) -> float:
        """How many times longer codecs take where several ranks share a core; those timed in a run shared it then."""
        codec = self.profile.codec
        if self.on_accelerator:
            return 1.0  # its times are a clock's, of all ranks at once; a CPU's are processor time of one thread
        return 1.0 if codec is not None and codec.engine else max(1.0, 1 / self.cores)
