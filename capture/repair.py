"""Close a trace that a killed or failed run left open: keep every committed step, lose none.

An open segment is copied, committed rows only, into a file that takes its final name once it is whole and on disk;
only then is the open one removed. Interrupted at any point, repair can simply run again.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np

from gradlab.capture.writing.folder import DAMAGED, NEW, REPAIR, lock_rank, unlock_rank
from gradlab.capture.writing.segment import SegmentWriter
from gradlab.errors import GradlabError, NewerFormat
from gradlab.trace.checking import committed_segments
from gradlab.trace.rules import folder_problems, index_problems
from gradlab.trace.schema import (
    INDEX,
    PART,
    Manifest,
    RankIndex,
    block_steps,
    rank_folder,
    ranks_there,
    read_index,
    read_manifest,
    segment_name,
    segment_numbers,
    write_index,
)
from gradlab.trace.segment import SegmentReader


@dataclass(frozen=True)
class RepairedRank:
    """One rank after `repair`: the steps it holds and lacks, whether anything had to be done, and what is amiss."""

    rank: int
    steps: int
    steps_lost: int  # what its index says; written by repair: iterations that other ranks hold and this one does not
    changed: bool
    problems: tuple[str, ...]  # what could not be mended or kept, a line each


def repair(path: str | os.PathLike[str]) -> list[RepairedRank]:
    """Close all ranks of a trace. A rank that is closed already is left alone.

    >>> from gradlab.capture import repair
    >>> [(row.rank, row.steps, row.changed) for row in repair("trace")]
    [(0, 40, False), (1, 40, False)]

    Args:
        path: the trace's folder.

    Returns:
        One row per rank that has a folder, and one for the first that has none. A rank that cannot be repaired says
        why, and the others are repaired all the same.

    Raises:
        GradlabError: if there is no manifest that can be read.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    # All ranks take the same steps, so whatever one of them recorded was due on every other.
    there = sorted(rank for rank in ranks_there(folder) if rank < manifest.world_size)
    due = reduce(np.union1d, [_readable_iterations(folder, manifest, rank) for rank in there], np.zeros(0, np.int64))
    rows = [_repair_rank(folder, manifest, rank, due) for rank in there]
    if len(there) == manifest.world_size:
        return rows
    absent = next(rank for rank, other in enumerate([*there, None]) if rank != other)
    return [*rows, RepairedRank(absent, 0, 0, False, tuple(folder_problems(folder, manifest)[-1:]))]


def _readable_iterations(folder: Path, manifest: Manifest, rank: int) -> np.ndarray:
    """Iterations that a rank has committed, int64, as far as its segments can be opened."""
    iterations = [np.zeros(0, np.int64)]
    for number, suffix in committed_segments(folder, rank, None):
        path = folder / rank_folder(rank) / (segment_name(number) + suffix)
        with (
            contextlib.suppress(GradlabError),
            closing(SegmentReader(path, manifest, rank, number, swmr=bool(suffix))) as segment,
        ):
            iterations.append(segment.records["index"])
    return np.concatenate(iterations)


def _repair_rank(folder: Path, manifest: Manifest, rank: int, due: np.ndarray) -> RepairedRank:
    try:
        lock = lock_rank(folder, rank)
        try:
            for unfinished in (folder / rank_folder(rank)).glob(f".{INDEX}.*.tmp"):  # of a repair that was killed
                unfinished.unlink()
            index = _sound_index(folder, rank)
            if index is None:
                return _close_rank(folder, manifest, rank, due)
            steps = sum(steps for _, steps in index.segments)
            return RepairedRank(
                rank, steps, index.steps_lost, False, tuple(index_problems(folder, manifest, rank, index))
            )
        finally:
            unlock_rank(folder, rank, lock)
    except (OSError, RuntimeError, GradlabError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:300]
        return RepairedRank(rank, 0, 0, False, (line,))


def _sound_index(folder: Path, rank: int) -> RankIndex | None:
    """The rank's index; None also for a damaged one, which can be written anew from the segments."""
    try:
        return read_index(folder, rank)
    except NewerFormat:
        raise
    except GradlabError:
        return None


def _close_rank(folder: Path, manifest: Manifest, rank: int, due: np.ndarray) -> RepairedRank:
    here = folder / rank_folder(rank)
    problems = []
    for number in segment_numbers(here, PART):
        problems += _close_segment(folder, manifest, rank, number)
    for suffix in (NEW, REPAIR):
        for number in segment_numbers(here, suffix):
            (here / (segment_name(number) + suffix)).unlink()
    segments: list[tuple[int, int]] = []
    for number in segment_numbers(here):
        path = here / segment_name(number)
        try:
            with closing(SegmentReader(path, manifest, rank, number)) as segment:
                segments.append((number, segment.committed))
        except GradlabError as error:
            problems.append(_set_aside(path, path, error))
    held = _readable_iterations(folder, manifest, rank)
    lost = len(np.setdiff1d(due, held))
    write_index(folder, RankIndex(manifest.run, rank, tuple(segments), lost, "repaired"))
    return RepairedRank(rank, len(held), lost, True, tuple(problems))


def _set_aside(path: Path, final: Path, error: GradlabError) -> str:
    """Rename a segment that cannot be opened, so that the index need not name it; the line that says so."""
    damaged = final.with_name(final.name + DAMAGED)
    os.replace(path, damaged)
    return f"{error}; kept as {damaged.name}"


def _close_segment(folder: Path, manifest: Manifest, rank: int, number: int) -> list[str]:
    """Make an open segment a closed one; a file of which something cannot be read stays beside it, as `.damaged`."""
    final = folder / rank_folder(rank) / segment_name(number)
    part, damaged = final.with_name(final.name + PART), final.with_name(final.name + DAMAGED)
    try:
        reader = SegmentReader(part, manifest, rank, number, swmr=True)
    except NewerFormat:
        raise
    except GradlabError as error:
        return [_set_aside(part, final, error)]
    try:
        # A final file is there already if an earlier repair was killed just before it removed the open one.
        problems = [] if final.exists() or not reader.committed else _copy(reader, folder, manifest, rank, number)
    finally:
        reader.close()
    if problems:
        os.replace(part, damaged)
        return [f"{problem}; this step is left out, the file kept as {damaged.name}" for problem in problems]
    part.unlink()
    return []


def _copy(reader: SegmentReader, folder: Path, manifest: Manifest, rank: int, number: int) -> list[str]:
    """Copy all steps that can be read and match their checksums; a line for each one that cannot."""
    rows = block_steps(manifest.row_bytes, reader.committed)
    writer = SegmentWriter(folder, manifest, rank, number, suffix=REPAIR, rows=rows)
    problems: list[str] = []
    try:
        for start in range(0, reader.committed, rows):
            stop = min(start + rows, reader.committed)
            try:
                _copy_rows(reader, writer, manifest, start, stop)
            except GradlabError:
                problems += _copy_singly(reader, writer, manifest, start, stop)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return problems


def _copy_rows(reader: SegmentReader, writer: SegmentWriter, manifest: Manifest, start: int, stop: int) -> None:
    rows = [reader.read_stored(layer, start, stop) for layer in manifest.layers]
    writer.append(rows, reader.records[start:stop], reader.unused[start:stop])


def _copy_singly(reader: SegmentReader, writer: SegmentWriter, manifest: Manifest, start: int, stop: int) -> list[str]:
    problems = []
    for row in range(start, stop):
        try:
            _copy_rows(reader, writer, manifest, row, row + 1)
        except GradlabError as error:
            problems.append(str(error))
    return problems
