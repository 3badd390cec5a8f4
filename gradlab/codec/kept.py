"""The form of a tensor that a codec keeps between iterations, for readers of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradlab.layout import Layer

if TYPE_CHECKING:
    from gradlab.codec.contract import Codec

FLOATS = (torch.float32, torch.float64)
Size = int | tuple[int, int | None]
GONE = (0,)  # the shape of what is not there


@dataclass(frozen=True)
class Entry:
    """Rules for a state's entries of one name, such as "residual", under any layer.

    resized: how a run continues with another number of ranks. "same": every rank has rank 0's. "dealt": see
        `gradlab.codec.wrapper.resize`. "joined": parts of shards are joined in rank order, under `joined_as`.
        "anew": it starts anew.
    residual: whether it goes if residuals are dropped.
    carried: whether it stays valid under other settings of the method, if `Codec.kept` allows its form there.
    of_group: whether it belongs to the whole group. It is then under the first layer that has a gradient.
    """

    resized: str = "same"
    residual: bool = False
    carried: bool = False
    of_group: bool = False
    joined_as: str = ""


@dataclass(frozen=True)
class Kept:
    """The shape, dtype and range of a state entry.

    shape: sizes, each a number, or the least and the most, None: without end.
    dtypes: any of these.
    least, most: bounds of every value, or one for each; None: without end.
    or_empty: whether it may be (0,) instead, as on ranks that have no part in it.
    needs: names of entries that its layer must have beside it, or a function that tells them from its tensor.
    running: its values, or the one of all, when most exchanges of a run start, for dry runs. None: it may be missing.
    lasting: its shape in most iterations of a run, `GONE` if it is not there then. None: `shape`, at its largest.
    """

    shape: tuple[Size, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    least: float | tuple[float, ...] | None = None
    most: float | tuple[float, ...] | None = None
    or_empty: bool = False
    needs: tuple[str, ...] | Callable[[torch.Tensor], Iterable[str]] = ()
    running: float | tuple[float, ...] | None = None
    lasting: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in most iterations of a run."""
        sizes = self.shape if self.lasting is None else self.lasting
        most = [size if isinstance(size, int) else size[1] or size[0] for size in sizes]
        return math.prod(most) * self.dtypes[0].itemsize

    def problem(self, tensor: torch.Tensor) -> str | None:
        """Say what is wrong with a tensor, and what was expected; None if nothing is."""
        if tuple(tensor.shape) == (0,) and self.or_empty:
            return None
        if tensor.dtype not in self.dtypes:
            return f"is {_name(tensor.dtype)}, expected {' or '.join(map(_name, self.dtypes))}"
        if tensor.ndim != len(self.shape) or not all(map(_fits, tensor.shape, self.shape)):
            sizes = f"[{', '.join(map(_text, self.shape))}]" + (" or [0]" if self.or_empty else "")
            return f"has the shape {list(tensor.shape)}, expected {sizes}"
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return "holds values that are not finite"
        for bound, sound, word in ((self.least, torch.ge, "least"), (self.most, torch.le, "most")):
            if bound is not None and not bool(sound(tensor.cpu().double(), torch.tensor(bound)).all()):
                return f"holds {_values(tensor)}, expected at {word} {bound}"
        return None


def state_problem(kept: Mapping[str, Kept], state: Mapping[str, torch.Tensor]) -> str | None:
    """Return what is wrong with a codec's state, by its `Codec.kept`; None if nothing is."""
    for key, tensor in state.items():
        if key not in kept:
            return f"{key[:80]!r} is nothing that its codec keeps"
        if problem := kept[key].problem(tensor):
            return f"{key[:80]!r} {problem}"
        layer, needs = key.rpartition("/")[0], kept[key].needs
        for what in needs(tensor) if callable(needs) else needs:
            if (beside := f"{layer}/{what}") not in state:
                return f"{beside[:80]!r} is missing"
    return None


def running_state(codec: Codec, layers: Sequence[Layer], world_size: int) -> dict[str, torch.Tensor]:
    """Return the state from which most exchanges of a run start, of a codec without wrappers; empty if all are
    similar."""
    state = {}
    for key, kept in codec.kept(layers, 0, world_size, layers[0].name).items():
        layer, _, what = key.rpartition("/")
        elsewhere = codec.entries.get(what, Entry()).of_group and layer != layers[0].name
        if kept.running is not None and not elsewhere:
            values = torch.tensor(kept.running, dtype=kept.dtypes[0])
            state[key] = values.expand([size for size in kept.shape if isinstance(size, int)]).clone()
    return state


def for_any(layers: Iterable[Layer], what: str, kept: Kept) -> dict[str, Kept]:
    """Return an entry of a whole group: it is under the name of the first layer that has a gradient, so of any."""
    return {f"{layer.name}/{what}": kept for layer in layers}


def _fits(size: int, expected: Size) -> bool:
    if isinstance(expected, int):
        return size == expected
    least, most = expected
    return least <= size and (most is None or size <= most)


def _text(size: Size) -> str:
    if isinstance(size, int):
        return str(size)
    least, most = size
    return f"{least} or more" if most is None else f"{least} to {most}"


def _values(tensor: torch.Tensor) -> str:
    values = ", ".join(f"{value:g}" for value in tensor.reshape(-1)[:4].tolist())
    return f"[{values}, ...]" if tensor.numel() > 4 else f"[{values}]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
