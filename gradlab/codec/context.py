"""The surroundings of an exchange: ranks, random streams, training and memory."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from gradlab.codec.batch import consecutive, evenly_spaced
from gradlab.workspace import Workspace

Result = TypeVar("Result")


def seeded_generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator whose stream follows from `key` and the kind of device alone, in every process.

    >>> from gradlab.codec import seeded_generator
    >>> one, two = seeded_generator(7, "conv.weight"), seeded_generator(7, "conv.weight")
    >>> torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=two))
    True

    Args:
        key: the parts of the key, such as a seed and a layer's name.
        device: device that draws the random numbers.

    Returns:
        A new generator, at the start of its stream.
    """
    return torch.Generator(device).manual_seed(stream_seed(*key))


def stream_seed(*key: object) -> int:
    """Return the seed of the stream that follows from `key`, see `seeded_generator`."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@functools.lru_cache(maxsize=2**12)
def _seeds_of(keys: tuple[str, ...]) -> np.ndarray:
    """Return the seed of each key's stream, uint64 (keys,): worked out once, as keys stay."""
    return np.array([stream_seed(key) for key in keys], dtype=np.uint64)


def alone(compute: Callable[[], Result]) -> Result:
    """Compute what all ranks compute alike, where each of them has to.

    >>> from gradlab.codec import alone
    >>> alone(lambda: 1 + 1)
    2
    """
    return compute()


@dataclass(frozen=True)
class Training:
    """The training around an exchange, as far as wrappers depend on it.

    learning_rate: learning rate by layer name.
    previous_learning_rate: last learning rate that was not zero, by layer name.
    plain_sgd: whether the optimizer is SGD without momentum of its own.
    loss_scale: factor of the run on its loss. Gradients that reach a codec are already divided by it.
    start: the first iteration that the schedule compresses.
    parameters: parameters of the model at this iteration, by layer name. Empty if unknown, as in a trace's replay.

    >>> from gradlab.codec import Training
    >>> Training({"w": 0.1}, {"w": 0.2}).residual_ratio("w", True)
    2.0
    """

    learning_rate: Mapping[str, float] = field(default_factory=dict)
    previous_learning_rate: Mapping[str, float] = field(default_factory=dict)
    plain_sgd: bool = False
    loss_scale: float = 1.0
    start: int = 0
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def scales_residuals(self, setting: bool | None) -> bool:
        """Return whether residuals follow the learning rate.

        setting: setting of the wrapper. None: only if the optimizer is SGD without momentum.
        """
        return self.plain_sgd if setting is None else setting

    def residual_ratio(self, layer: str, setting: bool | None) -> float:
        """Return the factor on a layer's residual, the ratio of step sizes eta_(t-1) / eta_t.

        It is 1 if one of the two learning rates is unknown or zero. setting: see `scales_residuals`.
        """
        if not self.scales_residuals(setting):
            return 1.0
        now, before = self.learning_rate.get(layer, 0.0), self.previous_learning_rate.get(layer, 0.0)
        return before / now if now > 0 and before > 0 else 1.0

    def frozen(self, layers: Iterable[str], setting: bool | None) -> frozenset[str]:
        """Return the layers whose learning rate is zero while residuals follow it, so that their residuals are held.

        With a learning rate of zero the update is not applied, so the residual must not change either: x_t - eta e
        stays as it is, with parameters x_t, residual e and the last learning rate eta that was not zero.

        setting: see `scales_residuals`.
        """
        if not self.scales_residuals(setting):
            return frozenset()
        return frozenset(layer for layer in layers if self.learning_rate.get(layer) == 0)


@dataclass(frozen=True)
class Memory:
    """Memory for results as large as gradients.

    workspace: lends it.
    spare: memory of gradients by layer name, in which means may be written.
    overwrites: whether nobody reads the gradients or the codec's input after the exchange, so that results may be
        written over them.

    >>> from gradlab.codec import Memory
    >>> vector = torch.ones(2)
    >>> Memory(overwrites=True).copy(vector) is vector, Memory().copy(vector) is vector
    (True, False)
    """

    workspace: Workspace = field(default_factory=Workspace)
    spare: Mapping[str, torch.Tensor] = field(default_factory=dict)
    overwrites: bool = False

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return other contiguous memory of a tensor's shape, dtype and device. Its values are undefined."""
        return self.workspace.empty_like(tensor)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values to be changed in place: the tensor itself if nobody reads it any more."""
        return tensor if self.overwrites else self.like(tensor).copy_(tensor)

    def for_mean(self, like: torch.Tensor, names: Iterable[str]) -> torch.Tensor:
        """Return memory for the mean of layers, in the shape and dtype of `like`.

        like: one layer's tensor, the layers' vector (numel,), or layers of one shape as a stack (layers, ...).
        names: names of the layers, in order.
        """
        names = list(names)
        spare = [self.spare[name] for name in names if name in self.spare]
        if not spare:
            return self.like(like)
        joined: torch.Tensor | None = None
        if len(spare) == 1:
            joined = spare[0] if spare[0].is_contiguous() else None
        elif like.ndim == 1:
            joined = consecutive(spare)
        elif all(one.dtype == like.dtype for one in spare):
            joined = evenly_spaced(spare)
        if joined is None or joined.numel() != like.numel() or joined.dtype != like.dtype:
            return self.like(like)
        return joined.view(like.shape)

    def keeping(self, *, spare: bool = True) -> Memory:
        """Return memory that is not written over: the input is still read. spare: whether gradients' still is."""
        return Memory(self.workspace, self.spare if spare else {})


@dataclass(frozen=True)
class Streams:
    """Random streams of an exchange. They follow from its key, so that a run resumes without generator states.

    key: seed of the plan, moment and group, the same on every rank.
    rank: number of this process.
    """

    key: tuple[object, object, str]
    rank: int

    def shared(self, *key: object, every_iteration: bool = True) -> torch.Generator:
        """Make a CPU generator that is in the same state on every rank.

        key: tells apart the streams of one group, such as one per layer.
        every_iteration: True: each iteration has its own stream. False: all iterations share one, as for a first value.
        """
        seed, moment, group = self.key
        return seeded_generator("shared", seed, moment if every_iteration else "start", group, *key)

    def seeds(self, keys: tuple[str, ...]) -> np.ndarray:
        """Return a seed for each key in this iteration, the same on every rank: uint64 (keys,)."""
        return _seeds_of(keys) ^ np.uint64(stream_seed("shared", *self.key))

    def of_rank(self, *key: object) -> torch.Generator:
        """Make a CPU generator whose stream is another one on every rank and in every iteration.

        key: tells apart the streams of one group, such as one per layer.
        """
        return seeded_generator("rank", *self.key, self.rank, *key)


@dataclass(frozen=True)
class Context:
    """The surroundings of an exchange.

    rank: number of this process, from 0.
    world_size: number of ranks, N.
    iteration: synchronised steps since the start of the run, from 0. Those that a loss scaler skipped count too.
    group: name of the group.
    seed: seed of the plan's random streams.
    training: the training around the exchange.
    memory: memory for results as large as gradients.
    once: `once(f)` returns f(), whose result is identical on all ranks. In lockstep the ranks share one result: treat
        it as read-only. All ranks call it equally often and in the same order, whatever their data are.
    one_round: whether the executor serves a single gather, as in a reduce-scatter, whatever the world size.
    repeat: number of earlier exchanges of this iteration, if several come between two optimizer steps.
    dense: whether the schedule leaves this iteration uncompressed.
    """

    rank: int
    world_size: int
    iteration: int
    group: str = ""
    seed: int = 0
    training: Training = field(default_factory=Training)
    memory: Memory = field(default_factory=Memory)
    once: Callable[[Callable[[], Any]], Any] = alone
    one_round: bool = False
    repeat: int = 0
    dense: bool = False

    @property
    def random(self) -> Streams:
        """Random streams of this exchange."""
        moment = (self.iteration, self.repeat) if self.repeat else self.iteration
        return Streams((self.seed, moment, self.group), self.rank)
