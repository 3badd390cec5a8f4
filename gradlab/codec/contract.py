"""The contract of a codec.

A codec exchanges the gradients of one group of layers between ranks. On each rank it is a coroutine that yields the
collectives it needs and receives their results. It is pure: it changes none of its arguments. Its memory between
iterations is a dict of tensors, which it receives and returns. Its settings are a frozen dataclass. Tensors that were
learned from data are kept apart, in `learned`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch

from gradlab.codec.batch import Batch, Tensors
from gradlab.codec.context import Context
from gradlab.codec.exchanged import Exchanged, exchange_group
from gradlab.codec.kept import Entry, Kept
from gradlab.codec.method import Method
from gradlab.codec.registry import CODECS
from gradlab.codec.settings import build_settings
from gradlab.collectives import Coroutine, ring_sends, run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import ROLES, Layer

Own = TypeVar("Own", bound="type[Codec]")


@dataclass(frozen=True)
class PlanDefaults:
    """How `Plan.uniform` applies a codec by default.

    roles: roles of the layers that are compressed.
    minimum_dimensions: the fewest dimensions of a layer that is compressed.
    minimum_numel: the fewest elements of a layer that is compressed.
    group_bytes: most bytes of gradients in a group of consecutive layers; 0: one group per layer. None: small layers
        that follow one another share groups, if they are many; each other layer has one of its own.
    warmup_steps: dense iterations before the first compressed one.
    error_feedback, two_way: whether these wrappers are put around the codec.

    >>> defaults = codecs.make("topk").about.defaults
    >>> defaults.error_feedback, defaults.minimum_dimensions, defaults.minimum_numel
    (True, 2, 256)
    """

    roles: tuple[str, ...] = ROLES
    minimum_dimensions: int = 2
    minimum_numel: int = 256
    group_bytes: float | None = None
    warmup_steps: int = 0
    error_feedback: bool = True
    two_way: bool = False


@dataclass(frozen=True)
class About:
    """A description of a codec, for tables, plans and planners.

    family: such as "sparsification".
    formula: payload bytes, from n elements, N ranks and settings by their names.
    paper: authors, venue and year. The module's docstring names the paper in full.
    candidates: settings worth comparing, for a planner.
    defaults: how `Plan.uniform` applies the codec. An instance may have its own, if they follow from its settings.
    learns: whether the codec is fitted on gradients.

    >>> codecs.get("natural").about.formula
    'n + ceil(n / 8)'
    """

    family: str
    formula: str
    paper: str = "-"
    candidates: Sequence[Mapping[str, Any]] = ({},)
    defaults: PlanDefaults = PlanDefaults()
    learns: bool = False


@dataclass(frozen=True)
class Traits:
    """Facts about a codec under its settings, whatever the layers and the gradients are.

    selects: whether it sends some elements and nothing of the others.
    varying: whether message sizes depend on the gradients' values, so that forecasts of bytes are estimates.
    frees_gradients: whether `exchange` reads gradients only before its first request, or has copied what it reads
        later.
    rotatable: whether it quantizes every value, so that a rotation may stand around it.
    keeps_dtype: whether gradients travel in their own dtype, with the loss scale on them.
    coarse: whether quantizing a mean once more would cost too much for it to be the default.
    refuses_feedback: why error feedback would diverge around it, whatever its input is multiplied by, and what to do.
    own_exchange: whether it does not gather payloads, so that only `two_way` around a codec that has `settled` can take
        its own exchange's place.
    whole_layers: why it cannot work on shards of its layers, as a part of a sentence.

    >>> traits = codecs.make("topk", index_coding="smallest").traits
    >>> traits.selects, traits.varying
    (True, True)
    """

    selects: bool = False
    varying: bool = False
    frees_gradients: bool = False
    rotatable: bool = False
    keeps_dtype: bool = False
    coarse: bool = False
    own_exchange: bool = False
    refuses_feedback: str = ""
    whole_layers: str = ""


@dataclass(frozen=True)
class Bytes:
    """Forecast of one exchange of float32 gradients, in bytes without padding, means over ranks.

    payload: bytes that a rank contributes.
    sent: bytes that a rank sends.
    positions: part of the payload that names the elements whose values are sent.
    codes: part of the payload that an autoencoder made.

    >>> codecs.make("topk", density=0.01).forecast([Layer("w", (1000,))], world_size=4)
    Bytes(payload=60, sent=180, positions=20, codes=0.0)
    """

    payload: float
    sent: float
    positions: float = 0.0
    codes: float = 0.0

    @classmethod
    def of_means(cls, payload: float, world_size: int) -> Bytes:
        """Return the bytes of an exchange that asks for means alone: they travel along a ring."""
        return cls(payload, ring_sends(world_size) * payload)


@dataclass(frozen=True)
class Guarantees:
    """Properties that hold for every gradient x of a group.

    C(x) is one rank's decoded contribution. E is the expectation over the codec's random numbers.

    linear: whether C commutes with the sum over ranks.
    unbiased: whether E C(x) = x, to the resolution of the random numbers.
    delta: number in (0, 1], E||C(x) - x||^2 <= (1 - delta) ||x||^2. None: no such bound is known.
    omega: bound of an unbiased codec, E||C(x) - x||^2 <= omega ||x||^2. None: no such bound is known.
    homogeneous: whether C(a x) = a C(x) for every a > 0, to rounding and with the same random numbers. False: unknown.

    >>> codecs.make("topk", density=0.25).guarantees([Layer("w", (100,))])
    Guarantees(linear=False, unbiased=False, delta=0.25, omega=None, homogeneous=False)
    >>> codecs.make("powersgd").guarantees([Layer("w", (100, 50))]).linear
    False
    """

    linear: bool = False
    unbiased: bool = False
    delta: float | None = None
    omega: float | None = None
    homogeneous: bool = False

    @property
    def contracts(self) -> bool:
        """Whether E||C(x) - x||^2 < ||x||^2 is guaranteed, so that feedback keeps the residual bounded."""
        return self.delta is not None or (self.omega is not None and self.omega < 1)


class Codec(Method, ABC):
    """One compression method with its settings.

    A subclass sets `name` (the file's name), `about` and `Settings`, a frozen dataclass. It defines `exchange` and
    `forecast`. A codec's state has the same keys on every rank, and the same values where decoding or collectives
    depend on them; ecsq's step, which travels in messages, is each rank's (wrappers: see `gradlab.codec.wrapper`).

    >>> codec = codecs.make("topk", density=0.5)
    >>> codec == codecs.make("topk", density=0.5), codec.forecast([Layer("w", (8,))], world_size=2).payload
    (True, 17)
    >>> codec.apply([torch.tensor([3.0, 1.0]), torch.tensor([0.0, 4.0])]).decoded.tolist()
    [1.5, 2.0]
    """

    about: About
    entries: ClassVar[Mapping[str, Entry]] = {}  # by the names of state entries; others are `Entry()`

    @abstractmethod
    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        """Compress, exchange and decompress one group on one rank.

        Args:
            grads: this rank's gradients, of the layers' shapes, contiguous, float32 or float64.
            state: the state that the last exchange returned, empty at first.
            context: surroundings of the exchange.

        Returns:
            A coroutine that yields the collectives it needs and returns an `Exchanged`.
        """

    @abstractmethod
    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        """Forecast the bytes of one exchange.

        Args:
            layers: the group's.
            world_size: number of ranks N.
            state: start of the exchange. None: the mean over a run.
        """

    @cached_property
    def traits(self) -> Traits:
        """Facts about the codec under its settings."""
        return Traits(whole_layers="its learned tensors were fitted on whole layers" if self.learned else "")

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        """Return what holds for a group of these layers, whatever their gradients are."""
        return Guarantees()

    @classmethod
    def squared_errors(
        cls, codecs: Sequence[Codec], layer: Layer, gradient: torch.Tensor, context: Context
    ) -> list[float]:
        """Measure ||C(x) - x||^2 for several settings of this method, on one rank alone and from an empty state.

        A method overrides this if its settings can share the work, or if its first exchange is not a typical one.

        Args:
            codecs: one per setting.
            layer: the gradient's.
            gradient: x, of the layer's shape.
            context: surroundings of the exchange.

        Returns:
            One squared error per codec.
        """
        return [_squared_error(codec, layer, gradient, context) for codec in codecs]

    def check(self, layers: Sequence[Layer]) -> None:
        """Refuse layers that the learned tensors do not fit.

        Raises:
            GradlabError: naming the layer, what came and what was expected.
        """
        if self.learned and not self.about.learns:
            raise GradlabError(f"codec {self.name} learns nothing, but came with {sorted(self.learned)}")

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        """Say what the codec's state may hold: by key, what the tensor looks like. Not all of it has to be there.

        A checkpoint's state is compared with it, when it is saved and loaded. By default, a codec keeps nothing.

        layers: the group's.
        rank: rank whose state it is, from 0.
        world_size: N.
        group: the group's name, as in `Context`.
        """
        return {}

    def fit(self, layers: Sequence[Layer], samples: Mapping[str, torch.Tensor]) -> Codec:
        """Return a codec of this kind that is fitted on samples. A method that does not learn returns itself.

        layers: the group's.
        samples: averaged gradients of T iterations by layer name, (T, *layer.shape).
        """
        return self


def register(codec: Own) -> Own:
    """Register a codec class under its `name` in this process, for plans and artifacts. Use it as a decorator.

    Every process that builds or loads a plan with the codec has to register it, as an artifact holds names and
    settings, never code. A class of the same module and name replaces the registered one, as after a reload.

    Returns:
        The class itself.

    Raises:
        GradlabError: for a class that is no complete codec, or a name that another codec has.
    """
    if not (isinstance(codec, type) and issubclass(codec, Codec)) or inspect.isabstract(codec):
        raise GradlabError(f"codecs.register: {codec!r} is no codec with an exchange of its own")
    if missing := [what for what in ("name", "about", "Settings") if not hasattr(codec, what)]:
        raise GradlabError(f"codecs.register: {codec.__qualname__} has no {missing[0]}")
    if not isinstance(codec.name, str) or not codec.name.isidentifier():
        raise GradlabError(f"codecs.register: {codec.__qualname__} has the name {codec.name!r}, expected an identifier")
    if not (isinstance(codec.Settings, type) and is_dataclass(codec.Settings)):
        raise GradlabError(f"codecs.register: {codec.__qualname__}.Settings is no dataclass")
    known = CODECS.registered.get(codec.name)
    another = known is not None and (known.__module__, known.__qualname__) != (codec.__module__, codec.__qualname__)
    if codec.name in CODECS.files or another:
        raise GradlabError(f"codecs.register: there is a codec {codec.name!r} already")
    for settings in codec.about.candidates:
        build_settings(codec, settings)
    CODECS.registered[codec.name] = codec
    return codec


def _squared_error(codec: Codec, layer: Layer, gradient: torch.Tensor, context: Context) -> float:
    [result] = run_lockstep([exchange_group(codec, Batch.of({layer.name: gradient}, [layer]), {}, context)])
    done = result.value
    return float((done.compressor_input[layer.name] - done.own[layer.name]).double().norm()) ** 2
