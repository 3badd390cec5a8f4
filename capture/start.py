"""Start a recording: check everything on all ranks, then start the trace and its writer thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from gradlab.capture.budget import Recording, plan_recording
from gradlab.capture.layers import LayerChoice, choose_layers
from gradlab.capture.settings import (
    RecorderSettings,
    announce,
    check_metadata,
    optimizer_metadata,
    run_metadata,
    warn_of_missing,
)
from gradlab.capture.sources import Source, model_of, trace_rank, trace_ranks
from gradlab.capture.writing.async_writer import AsyncWriter, NoWriter
from gradlab.capture.writing.buffers import BufferPool
from gradlab.capture.writing.folder import require_free, start_together
from gradlab.capture.writing.rank_writer import RankWriter
from gradlab.ddp.model import refuse_complex
from gradlab.ddp.optimizers import HeldLayers, check_optimizer_and_scaler
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.trace.schema import Manifest
from gradlab.version import VERSION

Chosen = Sequence[tuple[Layer, nn.Parameter]]


def start_recording(
    source: Source,
    path: Path,
    settings: RecorderSettings,
    layers: LayerChoice,
    wrap: Any,
    metadata: dict[str, Any],
    overwrite: bool,
    training: tuple[Any, Any] = (None, None),
) -> tuple[Chosen, Recording, AsyncWriter | NoWriter, HeldLayers]:
    """Check everything, start the trace and its writer. A collective of the source's ranks; all raise the same line.

    Returns the recorded layers with their parameters; what of them, and which steps; the writer; and the layers by the
    optimizers that hold them. Nothing has been written after an error, unless a disk failed on the way.
    """
    ranks, world_size = source.ranks, trace_ranks(source)
    problem: str | None = None
    chosen: Chosen = ()
    size: Recording | None = None
    held = HeldLayers(None)
    try:
        settings.check()
        check_optimizer_and_scaler(*training)
        check_metadata(metadata)
        _check_wrap(wrap)
        source.check()
        chosen = choose_layers(source.pairs, layers)
        refuse_complex(chosen)
        held = HeldLayers(training[0], {parameter: layer.name for layer, parameter in chosen})
        source.require_averaged(chosen)
        size = plan_recording([layer for layer, _ in chosen], world_size, settings, metadata)
        require_free(path, overwrite)
    except GradlabError as error:
        problem = str(error)
    ranks.raise_together(problem)
    assert size is not None
    ranks.require_same(vars(settings) | {"layers": [layer.to_json() for layer, _ in chosen]})
    settings = replace(settings, every=size.settings.every, max_steps=size.settings.max_steps)
    warn_of_missing(held)
    if (scaler := training[1]) is not None and scaler.is_enabled():
        metadata = {"loss_scaler": True} | metadata
    metadata = _metadata(source, settings, wrap) | optimizer_metadata(held) | metadata
    samples = {sample.layer.name: sample for sample in size.samples}
    model = tuple(layer for layer, _ in source.pairs) if len(chosen) < len(source.pairs) else ()
    manifest = Manifest(world_size, size.layers, settings.dtype, metadata, samples=samples, model=model)
    manifest = start_together(path, manifest, overwrite, ranks)
    if ranks.rank == 0:
        announce(path, size, settings)
    pinned = any(parameter.is_cuda for _, parameter in chosen)
    return chosen, size, _start_writer(path, manifest, settings, source, pinned, size.steps), held


def train_in_trial(
    model: nn.Module, path: str | os.PathLike[str], within: Any, between: Any, optimizer: Any, scaler: Any
) -> NoWriter:
    """In a run that `gradlab pilot` has started, let the trial's plan average a model's gradients (with `between`,
    FSDP2's shards), and record nothing.
    """
    from gradlab import compress

    nodes = {name: value for name, value in {"within": within, "between": between}.items() if value is not None}
    compress(model, path, optimizer=optimizer, scaler=scaler, **nodes)
    return NoWriter(str(path))


def _start_writer(
    path: Path, manifest: Manifest, settings: RecorderSettings, source: Source, pinned: bool, most_steps: int | None
) -> AsyncWriter | NoWriter:
    rank_writer, problem = None, None
    rank = trace_rank(source)
    try:
        if rank is not None:
            rank_writer = RankWriter(path, manifest, rank, settings.segment_bytes, most_steps)
    except (OSError, GradlabError) as error:
        problem = str(error)
    try:
        source.ranks.raise_together(problem)
    except GradlabError:
        if rank_writer is not None:
            rank_writer.abandon()
        raise
    if rank_writer is None:
        return NoWriter(str(path))
    # One more for the step that the hook fills, and one for the step that waits for annotations.
    pool = BufferPool(manifest.layers, manifest.dtype, rank_writer.rows, settings.queue_steps + 2, pinned)
    return AsyncWriter(rank_writer, pool, settings, str(path))


def attached_by(framework: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A recorder's options with the framework in the trace's metadata, for the lines that train with a plan."""
    given = options.get("metadata") or {}
    return {**options, "metadata": {"attached_by": framework} | given} if isinstance(given, dict) else dict(options)


def _check_wrap(wrap: Any) -> None:
    if wrap is not None and not (isinstance(wrap, tuple) and len(wrap) == 2 and callable(wrap[1])):
        raise GradlabError(f"wrap is {wrap!r}, expected (state, hook) with a communication hook that can be called")


def _metadata(source: Source, settings: RecorderSettings, wrap: Any) -> dict[str, Any]:
    """The manifest's account of the run, unless the user gives one."""
    return {
        "gradlab": VERSION,
        **run_metadata(model_of(source), settings),
        **source.metadata(),
        "hook": getattr(wrap[1], "__qualname__", type(wrap[1]).__name__) if wrap else None,
    }
