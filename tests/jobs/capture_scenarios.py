"""Scenarios of recording under real DDP; torchrun starts this, tests/capture/test_capture.py reads what each rank
found.

Usage: torchrun --nproc-per-node 3 capture_scenarios.py FOLDER
"""

import copy
import gc
import json
import logging
import resource
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import TraceRecorder
from gradlab.errors import GradlabError
from gradlab.layout import named_layers
from gradlab.plan import Plan
from gradlab.runtime import CompressionState, compression_hook
from gradlab.trace import Trace

STEPS = 5
SLOW_SECONDS = 0.03
DISK_STEPS, DISK_BYTES = 32, 2**20  # a limit that a few blocks of 16 steps exceed


class TwoPaths(nn.Module):
    """Convolution and linear layers in several buckets; `extra` takes part in the loss only when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 16, 60)
        self.extra = nn.Linear(60, 60)
        self.last = nn.Linear(60, 10)

    def forward(self, images: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        hidden = self.hidden(torch.relu(self.norm(self.first(images))).flatten(1)).relu()
        return self.last(self.extra(hidden).relu() if use_extra else hidden)


def parallel_model(**settings: Any) -> DistributedDataParallel:
    torch.manual_seed(1)
    return DistributedDataParallel(TwoPaths(), bucket_cap_mb=0.01, **settings)


def batches(steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        yield torch.randn(4, 1, 6, 6, generator=generator), torch.randint(10, (4,), generator=generator)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], **keywords: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0], **keywords), batch[1])


def train(
    model: DistributedDataParallel,
    recorder: TraceRecorder | None = None,
    steps: int = STEPS,
    zeroed: bool = False,
    apart: bool = False,
    **keywords: Any,
) -> list[dict[str, np.ndarray]]:
    """SGD. apart: return this rank's gradients at each step, computed apart from DDP on a copy of the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for batch in batches(steps):
        if apart:
            history.append(gradients_apart(model, batch, **keywords))
        loss = loss_of(model, batch, **keywords)
        loss.backward()
        if recorder is not None:
            recorder.annotate(loss=loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeroed)
    return history


def gradients_apart(
    model: DistributedDataParallel, batch: tuple[torch.Tensor, torch.Tensor], **keywords: Any
) -> dict[str, np.ndarray]:
    alone = copy.deepcopy(model.module)
    alone.zero_grad(set_to_none=True)
    loss_of(alone, batch, **keywords).backward()
    return {name: _values(parameter) for name, parameter in alone.named_parameters()}


def _values(parameter: torch.Tensor) -> np.ndarray:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.numpy().copy()


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def rows_equal(path: Path, expected: list[dict[str, np.ndarray]]) -> bool:
    """Whether the trace holds exactly the gradients that this rank computed apart, at each recorded iteration."""
    with Trace(path) as trace:
        return all(
            np.array_equal(step.gradients[dist.get_rank()][layer.name], expected[step.index][layer.name])
            for step in trace.iterate()
            for layer in trace.layers
        )


def plain_training_is_unchanged(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, settings in {
        "plain": {},
        "bucket_view": {"gradient_as_bucket_view": True},
        "static_graph": {"static_graph": True},
    }.items():
        reference = parallel_model(**settings)
        train(reference)
        model = parallel_model(**settings)
        with TraceRecorder(model, folder / name, segment_bytes=1) as recorder:
            expected = train(model, recorder, apart=True)
        dist.barrier()
        result[name] = [same_parameters(reference, model), rows_equal(folder / name, expected)]
        if name == "plain":
            result["buckets"] = len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", "))
    return result


def step_values(folder: Path) -> dict[str, Any]:
    model = parallel_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with TraceRecorder(
        model, folder / "t", optimizer=optimizer, scaler=scaler, metadata={"note": "x"}, dtype="bfloat16"
    ) as recorder:
        for number, batch in enumerate(batches(4)):
            with model.no_sync():
                loss_of(model, batch).backward()
            loss = loss_of(model, batch)
            time.sleep(SLOW_SECONDS * (dist.get_rank() == 1))
            if number == 2:
                loss = loss * float("inf")
            loss.backward()
            recorder.annotate(loss=number + 0.5)
            optimizer.zero_grad()
    dist.barrier()
    with Trace(folder / "t") as trace:
        scalars = trace.scalars(dist.get_rank())
        finite = np.isfinite(trace.read("last.weight", dist.get_rank())).all(axis=1)
        return {name: scalars[name].tolist() for name in scalars if name != "unused"} | {
            "finite": finite.tolist(),
            "metadata": trace.metadata,
        }


def waits_for_buffers(folder: Path) -> dict[str, Any]:
    """The rank whose buffers all take comes late, so that the others wait for it in their forward passes."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)))
    with TraceRecorder(model, folder / "t"):
        for _ in range(5):
            time.sleep(SLOW_SECONDS * (dist.get_rank() == 0))
            model(torch.randn(8, 4)).sum().backward()
    left = [len(module._forward_pre_hooks) for module in (model, model.module)]
    dist.barrier()
    with Trace(folder / "t") as trace:
        waited = trace.scalars(dist.get_rank())["waited"]
    return {"waited": float(np.median(waited[1:])), "left": left}


def choice_of_steps_and_layers(folder: Path) -> dict[str, Any]:
    model = parallel_model()
    with TraceRecorder(
        model, folder / "t", layers=["first.*", "last.weight"], every=3, start=1, max_steps=2
    ) as recorder:
        expected = train(model, recorder, apart=True)
    train(model)
    with Trace(folder / "t") as trace:
        layers, steps = [layer.name for layer in trace.layers], trace.steps.tolist()
    equal = rows_equal(folder / "t", expected)
    return {"layers": layers, "steps": steps, "equal": equal, "timed": len(recorder._clock._own)}


def unused_layers(folder: Path) -> dict[str, Any]:
    model = parallel_model(find_unused_parameters=True)
    with TraceRecorder(model, folder / "t") as recorder:
        expected = train(model, recorder, apart=True, steps=4, use_extra=dist.get_rank() != 1)
    dist.barrier()
    with Trace(folder / "t") as trace:
        unused = trace.scalars(dist.get_rank())["unused"]
        names = [layer.name for layer, bit in zip(trace.layers, unused.all(axis=0), strict=True) if bit]
    return {
        "unused": names,
        "same_every_step": bool((unused == unused[0]).all()),
        "equal": rows_equal(folder / "t", expected),
    }


def wrapped_hook(folder: Path) -> dict[str, Any]:
    reference = parallel_model()
    reference.register_comm_hook(None, allreduce_hook)
    train(reference)
    model = parallel_model()
    with TraceRecorder(model, folder / "t", wrap=(None, allreduce_hook)) as recorder:
        expected = train(model, recorder, apart=True)
    dist.barrier()
    return {"same": same_parameters(reference, model), "equal": rows_equal(folder / "t", expected)}


def wrapped_compression(folder: Path) -> dict[str, Any]:
    """The runtime's hook does the averaging: gradients are recorded before it encodes them."""

    def state_of(model: DistributedDataParallel) -> CompressionState:
        plan = Plan.uniform(model, "powersgd", rank=1, minimum_numel=1, warmup_steps=3, error_feedback=True)
        return CompressionState(plan, model)

    plain = parallel_model()
    train(plain)
    reference = parallel_model()
    with state_of(reference) as state:
        reference.register_comm_hook(state, compression_hook)
        train(reference)
    model = parallel_model()
    with (
        state_of(model) as state,
        TraceRecorder(model, folder / "t", wrap=(state, compression_hook)) as recorder,
    ):
        expected = train(model, recorder, apart=True)
    dist.barrier()
    with Trace(folder / "t") as trace:
        hook = trace.metadata["hook"]
    return {
        "hook": hook,
        "compressed_differs_from_plain": not same_parameters(plain, model),
        "same": same_parameters(reference, model),
        "equal": rows_equal(folder / "t", expected),
    }


def zeroed_bucket_views(folder: Path) -> dict[str, Any]:
    """Gradients live in the buckets and are zeroed: plain DDP divides by N then, and a hook cannot know."""
    reference = parallel_model(gradient_as_bucket_view=True)
    train(reference, zeroed=True)
    model = parallel_model(gradient_as_bucket_view=True)
    with TraceRecorder(model, folder / "t") as recorder:
        expected = train(model, recorder, apart=True, zeroed=True)
    dist.barrier()
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    return {
        "largest_difference": max(float((one - other).detach().abs().max()) for one, other in pairs),
        "equal": rows_equal(folder / "t", expected),
    }


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def full_disk(folder: Path) -> dict[str, Any]:
    """Rank 1 may write files of so many bytes at most: its disk is full after a few blocks."""
    steps = DISK_STEPS
    reference = parallel_model()
    train(reference, steps=steps)
    model = parallel_model()
    log = _Log()
    logging.getLogger("gradlab.capture").addHandler(log)
    recorder = TraceRecorder(model, folder / "t")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, limits[1]))
    train(model, recorder, steps=steps)
    report = recorder.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logging.getLogger("gradlab.capture").removeHandler(log)
    dist.barrier()
    result = {
        "same": same_parameters(reference, model),
        "written": report.steps_written,
        "lost": report.steps_lost,
        "reason": report.reason,
        "text": str(report),
        "log": log.lines,
        "again": recorder.close() == report,
    }
    dist.barrier()
    return result


def slow_disk(folder: Path) -> dict[str, Any]:
    """The writer cannot keep up: it stands still while this rank holds the library's lock around HDF5."""
    import h5py

    model = parallel_model()
    recorder = TraceRecorder(model, folder / "t", on_full="drop", queue_steps=2, flush_seconds=0.01)
    with h5py._objects.phil:
        train(model, recorder, steps=40)
    report = recorder.close()
    dist.barrier()
    with Trace(folder / "t") as trace:
        lost = trace.steps_lost[dist.get_rank()]
        return {"written": report.steps_written, "lost": report.steps_lost, "held": trace.rank_steps, "index": lost}


def failed_backward(folder: Path) -> dict[str, Any]:
    """A wrapped hook fails once, half-way through a backward pass, on all ranks."""
    failures = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if recorder._iteration == 2 and bucket.index() == 1 and not failures:
            failures.append(bucket.index())
            raise RuntimeError("a hook that fails")
        return allreduce_hook(None, bucket)

    model = parallel_model()
    recorder = TraceRecorder(model, folder / "t", wrap=(None, hook))
    try:
        train(model, recorder)
        message = "nothing"
    except RuntimeError as error:
        message = str(error)
    report = recorder.close()
    dist.barrier()
    return {"message": message, "written": report.steps_written, "lost": report.steps_lost}


def refusals(folder: Path) -> dict[str, Any]:
    """Each refusal's line; every rank must see the same one, though often one rank alone is at fault."""
    rank = dist.get_rank()
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "precious").write_text("keep")
    (folder / "file").write_text("keep")
    dist.barrier()
    attached = parallel_model()
    TraceRecorder(attached, folder / "first").close()
    built_in = parallel_model()
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    attempts: dict[str, Callable[[], Any]] = {
        "twice": lambda: TraceRecorder(attached, folder / "second"),
        "built_in": lambda: TraceRecorder(built_in, folder / "second"),
        "not_ddp": lambda: TraceRecorder(TwoPaths(), folder / "second"),  # type: ignore[arg-type]
        "not_empty": lambda: TraceRecorder(parallel_model(), folder / "first"),
        "foreign": lambda: TraceRecorder(parallel_model(), folder / "other", overwrite=True),
        "file": lambda: TraceRecorder(parallel_model(), folder / "file"),
        "no_such_layer": lambda: TraceRecorder(
            parallel_model(), folder / "second", layers="lost.*" if rank == 1 else None
        ),
        "disagree": lambda: TraceRecorder(parallel_model(), folder / "second", every=1 + rank),
        "every": lambda: TraceRecorder(parallel_model(), folder / "second", every=0),
        "optimizer": lambda: TraceRecorder(parallel_model(), folder / "second", optimizer="sgd"),  # type: ignore[arg-type]
        "scaler": lambda: TraceRecorder(parallel_model(), folder / "first", scaler=5, overwrite=True),
        "complex": lambda: TraceRecorder(
            DistributedDataParallel(torch.nn.Linear(2, 2, dtype=torch.complex64)), folder / "second"
        ),
        "metadata": lambda: TraceRecorder(parallel_model(), folder / "second", metadata={"x": object()}),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            messages[name] = "accepted"
        except GradlabError as error:
            messages[name] = str(error)
        dist.barrier()
    messages["kept"] = (folder / "other" / "precious").read_text() + (folder / "file").read_text()
    messages["first_exists"] = str((folder / "first" / "manifest.json").exists())
    messages["second_exists"] = str((folder / "second").exists())
    return messages


def overwritten(folder: Path) -> dict[str, Any]:
    for steps in (5, 3):
        model = parallel_model()
        with TraceRecorder(model, folder / "t", overwrite=True, layers="last.bias") as recorder:
            train(model, recorder, steps=steps)
        dist.barrier()
    with Trace(folder / "t") as trace:
        whole = trace.model_layers == tuple(layer for layer, _ in named_layers(model))
        return {"steps": trace.steps.tolist(), "whole": whole, "recorded": [layer.name for layer in trace.layers]}


def one_rank_alone(folder: Path) -> dict[str, Any]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    reference = parallel_model(process_group=groups[rank])
    train(reference)
    model = parallel_model(process_group=groups[rank])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = TraceRecorder(model, folder / f"alone-{rank}")
    with recorder:
        train(model, recorder)
    with Trace(folder / f"alone-{rank}") as trace:
        steps = trace.steps.tolist()
    return {
        "warnings": [str(entry.message) for entry in caught],
        "steps": steps,
        "same": same_parameters(reference, model),
    }


def separate_machines(folder: Path) -> dict[str, Any]:
    """Ranks that share no folder; their parts are put together by copying."""
    own = folder / f"machine-{dist.get_rank()}"
    model = parallel_model()
    with TraceRecorder(model, own) as recorder:
        expected = train(model, recorder, apart=True)
    dist.barrier()
    if dist.get_rank() == 0:
        for rank in range(1, dist.get_world_size()):
            name = f"rank-{rank:05d}"
            shutil.copytree(folder / f"machine-{rank}" / name, own / name)
    dist.barrier()
    return {"equal": rows_equal(folder / "machine-0", expected)}


def collected(folder: Path) -> dict[str, Any]:
    """Model and recorder go out of use without a close."""
    model = parallel_model()
    recorder = TraceRecorder(model, folder / "t")
    train(model, recorder)
    del model, recorder
    gc.collect()
    dist.barrier()
    with Trace(folder / "t") as trace:
        steps = len(trace.steps)
    return {"steps": steps, "threads": [thread.name for thread in threading.enumerate() if "gradlab" in thread.name]}


def broken_optimizer(folder: Path) -> dict[str, Any]:
    """Reading a step's values fails: recording ends, training does not."""
    reference = parallel_model()
    train(reference)
    model = parallel_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups.clear()
    recorder = TraceRecorder(model, folder / "t", optimizer=optimizer)
    train(model, recorder)
    report = recorder.close()
    dist.barrier()
    return {"same": same_parameters(reference, model), "lost": report.steps_lost, "reason": report.reason}


def never_closed(folder: Path) -> dict[str, Any]:
    """The program ends without closing: what was recorded must be complete all the same."""
    model = parallel_model()
    keep_alive.append(TraceRecorder(model, folder / "t"))
    keep_alive.append(model)
    train(model, keep_alive[0])
    return {}


keep_alive: list[Any] = []
SCENARIOS = [
    plain_training_is_unchanged,
    step_values,
    choice_of_steps_and_layers,
    unused_layers,
    wrapped_hook,
    wrapped_compression,
    zeroed_bucket_views,
    full_disk,
    slow_disk,
    waits_for_buffers,
    refusals,
    overwritten,
    one_rank_alone,
    failed_backward,
    separate_machines,
    collected,
    broken_optimizer,
    never_closed,
]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen = sys.argv[2:]
    results = {}
    for scenario in SCENARIOS:
        if not chosen or scenario.__name__ in chosen:
            place = folder / scenario.__name__
            place.mkdir(exist_ok=True)
            dist.barrier()
            results[scenario.__name__] = scenario(place)
    (folder / f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
