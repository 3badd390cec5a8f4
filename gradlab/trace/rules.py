"""Rules for a trace beyond each single segment, which `Trace` enforces and `check` reports.

Every rule returns a line per violation, so that `Trace` can raise the first and `check` can list all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gradlab.trace.schema import Manifest, RankIndex, rank_folder, ranks_there, segment_name, segment_numbers


def folder_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Check that the folders are those of the manifest's ranks, no more and no fewer."""
    there, expected = ranks_there(folder), set(range(manifest.world_size))
    head = f"{folder}: ranks disagree, the manifest has {manifest.world_size}, but"
    surplus = [f"{head} {rank_folder(rank)} is there" for rank in sorted(there - expected)[:1]]
    return surplus + [f"{head} no {rank_folder(rank)}" for rank in sorted(expected - there)[:1]]


def index_problems(folder: Path, manifest: Manifest, rank: int, index: RankIndex) -> list[str]:
    """Check that the index belongs to `rank` and to this run, and names exactly the closed segments in the folder."""
    if index.rank != rank or index.run != manifest.run:
        return [f"{folder}: {rank_folder(rank)} disagrees with the manifest, it is of another run"]
    here = folder / rank_folder(rank)
    named, there = {number for number, _ in index.segments}, set(segment_numbers(here))
    missing = [f"{here / segment_name(n)}: missing, though the index of rank {rank} names it" for n in named - there]
    surplus = [
        f"{here / segment_name(n)}: there, though the index of rank {rank} does not name it" for n in there - named
    ]
    return sorted(missing) + sorted(surplus)


def count_problems(folder: Path, index: RankIndex, committed: Mapping[int, int]) -> list[str]:
    """Check segments' numbers of steps against the index. committed: segment number -> steps, where readable."""
    return [
        f"{folder / rank_folder(index.rank) / segment_name(number)}: damaged, {committed[number]} committed steps, "
        f"its index says {steps}"
        for number, steps in index.segments
        if number in committed and committed[number] != steps
    ]


def order_problems(folder: Path, rank: int, iterations: np.ndarray) -> list[str]:
    """Check that one rank's iterations, int64 (steps,), ascend."""
    ascending = bool((np.diff(iterations) > 0).all())
    return [] if ascending else [f"{folder}: rank {rank}: iterations are not in ascending order"]


def empty_problems(folder: Path, rank_steps: Sequence[int], common_steps: int) -> list[str]:
    """Check that every rank holds at least one common iteration."""
    if common_steps:
        return []
    held = ", ".join(map(str, rank_steps))
    return [
        f"{folder}: empty trace, no step is common to all ranks (steps per rank: {held}); "
        "record again, and read the training's own error if it ended early"
    ]


def remarks(rank_steps: Sequence[int], common_steps: int) -> tuple[str, ...]:
    """Return notes that are no errors, one line each: ranks hold steps that other ranks lack."""
    least, most = min(rank_steps), max(rank_steps)
    if most == common_steps:
        return ()
    held = f"{least} to {most}" if least < most else f"{most}"
    return (f"ranks hold {held} steps each; the {common_steps} that all ranks hold are read, the others are not",)


def pass_remark(iterations: np.ndarray, optimizer_steps: np.ndarray) -> str:
    """Return that several synchronised backward passes came between optimizer steps, int64 (steps,) each, or "". A
    second pass brings the ranks' average of the first one, or what is left of it, beside this rank's gradient."""
    if not len(iterations) or optimizer_steps.min() < 0 or not optimizer_steps.max():
        return ""
    passes, steps = iterations[-1] - iterations[0], optimizer_steps[-1] - optimizer_steps[0]
    if passes <= steps:
        return ""
    return (
        f"{passes} synchronised backward passes for {steps} optimizer steps: gradients may hold what an earlier pass "
        "averaged; record with no_sync() around forward and backward of all passes but the last, and with "
        "requires_grad_(False) on this model while another network's loss passes through it"
    )
