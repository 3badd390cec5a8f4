"""Check a trace, whole or left behind by a killed run: read every committed value and compare its checksum."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np

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
)
from gradlab.trace_segment import SegmentReader


@dataclass(frozen=True)
class RankCheck:
    """What one rank holds: committed steps, whether its recording was closed, and problems in a line each."""

    rank: int
    steps: int
    closed: bool
    segments: int
    steps_lost: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class TraceCheck:
    """What a trace holds: one row per rank, and the iterations that are committed on every rank."""

    path: Path
    ranks: tuple[RankCheck, ...]
    common_steps: int

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
        return tuple(problem for rank in self.ranks for problem in rank.problems)

    @property
    def ok(self) -> bool:
        """Whether the trace is closed and free of problems."""
        return self.closed and not self.problems


def check(path: str | os.PathLike[str]) -> TraceCheck:
    """Read everything that a trace has committed.

    Raises:
        GradlabError: if there is no manifest that can be read; all else is reported per rank.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    rows, indices = [], []
    for rank in range(manifest.world_size):
        row, steps = _check_rank(folder, manifest, rank)
        rows.append(row)
        indices.append(steps)
    return TraceCheck(folder, tuple(rows), len(reduce(np.intersect1d, indices)))


def _check_rank(folder: Path, manifest: Manifest, rank: int) -> tuple[RankCheck, np.ndarray]:
    problems: list[str] = []
    index: RankIndex | None = None
    try:
        index = read_index(folder, rank)
    except GradlabError as error:
        problems.append(str(error))
    if not (folder / rank_folder(rank)).is_dir():
        problems.append(f"{folder / rank_folder(rank)}: missing")
    parts, problem = _segments_to_check(folder, rank, index)
    problems += problem
    steps: list[np.ndarray] = []
    for number, suffix in parts:
        found, problem = _check_segment(folder, manifest, rank, number, suffix)
        problems += problem
        steps.append(found)
    problems += _count_problems(
        folder, rank, index, {number: len(found) for (number, _), found in zip(parts, steps, strict=True)}
    )
    all_steps = np.concatenate([np.zeros(0, np.int64), *steps])
    lost = index.steps_lost if index else 0
    row = RankCheck(rank, len(all_steps), index is not None, len(parts), lost, tuple(problems))
    return row, all_steps


def _segments_to_check(folder: Path, rank: int, index: RankIndex | None) -> tuple[list[tuple[int, str]], list[str]]:
    """(number, suffix) of the segments that exist, and a line for each one that the index names in vain."""
    here = folder / rank_folder(rank)
    closed, still_open = segment_numbers(here), segment_numbers(here, PART)
    if index is None:
        only_open = [(number, PART) for number in still_open if number not in closed]
        return sorted([(number, "") for number in closed] + only_open), []
    named = [number for number, _ in index.segments]
    missing = [f"{here / segment_name(number)}: missing" for number in named if number not in closed]
    return [(number, "") for number in named if number in closed], missing


def _count_problems(folder: Path, rank: int, index: RankIndex | None, found: dict[int, int]) -> list[str]:
    return [
        f"{folder / rank_folder(rank) / segment_name(number)}: {found[number]} readable steps, its index says {steps}"
        for number, steps in (index.segments if index else ())
        if number in found and found[number] != steps
    ]


def _check_segment(
    folder: Path, manifest: Manifest, rank: int, number: int, suffix: str
) -> tuple[np.ndarray, list[str]]:
    """Iterations that a segment has committed, and what is wrong with them."""
    path = folder / rank_folder(rank) / (segment_name(number) + suffix)
    try:
        segment = SegmentReader(path, manifest, rank, number, swmr=suffix == PART)
    except GradlabError as error:
        return np.zeros(0, np.int64), [str(error)]
    problems = []
    try:
        for layer in manifest.layers:
            for start in range(0, segment.committed, CHUNK_STEPS):
                try:
                    segment.read_stored(layer, start, min(start + CHUNK_STEPS, segment.committed))
                except GradlabError as error:
                    problems.append(str(error))
    finally:
        segment.close()
    return segment.records["index"], problems
