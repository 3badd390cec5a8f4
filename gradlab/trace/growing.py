"""A recording that may be under way, or that a killed run left: how far it is, read beside its writer.

Nothing is opened for writing and no lock is taken, not even for a moment: a recorder that starts just then would be
refused. A segment that cannot be read at one look may be half written, so it counts as damaged only if it is still the
same file, and still unreadable, at the next.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import numpy as np

from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.trace.checking import committed_segments
from gradlab.trace.schema import (
    MANIFEST,
    Manifest,
    RankIndex,
    rank_folder,
    ranks_there,
    read_index,
    read_manifest,
    segment_name,
)
from gradlab.trace.segment import SegmentReader

_Signature = tuple[int, int, int]  # of a file: inode, bytes, time of the last write in nanoseconds
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class RankProgress(Jsonable):
    """How far one rank is.

    Attributes:
        rank: number of the rank, from 0.
        steps: committed; a kill of the recorder loses none of them.
        last_iteration: the last committed one; None: there is none yet.
        steps_lost: iterations up to the last one that another rank recorded and this one did not; for a closed rank,
            the number in its index.
        nbytes: bytes of its files.
        closed: whether its recording is complete.
    """

    rank: int
    steps: int
    last_iteration: int | None
    steps_lost: int
    nbytes: int
    closed: bool


@dataclass(frozen=True)
class TraceProgress:
    """How far a recording is.

    Attributes:
        manifest: the trace's.
        ranks: those that have a folder, in order.
        common_steps: iterations that are committed on every rank.
        last_iteration: the last one that is committed on any rank; None: there is none yet.
        nbytes: bytes of all files.
        written: when a file was last written, seconds since 1970.
        problems: problems of all ranks, one line each.
    """

    manifest: Manifest
    ranks: tuple[RankProgress, ...]
    common_steps: int
    last_iteration: int | None
    nbytes: int
    written: float
    problems: tuple[str, ...]

    @property
    def closed(self) -> bool:
        """Whether every rank's recording is complete."""
        return len(self.ranks) == self.manifest.world_size and all(rank.closed for rank in self.ranks)

    @property
    def budget(self) -> int | None:
        """Bytes of the whole trace at most; None: no limit was given."""
        return self._whole_number("budget")

    @property
    def most_steps(self) -> int | None:
        """Steps that will be recorded at most; None: not known."""
        return self._whole_number("max_steps")

    def _whole_number(self, name: str) -> int | None:
        value = self.manifest.metadata.get(name)
        return value if type(value) is int and value > 0 else None


@dataclass
class _Segment:
    """One segment: its file as it was last read, its iterations, and what was wrong with it."""

    signature: _Signature | None = None
    iterations: np.ndarray = field(default_factory=lambda: _NONE)
    problem: str = ""
    failed: _Signature | None = None  # the file at the last look that could not read it


class GrowingTrace:
    """A trace's folder, looked at again and again. A file that did not change is not read again.

    >>> from gradlab.trace import GrowingTrace
    >>> progress = GrowingTrace("trace").look()
    >>> progress.closed, progress.common_steps == len(Trace("trace").steps)
    (True, True)

    Args:
        path: the trace's folder.

    Raises:
        GradlabError: if it is no trace; `look` too, if it no longer is one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Path(path)
        self._manifest = read_manifest(self._folder)
        self._read = _signature(self._folder / MANIFEST)
        self._segments: dict[tuple[int, int], _Segment] = {}

    def look(self) -> TraceProgress:
        """Return how far the recording is now."""
        self._refresh_manifest()
        world_size, problems = self._manifest.world_size, list[str]()
        indices: dict[int, RankIndex | None] = {}
        held: dict[int, np.ndarray] = {}
        for rank in sorted(rank for rank in ranks_there(self._folder) if rank < world_size):
            indices[rank] = self._index(rank, problems)
            held[rank] = self._iterations(rank, indices[rank], problems)
        due = reduce(np.union1d, held.values(), _NONE)
        own, files = _files(self._folder), {rank: _files(self._folder / rank_folder(rank)) for rank in held}
        ranks = [_rank_progress(rank, held[rank], indices[rank], due, files[rank]) for rank in held]
        complete = len(held) == world_size
        return TraceProgress(
            manifest=self._manifest,
            ranks=tuple(ranks),
            common_steps=len(reduce(np.intersect1d, held.values())) if complete else 0,
            last_iteration=_last(due),
            nbytes=sum(file.st_size for file in own) + sum(rank.nbytes for rank in ranks),
            written=max((file.st_mtime for some in (own, *files.values()) for file in some), default=0.0),
            problems=tuple(problems),
        )

    @property
    def unsettled(self) -> bool:
        """Whether a file could not be read at the last look: half written, or damaged, which the next look tells."""
        return any(segment.failed is not None and not segment.problem for segment in self._segments.values())

    def _refresh_manifest(self) -> None:
        """A trace that was overwritten is another recording."""
        signature = _signature(self._folder / MANIFEST)
        if signature is None or signature != self._read:
            self._manifest, self._read = read_manifest(self._folder), signature
            self._segments.clear()

    def _index(self, rank: int, problems: list[str]) -> RankIndex | None:
        try:
            return read_index(self._folder, rank)
        except GradlabError as error:
            problems.append(str(error))
            return None

    def _iterations(self, rank: int, index: RankIndex | None, problems: list[str]) -> np.ndarray:
        """Return the committed iterations of a rank, int64 (T,)."""
        iterations = [_NONE]
        for number, suffix in self._listed(rank, index):
            segment = self._segments.setdefault((rank, number), _Segment())
            self._read_segment(segment, rank, number, suffix)
            iterations.append(segment.iterations)
            problems += [segment.problem] if segment.problem else []
        return np.concatenate(iterations)

    def _listed(self, rank: int, index: RankIndex | None) -> list[tuple[int, str]]:
        """List a rank's segments. One that is renamed just then may be in no listing, but is in the next."""
        listed = committed_segments(self._folder, rank, index)
        known = {number for of_rank, number in self._segments if of_rank == rank}
        if known - {number for number, _ in listed}:
            listed = committed_segments(self._folder, rank, index)
        return listed

    def _read_segment(self, segment: _Segment, rank: int, number: int, suffix: str) -> None:
        path = self._folder / rank_folder(rank) / (segment_name(number) + suffix)
        signature = _signature(path)
        if signature is None or signature == segment.signature:  # renamed since it was listed; or nothing new
            return
        try:
            with closing(SegmentReader(path, self._manifest, rank, number, swmr=bool(suffix), only=())) as reader:
                segment.iterations, segment.signature = reader.records["index"], signature
                segment.problem, segment.failed = "", None
        except GradlabError as error:
            segment.problem = str(error) if segment.failed == signature else ""
            segment.failed = signature


def _rank_progress(
    rank: int, held: np.ndarray, index: RankIndex | None, due: np.ndarray, files: list[os.stat_result]
) -> RankProgress:
    """held, due: iterations of the rank, and of any rank."""
    return RankProgress(
        rank=rank,
        steps=len(held),
        last_iteration=_last(held),
        steps_lost=index.steps_lost if index else lost(held, due),
        nbytes=sum(file.st_size for file in files),
        closed=index is not None,
    )


def _last(iterations: np.ndarray) -> int | None:
    return int(iterations[-1]) if len(iterations) else None


def lost(held: np.ndarray, due: np.ndarray) -> int:
    """Count the iterations that a rank lacks, up to its last one: all ranks take the same steps.

    >>> lost(np.array([0, 2, 4]), np.array([0, 1, 2, 3, 4, 5, 6]))
    2
    """
    return len(np.setdiff1d(due[due <= held[-1]], held)) if len(held) else 0


def _signature(path: Path) -> _Signature | None:
    """Return values that change when a file is written or replaced; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _files(folder: Path) -> list[os.stat_result]:
    """Bytes of each file in a folder, and when it was last written."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # renamed since it was listed
                if entry.is_file(follow_symlinks=False):
                    found.append(entry.stat(follow_symlinks=False))
    return found
