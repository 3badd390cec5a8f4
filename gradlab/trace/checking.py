"""Check a trace, closed or left by a killed run: read every committed value and compare its checksum."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np

from gradlab.errors import GradlabError
from gradlab.trace.rules import count_problems, empty_problems, folder_problems, index_problems, order_problems, remarks
from gradlab.trace.schema import (
    PART,
    Manifest,
    RankIndex,
    rank_folder,
    ranks_there,
    read_index,
    read_manifest,
    rows_at_once,
    segment_name,
    segment_numbers,
)
from gradlab.trace.segment import SegmentReader


@dataclass(frozen=True)
class RankCheck:
    """The result of `check` for one rank of a trace."""

    rank: int
    steps: int  # committed
    closed: bool  # whether the rank closed its recording
    segments: int  # files
    steps_lost: int  # due, but not recorded
    problems: tuple[str, ...]  # one line each


@dataclass(frozen=True)
class TraceCheck:
    """Findings of `check` saw in a trace."""

    path: Path
    ranks: tuple[RankCheck, ...]
    common_steps: int  # iterations that are committed on every rank
    shared_problems: tuple[str, ...] = ()  # of the trace as a whole, not of one rank

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def closed(self) -> bool:
        """Whether every rank closed its recording; otherwise `gradlab trace repair` is needed before reading."""
        return all(rank.closed for rank in self.ranks)

    @property
    def problems(self) -> tuple[str, ...]:
        """All problems, one line each; empty for a sound trace."""
        return (*(problem for rank in self.ranks for problem in rank.problems), *self.shared_problems)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes that are no problems, one line each: ranks that hold different numbers of steps."""
        return remarks([rank.steps for rank in self.ranks], self.common_steps)

    @property
    def ok(self) -> bool:
        """Whether the trace is closed and free of problems: then `Trace` opens it and reads every value."""
        return self.closed and not self.problems


def check(path: str | os.PathLike[str]) -> TraceCheck:
    """Read everything that a trace has committed, and report steps and problems.

    >>> from gradlab.trace import check
    >>> found = check("trace")
    >>> [(rank.steps, rank.problems) for rank in found.ranks]
    [(40, ()), (40, ())]

    Raises:
        GradlabError: if the manifest cannot be read; other problems are reported in the result.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    rows, iterations, there = [], [], ranks_there(folder)
    for rank in range(manifest.world_size):
        if rank not in there:
            rows.append(RankCheck(rank, 0, False, 0, 0, ()))
            continue
        row, committed = _check_rank(folder, manifest, rank)
        rows.append(row)
        iterations.append(committed)
    common = len(reduce(np.intersect1d, iterations)) if len(iterations) == len(rows) else 0
    shared = folder_problems(folder, manifest)
    if all(row.closed for row in rows):  # an open recording may still get steps
        shared += empty_problems(folder, [row.steps for row in rows], common)
    return TraceCheck(folder, tuple(rows), common, tuple(shared))


def _check_rank(folder: Path, manifest: Manifest, rank: int) -> tuple[RankCheck, np.ndarray]:
    """Check one rank; return its report and the iterations that it committed, int64 (steps,)."""
    problems: list[str] = []
    index: RankIndex | None = None
    try:
        index = read_index(folder, rank)
    except GradlabError as error:
        problems.append(str(error))
    if index is not None:
        problems += index_problems(folder, manifest, rank, index)
    parts = committed_segments(folder, rank, index)
    by_segment: dict[int, np.ndarray] = {}
    for number, suffix in parts:
        iterations, wrong = _check_segment(folder, manifest, rank, number, suffix)
        problems += wrong
        if iterations is not None:
            by_segment[number] = iterations
    if index is not None:
        problems += count_problems(folder, index, {number: len(part) for number, part in by_segment.items()})
    steps = np.concatenate([np.zeros(0, np.int64), *(by_segment[n] for n, _ in parts if n in by_segment)])
    problems += order_problems(folder, rank, steps)
    lost = index.steps_lost if index else 0
    return RankCheck(rank, len(steps), index is not None, len(parts), lost, tuple(problems)), steps


def committed_segments(folder: Path, rank: int, index: RankIndex | None) -> list[tuple[int, str]]:
    """List (number, suffix) of the segments that count: those in the index; without an index, all in the folder."""
    here = folder / rank_folder(rank)
    closed = segment_numbers(here)
    if index is not None:
        return [(number, "") for number, _ in index.segments if number in closed]
    only_open = [(number, PART) for number in segment_numbers(here, PART) if number not in closed]
    return sorted([(number, "") for number in closed] + only_open)


def _check_segment(
    folder: Path, manifest: Manifest, rank: int, number: int, suffix: str
) -> tuple[np.ndarray | None, list[str]]:
    """Return a segment's committed iterations (None if it cannot be opened), and its problems."""
    path = folder / rank_folder(rank) / (segment_name(number) + suffix)
    try:
        segment = SegmentReader(path, manifest, rank, number, swmr=suffix == PART)
    except GradlabError as error:
        return None, [str(error)]
    try:
        return segment.records["index"], _row_problems(segment, manifest)
    finally:
        segment.close()


def _row_problems(segment: SegmentReader, manifest: Manifest) -> list[str]:
    problems = []
    for layer in manifest.layers:
        rows = rows_at_once(layer.numel)
        for start in range(0, segment.committed, rows):
            try:
                segment.verify(layer, start, min(start + rows, segment.committed))
            except GradlabError as error:
                problems.append(str(error))
    return problems
