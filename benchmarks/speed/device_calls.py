"""Operations that a step of every codec gives to a device, and how often it waits for the device's answer.

    python benchmarks device_calls [--layers "ResNet-18" "GPT-2 small"] [--ranks 4] [--codecs sign topk]
        [--rows ROWS.jsonl]             keeps what is counted
    python benchmarks device_calls --rows ROWS.jsonl --table

A GPU works behind its host, until the host needs a value to go on (a number, a length that depends on data, a copy).
This counts both without a GPU: tensors say that they are on a device which is not the CPU, and what is asked of them is
counted and computed on the CPU. An operation that PyTorch itself makes of several kernels counts once. The count is of
rank 0's work on one step, with the plan's wrappers, after the first iterations; collectives are not counted. Kernels
are not run: messages of thresholds are empty. Two waits are every step's: whether the gradients of all ranks were
finite, and whether the means are.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from codec_speed import BEFORE, CASES, ITERATIONS_BEFORE, case_title
from layer_lists import LISTS
from rows import Row, keep, markdown, options, read
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from gradlab import kernels
from gradlab.codec import Tensors
from gradlab.collectives import Coroutine, run_lockstep
from gradlab.executor import PlanRun, RunSettings
from gradlab.layout import Layer
from gradlab.plan import Plan

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
CPU, FAR = torch.device("cpu"), torch.device("meta")
# Operations whose result's value or size the host needs before it goes on.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2", "bincount", "is_nonzero")
BY_DATA = ("ecsq", "lgc_server")  # follow what kernels wrote: these run, on 2 ranks and small layers
# No work on the device: views, and memory.
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "_reshape_alias", "set_")


class FarTensor(torch.Tensor):
    """A tensor on a device that is not the CPU, as far as its user can tell. near: holds its values."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> FarTensor:
        far = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=FAR
        )
        far.near = near
        return far

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Device.current.run(operation, args, kwargs or {})

    def tolist(self) -> Any:
        Device.current.waited("tolist")
        return self.near.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        Device.current.waited("numpy")
        return self.near.numpy()

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.near.untyped_storage()


def near(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.near if isinstance(tensor, FarTensor) else tensor


class Device(TorchDispatchMode):
    """Counts what a far device is asked for.

    work: operations, by name. waits: those that the host waits for, and copies to it, by name. current: the one in use.
    """

    current: Device

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.counting = False

    def __enter__(self) -> Device:
        Device.current = self
        super().__enter__()
        return self

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(operation, args, kwargs or {})

    @contextmanager
    def counts(self, counting: bool) -> Iterator[None]:
        self.counting = counting
        yield
        self.counting = False

    def waited(self, name: str) -> None:
        self.waits[name] += self.counting

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Compute on the CPU, and count if a far tensor takes part."""
        seen: list[FarTensor] = []
        asked_far = any(isinstance(value, torch.device) and value.type == FAR.type for value in kwargs.values())

        def brought(value: Any) -> Any:
            if isinstance(value, FarTensor):
                seen.append(value)
                return value.near
            return CPU if isinstance(value, torch.device) else value

        name = operation.overloadpacket.__name__
        asked_near = name == "_to_copy" and kwargs.get("device") is not None and not asked_far
        near_args, near_kwargs = tree_map(brought, (args, kwargs))
        result = operation(*near_args, **near_kwargs)
        if name.startswith(("empty", "new_empty")):
            result.zero_()  # a part of it no kernel may fill
        if not seen and not asked_far:
            return result
        if self.counting and not operation.is_view and name not in FREE:
            self.work[name] += 1
        index = near_args[1] if name.startswith("index") and len(near_args) > 1 else ()
        by_mask = isinstance(index, list | tuple) and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index
        )
        to_host = asked_near or (name == "copy_" and not isinstance(args[0], FarTensor))
        from_host = name == "copy_" and isinstance(args[0], FarTensor) and not isinstance(args[1], FarTensor)
        unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if to_host or from_host:
            self.waited("copy from the host" if from_host else "copy to the host")
        elif name in WAITS or by_mask or unsized:
            self.waited(name)
        if to_host:
            return result
        held = {id(one.near): one for one in seen}
        return tree_map(lambda one: held.get(id(one), FarTensor(one)) if isinstance(one, torch.Tensor) else one, result)


class _Made(TorchFunctionMode):
    """Brings values of the host to the far device, where PyTorch would not ask it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.as_tensor and isinstance(args[0], FarTensor):
            return args[0]
        far = function in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or CPU) == FAR
        if far or (function is torch.Tensor.new_tensor and isinstance(args[0], FarTensor)):
            kwargs["device"] = CPU
            kwargs.setdefault("dtype", None if far else args[0].dtype)
            return FarTensor(torch.tensor(*args[0 if far else 1 :], **kwargs))
        if function is torch.Tensor.__getitem__ and isinstance(args[0], FarTensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(FarTensor(torch.tensor(i)) if isinstance(i, list) else i for i in index))
        return function(*args, **kwargs)


class _NearGenerator(torch.Generator):
    def __new__(cls, device: Any = CPU) -> _NearGenerator:
        return super().__new__(cls, CPU)


@contextmanager
def far_generators() -> Iterator[None]:
    real = torch.Generator
    torch.Generator = _NearGenerator  # type: ignore[misc]
    try:
        yield
    finally:
        torch.Generator = real  # type: ignore[misc]


def _counted(coroutine: Coroutine[Any], device: Device, counting: bool) -> Coroutine[Any]:
    answer: Any = None
    while True:
        with device.counts(counting):
            try:
                asked = coroutine.send(answer)
            except StopIteration as stop:
                return stop.value
        answer = yield asked


def step(runs: Sequence[PlanRun], gradients: Sequence[dict[str, torch.Tensor]], device: Device) -> list[Tensors]:
    """Take a step of all ranks as the engine does, and count what rank 0 asks; each rank's means, by layer name."""
    steps = []
    for rank, (run, mine) in enumerate(zip(runs, gradients, strict=True)):
        with device.counts(rank == 0):
            steps.append(run.begin())
            steps[rank].add(mine)
    means: list[Tensors] = [{} for _ in runs]
    for group in runs[0].groups:
        exchanges = [_counted(one.exchange(group), device, rank == 0) for rank, one in enumerate(steps)]
        for mean, done in zip(means, run_lockstep(exchanges), strict=True):
            mean |= done.value.mean
    run_lockstep([_counted(one.agree(FAR), device, rank == 0) for rank, one in enumerate(steps)])
    for rank, (run, one) in enumerate(zip(runs, steps, strict=True)):
        with device.counts(rank == 0):
            run.end(one, means[rank].values())
    return means


@contextmanager
def far_device(programs: int = 2**31, triton: bool = True) -> Iterator[Device]:
    """Count while the context lasts. programs: of a kernel that are run at most, in Triton's interpreter, if at all."""
    real = kernels.start
    with far_generators(), torch.no_grad(), Device() as device, _Made():

        def start(kernel: Any, asked: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
            device.work[kernel.__name__] += device.counting
            with _disable_current_modes():
                if programs:
                    real(kernel, min(asked, programs), tuple(map(near, arguments)), constants)

        kernels.start = start
        kernels.DEVICES.update({FAR.type} if triton else ())
        try:
            yield device
        finally:
            kernels.start = real
            kernels.DEVICES.discard(FAR.type)


def count(codec: str, settings: Mapping[str, Any], layers: Sequence[Layer], ranks: int, **grouping: int) -> Row:
    if codec in BY_DATA:
        layers = [replace(layer, shape=(2, 256)) for layer in layers if layer.numel >= 512]
        ranks = min(2, ranks)
    plan = Plan.uniform(layers, codec, **{**BEFORE.get(codec, {}), **settings, **grouping})
    generator = torch.Generator().manual_seed(0)
    with far_device(programs=2**31 if codec in BY_DATA else 0) as device:
        runs = [PlanRun(plan, rank, ranks, RunSettings(device=FAR)) for rank in range(ranks)]
        for _ in range(2 + ITERATIONS_BEFORE.get(codec, 1)):
            values = ({one.name: torch.randn(one.shape, generator=generator) for one in layers} for _ in range(ranks))
            far = [{name: FarTensor(value) for name, value in mine.items()} for mine in values]
            device.work.clear()
            device.waits.clear()
            step(runs, far, device)
    groups = len(plan.compressed_groups)
    return {"ranks": ranks, "groups": groups, "operations": sum(device.work.values()), "waits": dict(device.waits)}


def measured(chosen: argparse.Namespace) -> Iterator[Row]:
    cases = [(codec, settings) for codec in chosen.codecs for settings in CASES[codec]]
    for (codec, settings), title in product(cases, chosen.layers):
        row = {"case": case_title(codec, settings), "layers": title}
        row |= count(codec, settings, LISTS[title](), chosen.ranks)
        grouped = count(codec, settings, LISTS[title](), chosen.ranks, group_bytes=25 * 2**20)
        row |= {f"{key} grouped": grouped[key] for key in ("groups", "operations")}
        yield keep(chosen.rows, row)


def main() -> None:
    named = {"layers": ("ResNet-18",), "codecs": list(CASES), "ranks": 4, "rows": Path, "table": False}
    chosen = options(__doc__, **named)
    lines = []
    for row in read(chosen.rows) if chosen.table else measured(chosen):
        waits = ", ".join(f"{n} {name}" for name, n in row["waits"].items() if n)
        counts = [row["groups"], row["operations"], row["groups grouped"], row["operations grouped"]]
        lines.append([row["case"], row["layers"], *counts, waits])
    heads = ("groups", "operations", "in groups of 25 MiB", "operations", "waits for the device")
    print(markdown(("case", "layers", *heads), lines))
