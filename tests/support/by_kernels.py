"""Codecs of several layers whose kernels Triton's interpreter runs on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from gradlab import codecs, kernels
from gradlab.codec import Batch, Codec, Context, Tensors, exchange_group
from gradlab.codec.abilities import for_layers
from gradlab.collectives import run_lockstep
from gradlab.layout import Layer
from support.benchmark_modules import benchmark_modules


@contextmanager
def by_kernels() -> Iterator[list[str]]:
    """Run kernels for tensors on the CPU too; the names of those that were started."""
    from support.quick_interpreter import quicken

    quicken()
    real, started = kernels.start, []

    def start(kernel: Any, *given: Any) -> None:
        started.append(kernel.__name__)
        real(kernel, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "start", start)
        patch.setattr(kernels, "DEVICES", {"cpu"})
        yield started


def layered(name: str, options: dict[str, Any], sizes: list[int]) -> Any:
    return for_layers(codecs.make(name, **options), [Layer(f"w{at}", (size,)) for at, size in enumerate(sizes)])


def encoded(codec: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return list(codec.compress(x, torch.Generator().manual_seed(3)))


def decoded(codec: Any, x: torch.Tensor, payload: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of a payload that came three times, and what is left of x."""
    left = x.clone()
    codec.add_decompressed(left, payload, -1.0)
    return codec.average_into(torch.empty_like(x), [payload] * 3, 1 / 3), left


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, where not NaN."""
    return np.array_equal(a.numpy(), b.numpy(), equal_nan=True) and torch.equal(
        torch.signbit(a.nan_to_num()), torch.signbit(b.nan_to_num())
    )


def work_of_steps(make: Callable[[], Codec], layers: int, steps: int, settled: int = 0) -> Counter[str]:
    """Operations of the last of some steps of so many layers, by name; none from step `settled` on waits. Kernels are
    counted, not run."""
    with benchmark_modules("device_calls") as modules, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "start", lambda *given: None)
        calls, codec, state = modules["device_calls"], make(), Tensors()
        with calls.far_device() as device:
            for step in range(steps):
                device.work.clear()
                if step <= settled:
                    device.waits.clear()
                given = {str(at): calls.FarTensor(torch.randn(6 + at % 5, 8)) for at in range(layers)}
                run = exchange_group(codec, Batch.of(given), state, Context(0, 1, step))
                [done] = run_lockstep([calls._counted(run, device, True)])
                state = done.value.state
            assert not +device.waits
            return +device.work
