"""Triton kernels: a codec's work on all layers of a group by one launch, where hundreds of PyTorch's calls would stand.

Each equals PyTorch lines of the codec that uses it, bit for bit wherever these are deterministic. Those lines run on a
CPU, without triton, and for other dtypes than float32. Kernels wait for nothing on the host.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import torch


class Form(NamedTuple):
    """Meaning of a quantizer's packed codes.

    name: name of the functions in `gradlab.kernels.formats`, NAME_code and NAME_value.
    bits: of a code.
    p, q: constants of both functions.
    scales: 0: a block's number is float32. Above: it is E8M0's byte, the exponent of the largest magnitude times this.
        Below: it is E4M3's, of a float32 number of the whole vector.
    """

    name: str
    bits: int
    p: float = 0.0
    q: float = 0.0
    scales: float = 0.0


class Source(NamedTuple):
    """Input of kernels that compress, float32 (numel,).

    vector: the vector.
    addend: another one that is added to it; None: none is.
    left: memory for the compression error; None: it is not wanted.
    """

    vector: torch.Tensor
    addend: torch.Tensor | None = None
    left: torch.Tensor | None = None


DEVICES = {"cuda"}  # types of devices whose tensors kernels take


def usable(tensor: torch.Tensor) -> bool:
    """Return whether kernels take a tensor."""
    return tensor.dtype == torch.float32 and on_device(tensor.device)


def on_device(device: torch.device) -> bool:
    """Return whether there are kernels for a device."""
    return device.type in DEVICES and _installed()


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start a kernel in so many programs, on the device of its first argument, a tensor."""
    if programs:
        start(kernel, programs, arguments, constants)


def start(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Do what `launch` says. No product and sum become one operation, which would round once instead of twice."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
