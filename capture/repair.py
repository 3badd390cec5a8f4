"""Close a trace that a killed or failed run left open: keep every committed step, lose none.

An open segment is copied, committed rows only, into a file that takes its final name once it is whole and on disk;
only then is the open one removed. Interrupted at any point, repair can simply run again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gradlab.capture.folder import DAMAGED, NEW, REPAIR, lock_rank, unlock_rank
from gradlab.capture.segment import SegmentWriter
from gradlab.errors import GradlabError
from gradlab.trace_schema import (
    CHUNK_STEPS,
    PART,
    Manifest,
    RankIndex,
    rank_folder,
    read_index,
    read_manifest,
    segment_name,
    segment_numbers,
    write_index,
)
from gradlab.trace_segment import SegmentReader


@dataclass(frozen=True)
class RepairedRank:
    """One rank after `repair`: the steps it holds, whether anything had to be done, and what could not be kept."""

    rank: int
    steps: int
    changed: bool
    problems: tuple[str, ...]


def repair(path: str | os.PathLike[str]) -> list[RepairedRank]:
    """Close all ranks of a trace; a rank that is closed already is left alone.

    Returns:
        one row per rank; a rank that cannot be repaired says why, and the others are repaired all the same.
    Raises:
        GradlabError: if there is no manifest that can be read.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    return [_repair_rank(folder, manifest, rank) for rank in range(manifest.world_size)]


def _repair_rank(folder: Path, manifest: Manifest, rank: int) -> RepairedRank:
    here = folder / rank_folder(rank)
    try:
        here.mkdir(exist_ok=True)
        lock = lock_rank(folder, rank)
        try:
            return _close_rank(folder, manifest, rank)
        finally:
            unlock_rank(folder, rank, lock)
    except (OSError, RuntimeError, GradlabError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:300]
        return RepairedRank(rank, 0, False, (line,))


def _close_rank(folder: Path, manifest: Manifest, rank: int) -> RepairedRank:
    here = folder / rank_folder(rank)
    index, problems = None, []
    try:
        index = read_index(folder, rank)
    except GradlabError as error:
        problems.append(f"{error}; written anew")
    if index is not None:
        return RepairedRank(rank, sum(steps for _, steps in index.segments), False, ())
    for number in segment_numbers(here, PART):
        problems += _close_segment(folder, manifest, rank, number)
    for suffix in (NEW, REPAIR):
        for number in segment_numbers(here, suffix):
            (here / (segment_name(number) + suffix)).unlink()
    segments = []
    for number in segment_numbers(here):
        try:
            reader = SegmentReader(here / segment_name(number), manifest, rank, number)
            segments.append((number, reader.committed))
            reader.close()
        except GradlabError as error:
            problems.append(f"{error}; left out")
    write_index(folder, RankIndex(manifest.run, rank, tuple(segments), reason="repaired"))
    return RepairedRank(rank, sum(steps for _, steps in segments), True, tuple(problems))


def _close_segment(folder: Path, manifest: Manifest, rank: int, number: int) -> list[str]:
    """Make an open segment a closed one; a file of which something cannot be read stays beside it, as `.damaged`."""
    final = folder / rank_folder(rank) / segment_name(number)
    part, damaged = final.with_name(final.name + PART), final.with_name(final.name + DAMAGED)
    try:
        reader = SegmentReader(part, manifest, rank, number, swmr=True)
    except GradlabError as error:
        os.replace(part, damaged)
        return [f"{error}; kept as {damaged.name}"]
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
    writer = SegmentWriter(folder, manifest, rank, number, suffix=REPAIR)
    problems: list[str] = []
    try:
        for start in range(0, reader.committed, CHUNK_STEPS):
            stop = min(start + CHUNK_STEPS, reader.committed)
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
