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
    STEP_DTYPE,
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
        iterations: iterations of any rank, int64 (T,), ascending.
        losses: the mean over those ranks that committed the iteration and annotated it, float64 (T,); NaN: none did.
        non_finite: elements that are infinite or NaN in all, int64.
        nbytes: bytes of all files.
        written: when a file was last written, seconds since 1970.
        problems: problems of all ranks, one line each.
    """

    manifest: Manifest
    ranks: tuple[RankProgress, ...]
    common_steps: int
    iterations: np.ndarray
    losses: np.ndarray
    non_finite: int
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
    """One segment: its file as it was last read, its records, and what was wrong with it."""

    signature: _Signature | None = None
    records: np.ndarray = field(default_factory=lambda: np.zeros(0, STEP_DTYPE))
    problem: str = ""
    failed: _Signature | None = None  # the file at the last look that could not read it


@dataclass(frozen=True)
class _RankLook:
    """One look at one rank's folder: its index, its records (`STEP_DTYPE`), its files, what is wrong."""

    rank: int
    index: RankIndex | None
    records: np.ndarray
    files: list[tuple[int, float]]
    problems: list[str]

    @property
    def iterations(self) -> np.ndarray:
        return self.records["index"]


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
        there = sorted(rank for rank in ranks_there(self._folder) if rank < self._manifest.world_size)
        looks = [self._look_at(rank) for rank in there]
        due = reduce(np.union1d, [look.iterations for look in looks], np.zeros(0, np.int64))
        return self._progress(tuple(_rank_progress(look, due) for look in looks), looks)

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

    def _progress(self, ranks: tuple[RankProgress, ...], looks: list[_RankLook]) -> TraceProgress:
        records = np.concatenate([np.zeros(0, STEP_DTYPE), *(look.records for look in looks)])
        iterations, place = np.unique(records["index"], return_inverse=True)
        complete = len(ranks) == self._manifest.world_size
        files = [*_files(self._folder), *(one for look in looks for one in look.files)]
        return TraceProgress(
            manifest=self._manifest,
            ranks=ranks,
            common_steps=len(reduce(np.intersect1d, [look.iterations for look in looks])) if complete else 0,
            iterations=iterations,
            losses=mean_by_place(records["loss"], place, len(iterations)),
            non_finite=int(records["non_finite"].sum()),
            nbytes=sum(size for size, _ in files),
            written=max((time for _, time in files), default=0.0),
            problems=tuple(problem for look in looks for problem in look.problems),
        )

    def _look_at(self, rank: int) -> _RankLook:
        index, problems = _index(self._folder, rank)
        records = [np.zeros(0, STEP_DTYPE)]
        for number, suffix in self._listed(rank, index):
            segment = self._segments.setdefault((rank, number), _Segment())
            self._read_segment(segment, rank, number, suffix)
            records.append(segment.records)
            problems += [segment.problem] if segment.problem else []
        files = _files(self._folder / rank_folder(rank))
        return _RankLook(rank, index, np.concatenate(records), files, problems)

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
                segment.records, segment.signature = reader.records, signature
                segment.problem, segment.failed = "", None
        except GradlabError as error:
            segment.problem = str(error) if segment.failed == signature else ""
            segment.failed = signature


def _rank_progress(look: _RankLook, due: np.ndarray) -> RankProgress:
    """due: iterations of any rank."""
    iterations, index = look.iterations, look.index
    return RankProgress(
        rank=look.rank,
        steps=len(iterations),
        last_iteration=int(iterations[-1]) if len(iterations) else None,
        steps_lost=index.steps_lost if index else lost(iterations, due),
        nbytes=sum(size for size, _ in look.files),
        closed=index is not None,
    )


def lost(held: np.ndarray, due: np.ndarray) -> int:
    """Count the iterations that a rank lacks, up to its last one: all ranks take the same steps.

    >>> lost(np.array([0, 2, 4]), np.array([0, 1, 2, 3, 4, 5, 6]))
    2
    """
    return len(np.setdiff1d(due[due <= held[-1]], held)) if len(held) else 0


def mean_by_place(values: np.ndarray, place: np.ndarray, count: int) -> np.ndarray:
    """Average float64 values (S,) that are numbers by their places, int64 (S,): float64 (count,), NaN where there is
    none."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):  # infinities of both signs, and places without a number
        sums = np.bincount(place[known], values[known], count)
        return np.asarray(sums / np.bincount(place[known], minlength=count))


def _index(folder: Path, rank: int) -> tuple[RankIndex | None, list[str]]:
    try:
        return read_index(folder, rank), []
    except GradlabError as error:
        return None, [str(error)]


def _signature(path: Path) -> _Signature | None:
    """Return values that change when a file is written or replaced; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _files(folder: Path) -> list[tuple[int, float]]:
    """Bytes of each file in a folder, and when it was last written, in seconds since 1970."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # renamed since it was listed
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_size, status.st_mtime))
    return found
