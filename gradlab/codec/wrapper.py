"""Wrappers change a codec's input or its result, without the codec's knowledge.

A wrapper is itself a codec around another one and delegates with `yield from`. It may keep state that differs between
ranks, such as residuals and velocities. A wrapper's state has keys "<layer>/<what>" with <what> in `entries`. All other
keys belong to the wrapped codec.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gradlab.codec.batch import Table, Tensors, concatenate, separate
from gradlab.codec.context import Context
from gradlab.codec.contract import About, Bytes, Codec, Traits
from gradlab.codec.kept import FLOATS, GONE, Entry, Kept, for_any
from gradlab.codec.method import shown_settings
from gradlab.codec.settings import setting
from gradlab.coding.random_bits import RandomBits, bfloat16_at_random
from gradlab.errors import GradlabError
from gradlab.layout import Layer

POLICIES = ("sum", "split", "drop")
# Entries of wrappers: the same on all ranks, each rank's own, and measured of a wrapped codec.
SHARED = Entry(carried=True)
DEALT = Entry("dealt", residual=True, carried=True)
MEASURED = Entry("anew", of_group=True)
_BLOCK = 256  # elements that share one scale in an int8 buffer
_KINDS = {torch.int8: "int8", torch.bfloat16: "bfloat16"}  # of buffers, by their dtype


@dataclass(frozen=True)
class Effects:
    """The effects of a wrapper, by which stacks of wrappers and optimizers are checked.

    keeps_residual: whether it adds a residual to the compressor's input.
    server_residual: whether it has servers that may keep a residual, see `Exchanged.server_input`.
    applies_momentum: whether it applies momentum.
    before_compression: whether that momentum changes the compressor's input.
    applies_weight_decay: whether it applies weight decay.
    replaces_optimizer: whether it makes gradients another optimizer's updates, for SGD without momentum.
    changes_mean: whether it adds to the mean that the codec returned.
    acts_when_dense: whether it acts in dense iterations before it has a state.
    """

    keeps_residual: bool = False
    server_residual: bool = False
    applies_momentum: bool = False
    before_compression: bool = False
    applies_weight_decay: bool = False
    replaces_optimizer: bool = False
    changes_mean: bool = False
    acts_when_dense: bool = False


class Wrapper(Codec):
    """A codec around a codec.

    Args:
        codec: the wrapped codec, which may be a wrapper itself.
        settings: an instance of the class's `Settings`. None: the defaults.

    Raises:
        GradlabError: for a stack that makes no sense: the same wrapper twice, two that keep residuals, two that apply
            momentum, momentum before compression inside error feedback, or weight decay inside another wrapper.
    """

    about = About("wrapper", "")
    effects = Effects()

    def __init__(self, codec: Codec, settings: Any = None) -> None:
        super().__init__(settings)
        self.codec = codec
        for inner in wrappers_of(codec):
            _refuse(self, inner)
        asked = getattr(self.settings, "contraction", "measured")
        if self.effects.keeps_residual and asked != "none" and (why := innermost(codec).traits.refuses_feedback):
            raise GradlabError(f"wrapper {self.name} around {why}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([repr(self.codec), *shown_settings(self.settings, first=False)])})"

    def inner_state(self, state: Tensors) -> Tensors:
        """Return the wrapped codec's part of a state."""
        return {key: value for key, value in state.items() if _buffer_of(key) not in self.entries}

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        """Say what the state may hold: what the codec's may, and a buffer per layer under each of `entries`."""
        kind = getattr(self.settings, "buffer", "float32")
        found = dict(self.codec.kept(layers, rank, world_size, group))
        for what, rule in self.entries.items():
            if rule == MEASURED:
                lasting = None if scales(self, Table.of(layers)) else GONE
                found |= for_any(layers, what, Kept((), least=0.0, lasting=lasting))
            else:
                for layer in layers:
                    found |= kept_buffer(layer.name, what, layer.shape, kind)
        return found

    @cached_property
    def traits(self) -> Traits:
        return Traits(whole_layers=self.codec.traits.whole_layers)

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        return self.codec.forecast(layers, world_size, None if state is None else self.inner_state(state))

    def check(self, layers: Sequence[Layer]) -> None:
        self.codec.check(layers)

    def fit(self, layers: Sequence[Layer], samples: Mapping[str, torch.Tensor]) -> Codec:
        return type(self)(self.codec.fit(layers, samples), self.settings)


def buffer_setting(what: str, *, host: bool = False) -> Any:
    """Make the settings field of a buffer's format, see `store_buffers`. host: whether it may be in host memory."""
    on_host = '; or "host", the working type in host memory, which every step copies to the device and back'
    return setting(
        "float32",
        choices=("float32", "bfloat16", "int8", *(("host",) if host else ())),
        help=f'format in which {what} kept: the working type; "bfloat16", 1/2 of the memory, rounded at random, '
        f'without bias; "int8", 1/4, with a scale per {_BLOCK} values, below 1/254 of whose largest values are lost'
        f"{on_host if host else ''}",
    )


def step_size_setting(default: bool | None, what: str) -> Any:
    """Make the settings field of whether a residual follows the learning rate, see `Training.residual_ratio`."""
    return setting(
        default,
        symbol="eta_(t-1) / eta_t",
        help=f"multiply {what} by the ratio of step sizes; None: if the optimizer is SGD without momentum",
    )


def wrappers_of(codec: Codec) -> Iterator[Wrapper]:
    """Yield the wrappers around a codec, outermost first."""
    while isinstance(codec, Wrapper):
        yield codec
        codec = codec.codec


def innermost(codec: Codec) -> Codec:
    """Return the codec without its wrappers."""
    while isinstance(codec, Wrapper):
        codec = codec.codec
    return codec


def needs_scaling(codec: Codec, table: Table) -> bool:
    """Return whether feedback has to scale a codec's input, for a group's layers."""
    holds = innermost(codec).guarantees(table)
    return not holds.contracts and (holds.unbiased or holds.homogeneous)


def scales(wrapper: Wrapper, table: Table) -> bool:
    """Return whether a wrapper has to scale its codec's input, worked out once for a table."""
    asked = wrapper.settings.contraction != "none"
    return asked and wrapper.cached(("scales", table), lambda: needs_scaling(wrapper.codec, table))


def served(codec: Codec, world_size: int) -> bool:
    """Return whether means of so many ranks come back compressed by servers."""
    return any(
        one.effects.server_residual and world_size >= getattr(one.settings, "from_ranks", 1)
        for one in wrappers_of(codec)
    )


def sizes_vary(codec: Codec, world_size: int) -> bool:
    """Return whether message sizes depend on values. A selection from a whole vector that is cut into shards has as
    many values in one as fall there."""
    traits = innermost(codec).traits
    return traits.varying or (traits.selects and served(codec, world_size))


def _refuse(outer: Wrapper, inner: Wrapper) -> None:
    around, within = outer.effects, inner.effects
    if inner.name == outer.name:
        raise GradlabError(f"wrapper {outer.name} stacked on itself: what it does would be done twice")
    if around.keeps_residual and within.keeps_residual:
        raise GradlabError(f"wrappers {outer.name} and {inner.name} both add the residual: use one of them")
    if around.applies_momentum and within.applies_momentum:
        raise GradlabError(f"wrappers {outer.name} and {inner.name} both apply momentum: use one of them")
    if around.keeps_residual and within.applies_momentum and within.before_compression:
        raise GradlabError(
            f"wrapper {inner.name} inside {outer.name}: feedback would take momentum for an error; name it first"
        )
    if within.applies_weight_decay:
        raise GradlabError(f"wrapper {inner.name} inside {outer.name}: it is part of the gradient, name it first")


def acts_when_dense(codec: Codec, state: Tensors) -> bool:
    """Return whether a codec does more than average in dense iterations, so that the executor has to run it."""
    held = {_buffer_of(key) for key in state}
    return any(one.effects.acts_when_dense or held & one.entries.keys() for one in wrappers_of(codec))


def applies_earlier_gradients(codec: Codec) -> bool:
    """Say whether a codec applies in one iteration what it was given in earlier ones: a residual, or momentum.

    The mean of a single iteration's gradients is then not what it is meant to apply in that iteration.
    """
    return any(
        wrapper.effects.keeps_residual
        or wrapper.effects.applies_momentum
        or (wrapper.effects.server_residual and wrapper.settings.error_feedback)
        for wrapper in wrappers_of(codec)
    )


def entries(state: Tensors, name: str, what: str) -> Tensors:
    """Return the state entries of one buffer, as `store_buffer` made them.

    state: the state.
    name: the layer's.
    what: the buffer, such as "residual".
    """
    return {key: state[key] for key in (f"{name}/{what}", f"{name}/{what}_scale") if key in state}


def entries_of(codec: Codec) -> dict[str, Entry]:
    """Return the rules for state entries of a codec and its wrappers, by name."""
    return {what: rule for one in (innermost(codec), *wrappers_of(codec)) for what, rule in one.entries.items()}


def kept_bytes(codec: Codec, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> dict[str, int]:
    """Count the bytes that a rank's state of a group takes in most iterations of a run, by the entry's name."""
    rules, found, hosted = entries_of(codec), dict[str, int](), on_host(codec)
    for key, one in codec.kept(layers, rank, world_size, group).items():
        layer, _, what = key.rpartition("/")
        if one.nbytes and (layer == layers[0].name or not rules.get(_buffer_of(key), Entry()).of_group):
            name = f"{what} on the host" if what in hosted else what
            found[name] = found.get(name, 0) + one.nbytes
    return found


def adopted(new: Codec, kept: Mapping[str, Kept], state: Tensors) -> Tensors:
    """Return the part of a state, left under other settings, that a codec continues from.

    kept: result of `Codec.kept` for the codec.
    """
    rules, one = entries_of(new), Entry()
    carried = {key: value for key, value in state.items() if rules.get(_buffer_of(key), one).carried}
    return {key: value for key, value in carried.items() if key in kept and kept[key].problem(value) is None}


def resize(codec: Codec, states: Sequence[Tensors], rank: int, world_size: int, residuals: str) -> Tensors:
    """Return the state of one of M = `world_size` ranks that continue a run of N = len(states) ranks.

    Args:
        codec: the codec with its wrappers.
        states: the old ranks', in order.
        rank: the new rank.
        world_size: M.
        residuals: how the tensors e_i that differ between ranks become the new ranks' e'_j.
            "split": every new rank gets the mean of all e_i.
            "sum": new rank j gets M / N times the sum of those e_i with i mod M == j.
            "drop": every new rank starts without them.
            "split" and "sum" keep the mean, (1/M) sum e'_j == (1/N) sum e_i, which is still to be applied.
    """
    rules, state = entries_of(codec), dict[str, torch.Tensor]()
    for key, first in states[0].items():
        (name, _, what), rule = key.rpartition("/"), rules.get(_buffer_of(key), Entry())
        if rule.residual and residuals == "drop":
            continue
        if rule.resized == "same":
            state[key] = first
        elif rule.resized == "anew":
            state |= {key: states[rank][key]} if world_size == len(states) else {}
        elif what in rules:  # of an int8 buffer once, with its scales
            held = [buffer for one in states if (buffer := load_buffer(one, name, what)) is not None]
            if rule.resized == "joined":
                state[f"{name}/{rule.joined_as}"] = torch.cat(held)
            else:
                kind = _KINDS.get(first.dtype, "float32")
                state |= store_buffer(name, what, _dealt(held, rank, world_size, residuals), kind)
    return state


def carried(codec: Codec, state: Tensors, own: bool) -> Tensors:
    """Return what a rank goes on with when others come and go: its own state (`own`), or another's, without residuals.

    Entries that depend on the number of ranks begin anew. Another rank's residuals are zeros, whose memory is of one.
    """
    rules, going_on = entries_of(codec), dict[str, torch.Tensor]()
    for key, tensor in state.items():
        rule = rules.get(_buffer_of(key), Entry())
        if rule.resized == "same" or (rule.resized == "dealt" and own):
            going_on[key] = tensor
        elif rule.resized == "dealt":
            going_on[key] = tensor.new_zeros(()).expand(tensor.shape)
    return going_on


def _dealt(tensors: Sequence[torch.Tensor], rank: int, world_size: int, residuals: str) -> torch.Tensor:
    """Return a new rank's tensor, of the shape of the old ranks', see `resize`."""
    if residuals == "split":
        return torch.stack(list(tensors)).mean(0)
    dealt = [tensor for old, tensor in enumerate(tensors) if old % world_size == rank]
    if not dealt:
        return torch.zeros_like(tensors[0])
    return torch.stack(dealt).sum(0) * (world_size / len(tensors))


# --- buffers -------------------------------------------------------------------------------------------------------


def store_buffer(name: str, what: str, tensor: torch.Tensor, kind: str) -> Tensors:
    """Make the state entries that keep a tensor.

    Args:
        name: the layer's.
        what: the buffer, such as "residual".
        tensor: tensor of any shape.
        kind: "float32": the tensor is kept as it is. "bfloat16": rounded to the nearest, for one that was kept so.
            "int8": in 8 bits and a scale per block of 256 elements, with an error of at most 1/254 of the block's
            largest magnitude.
    """
    if kind != "int8":
        return {f"{name}/{what}": tensor.bfloat16() if kind == "bfloat16" else tensor}
    blocks = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % _BLOCK)).view(-1, _BLOCK)
    scales = (blocks.abs().amax(1) / 127).clamp_min(torch.finfo(tensor.dtype).tiny)  # below it division is inexact
    steps = (blocks / scales[:, None]).round().to(torch.int8)
    return {
        f"{name}/{what}": steps.view(-1)[: tensor.numel()].reshape(tensor.shape).clone(),
        f"{name}/{what}_scale": scales,
    }


def store_buffers(tensors: Tensors, what: str, kind: str, context: Context) -> Tensors:
    """Make the state entries that keep the tensors of several layers, by layer name, see `store_buffer`. bfloat16 is
    rounded at random, by numbers of this rank and iteration: rounding to the nearest would lose small changes. "host"
    copies them to pinned host memory, for which nobody waits."""
    if kind == "host" and tensors:
        vector = concatenate(tensors)
        if vector.device.type != "cpu":
            out = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=vector.is_cuda)
            tensors = separate(out.copy_(vector, non_blocking=True), tensors)
    if kind == "bfloat16" and tensors:
        vector = concatenate(tensors)
        out = context.memory.workspace.empty(vector.shape, vector.new_empty(0, dtype=torch.bfloat16))
        bits = RandomBits(context.random.of_rank("buffer", what), vector.device)
        tensors = separate(bfloat16_at_random(vector, bits, out), tensors)
    if kind != "int8":
        return {f"{name}/{what}": tensor for name, tensor in tensors.items()}
    kept: Tensors = {}
    for name, tensor in tensors.items():
        kept |= store_buffer(name, what, tensor, kind)
    return kept


def kept_buffer(name: str, what: str, shape: tuple[int, ...], kind: str) -> dict[str, Kept]:
    """Say what the entries that `store_buffer` makes look like.

    shape: the tensor's.
    """
    if kind != "int8":
        return {f"{name}/{what}": Kept(shape, (torch.bfloat16,) if kind == "bfloat16" else FLOATS)}
    blocks = -(-math.prod(shape) // _BLOCK)
    steps = Kept(shape, (torch.int8,), needs=(f"{what}_scale",))
    return {f"{name}/{what}": steps, f"{name}/{what}_scale": Kept((blocks,), least=0.0)}


def load_buffer(state: Tensors, name: str, what: str) -> torch.Tensor | None:
    """Return the tensor that `store_buffer` kept, of its shape, or None if the state has none."""
    held = state.get(f"{name}/{what}")
    if held is None or held.dtype != torch.int8:
        return held.float() if held is not None and held.dtype == torch.bfloat16 else held
    scales = state[f"{name}/{what}_scale"]
    blocks = torch.nn.functional.pad(held.reshape(-1), (0, -held.numel() % _BLOCK)).view(-1, _BLOCK)
    return (blocks * scales[:, None]).view(-1)[: held.numel()].reshape(held.shape)


def load_buffers(state: Tensors, grads: Tensors, what: str, kind: str, context: Context) -> Tensors:
    """Return the tensors that `store_buffers` kept, by layer name, of those of these layers that the state has."""
    if kind == "int8":
        loaded = ((name, load_buffer(state, name, what)) for name in grads)
        return {name: tensor for name, tensor in loaded if tensor is not None}
    held = {name: state[key] for name in grads if (key := f"{name}/{what}") in state}
    if kind == "host" and held:
        device = next(iter(grads.values())).device
        return separate(concatenate(held).to(device, non_blocking=True), held) if device.type != "cpu" else held
    if kind != "bfloat16" or not held:
        return held
    vector = concatenate(held)
    wide = context.memory.workspace.empty(vector.shape, vector.new_empty(0, dtype=torch.float32))
    return separate(wide.copy_(vector), held)


def on_host(codec: Codec) -> frozenset[str]:
    """Return the names of the state's entries that stay in host memory."""
    hosted = (one for one in wrappers_of(codec) if getattr(one.settings, "buffer", "") == "host")
    return frozenset(what for one in hosted for what in one.entries if what in ("residual", "server_residual"))


def in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, copied if it is a part of larger memory, which it would keep from being used again."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@functools.lru_cache(2**16)
def _buffer_of(key: str) -> str:
    """Return the <what> of a state's key "<layer>/<what>", without the mark of an int8 buffer's scales."""
    return key.rpartition("/")[2].removesuffix("_scale")
