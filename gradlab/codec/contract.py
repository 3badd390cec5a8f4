"""The contract of a codec, and the entry point that all executors share.

A codec exchanges the gradients of one group of layers between ranks. On each rank it is a coroutine that yields the
collectives it needs and receives their results. It is pure: it changes none of its arguments. Its memory between
iterations is a dict of tensors, which it receives and returns. Its settings are a frozen dataclass. Tensors that were
learned from data are kept apart, in `learned`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, ClassVar, TypeVar

import torch

from gradlab.codec.batch import Batch, Tensors, concatenate, separate
from gradlab.codec.context import Context, Memory
from gradlab.codec.kept import Entry, Kept
from gradlab.codec.registry import CODECS
from gradlab.codec.settings import build_settings, check_ranges, fields_of
from gradlab.collectives import Coroutine, Mean, ring_sends, run_lockstep
from gradlab.errors import BadMessage, GradlabError
from gradlab.layout import ROLES, Layer

_SMALL = 2**13  # elements of a layer whose copy costs less than a request of its own
Own = TypeVar("Own", bound="type[Codec]")
Result = TypeVar("Result")


class Deferred(Mapping[str, torch.Tensor]):
    """Tensors by layer name that are computed when the first of them is read, since most exchanges need no `own`.

    >>> from gradlab.codec import Deferred
    >>> own = Deferred(["w"], lambda: {"w": torch.ones(2)})
    >>> own["w"]
    tensor([1., 1.])

    Args:
        names: layers' names.
        compute: returns the tensors, the decoded contribution of this rank.
        compression_error: returns the compressor input less these tensors, in fewer passes than a subtraction. None:
            whoever needs the difference subtracts.
    """

    def __init__(
        self,
        names: Iterable[str],
        compute: Callable[[], Mapping[str, torch.Tensor]],
        compression_error: Callable[[], Tensors] | None = None,
    ) -> None:
        self._names = tuple(names)
        self._compute = compute
        self.compression_error = compression_error
        self._tensors: Mapping[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._tensors is None:
            self._tensors = self._compute()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Exchanged:
    """The result of an exchange on one rank. Tensors are by layer name and have the layers' shapes.

    A codec sets `mean`, `own` and, if it has one, `state`. Wrappers and executors set the other two.

    mean: the aggregated gradient, which every rank applies.
    own: the decoded contribution C(x) of this rank, which is what the other ranks decode from its message.
    state: the new state, under keys "<layer name>/<what>".
    compressor_input: x, the gradient, or under error feedback the gradient plus the residual.
    compression_error: x - C(x), if a wrapper has computed it. Else it is empty.
    server_input: under two-way compression, the mean of the ranks' contributions that this rank's server compresses,
        without its residual: the part in its shard for each layer, (elements,). Else it is empty.

    >>> from gradlab.codec import mean_only
    >>> from gradlab.collectives import run_lockstep
    >>> exchanged = run_lockstep([mean_only({"w": torch.tensor([value])}) for value in (1.0, 3.0)])[0].value
    >>> exchanged.mean, exchanged.own, exchanged.state
    ({'w': tensor([2.])}, {'w': tensor([1.])}, {})
    """

    mean: Tensors
    own: Mapping[str, torch.Tensor]
    state: Tensors = field(default_factory=dict)
    compressor_input: Tensors = field(default_factory=dict)
    compression_error: Tensors = field(default_factory=dict)
    server_input: Mapping[str, torch.Tensor] = field(default_factory=dict)


#: What `Codec.apply` takes: one rank's gradient, tensors by layer name, or a list of either with one entry per rank.
Gradients = torch.Tensor | Tensors | Sequence[torch.Tensor] | Sequence[Tensors]


@dataclass(frozen=True)
class Applied:
    """The result of `Codec.apply`.

    decoded: the aggregated gradient that every rank would apply: a tensor, or tensors by layer name, like the input.
    payload_bytes: bytes that a rank contributed, mean over ranks.
    dense_bytes: bytes of a rank's uncompressed gradient, 4 per element.
    relative_error: ||decoded - m|| / ||m||, m the mean of the gradients.

    >>> done = codecs.make("one_bit").apply(torch.tensor([1.0, -3.0, 2.0, -2.0]))
    >>> done.decoded.tolist(), done.payload_bytes, round(done.relative_error, 3)
    ([1.5, -2.5, 1.5, -2.5], 9.0, 0.236)
    """

    decoded: torch.Tensor | Tensors
    payload_bytes: float
    dense_bytes: int
    relative_error: float

    @property
    def ratio(self) -> float:
        """How many times smaller the payload is than the gradient."""
        return self.dense_bytes / self.payload_bytes if self.payload_bytes else float("inf")

    @property
    def ratio_to_16_bits(self) -> float:
        """How many times smaller the payload is than the gradient in 16 bits."""
        return self.ratio / 2

    def __repr__(self) -> str:
        return (
            f"Applied({self.payload_bytes:,.0f} bytes instead of {self.dense_bytes:,}, "
            f"or {self.dense_bytes // 2:,} in 16 bits, relative error {self.relative_error:.3g})"
        )


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


class Codec(ABC):
    """One compression method with its settings.

    A subclass sets `name` (the file's name), `about` and `Settings`, a frozen dataclass. It defines `exchange` and
    `forecast`. A codec's state has the same keys on every rank, and the same values where decoding or collectives
    depend on them; ecsq's step, which travels in messages, is each rank's (wrappers: see `gradlab.codec.wrapper`).

    >>> codec = codecs.make("topk", density=0.5)
    >>> codec == codecs.make("topk", density=0.5), codec.forecast([Layer("w", (8,))], world_size=2).payload
    (True, 17)
    >>> codec.apply([torch.tensor([3.0, 1.0]), torch.tensor([0.0, 4.0])]).decoded.tolist()
    [1.5, 2.0]

    Args:
        settings: an instance of the class's `Settings`. None: the defaults.
        learned: tensors that were learned from data, by name.

    Raises:
        GradlabError: for settings of another class, or out of range.
    """

    name: ClassVar[str]
    about: About
    entries: ClassVar[Mapping[str, Entry]] = {}  # by the names of state entries; others are `Entry()`
    Settings: ClassVar[type]

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        self.settings = self.Settings() if settings is None else settings
        self.learned = dict(learned or {})
        self._cache: dict[Hashable, tuple[tuple[object, ...], Any]] = {}
        if not isinstance(self.settings, self.Settings):
            raise GradlabError(f"{self.name} takes {self.Settings.__qualname__}, not {type(self.settings).__name__}")
        check_ranges(self.settings, self.name)

    def __repr__(self) -> str:
        """Name the class, its first setting, and all settings that are not at their defaults."""
        parts = [f"learned={len(self.learned)} tensors"] if self.learned else []
        return f"{type(self).__name__}({', '.join([*shown_settings(self.settings, first=True), *parts])})"

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same name, settings and learned tensors."""
        return isinstance(other, Codec) and _identity(self) == _identity(other)

    def __hash__(self) -> int:
        return hash(_identity(self))

    def cached(self, key: Hashable, make: Callable[[], Result], *sources: object) -> Result:
        """Return what `make` returned when this key came first, or when one of the sources was last another object.
        Besides these, the result follows from the settings alone."""
        known = self._cache.get(key)
        if known is None or len(known[0]) != len(sources) or any(map(operator.is_not, known[0], sources)):
            known = self._cache[key] = sources, make()
        return known[1]

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

    def running_state(self, layers: Sequence[Layer], world_size: int) -> Tensors:
        """Return the state from which most exchanges of a run start, for dry runs; empty if all are similar."""
        return {}

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

    def apply(self, gradients: Gradients, *, seed: int = 0) -> Applied:
        """Run one exchange, the first of a run, on given gradients.

        >>> done = codecs.make("cast").apply([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
        >>> done.decoded, done.payload_bytes
        ({'w': tensor([2.])}, 2.0)

        Args:
            gradients: one rank's, as a tensor or as tensors by layer name; or a list of these, one per rank.
            seed: seed of the codec's random numbers.

        Returns:
            The decoded mean, its relative error and the payload in bytes.

        Raises:
            GradlabError: for anything but gradients, or if ranks differ in layers or shapes.
        """
        grads = _by_rank(gradients)
        contexts = [Context(rank, len(grads), 0, next(iter(grads[0]), ""), seed) for rank in range(len(grads))]
        results = run_lockstep([exchange_group(self, own, {}, at) for own, at in zip(grads, contexts, strict=True)])
        mean, numel = results[0].value.mean, sum(grad.numel() for grad in grads[0].values())
        wanted = {name: torch.stack([own[name].double() for own in grads]).mean(0) for name in mean}
        error = sum(float((mean[name] - wanted[name]).norm()) ** 2 for name in mean) ** 0.5
        norm = sum(float(tensor.norm()) ** 2 for tensor in wanted.values()) ** 0.5
        return Applied(
            decoded=mean if _named(gradients) else next(iter(mean.values())),
            payload_bytes=fmean(result.payload_bytes for result in results),
            dense_bytes=4 * numel,
            relative_error=error / norm if norm else 0.0 if error == 0.0 else float("inf"),
        )

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


def _identity(codec: Any) -> tuple[Any, ...]:
    """Return what a codec and those that it wraps are: name, settings and learned tensors of each."""
    learned = tuple(sorted((key, hash_tensor(tensor)) for key, tensor in codec.learned.items()))
    return codec.name, codec.settings, learned, *(_identity(codec.codec) if hasattr(codec, "codec") else ())


def _named(gradients: Any) -> bool:
    """Return whether gradients came by layer name."""
    return isinstance(gradients[0] if isinstance(gradients, (list, tuple)) and gradients else gradients, Mapping)


def _by_rank(gradients: Any) -> list[Any]:
    ranks = gradients if isinstance(gradients, (list, tuple)) else [gradients]
    grads = [rank if isinstance(rank, Mapping) else {"gradient": rank} for rank in ranks]
    if not grads or not all(isinstance(grad, torch.Tensor) for own in grads for grad in own.values()):
        raise GradlabError(
            f"codec.apply: gradients = {str(gradients)[:80]}, expected a tensor, tensors by layer name, or a list of "
            "such, one per rank"
        )
    if any({k: t.shape for k, t in own.items()} != {k: t.shape for k, t in grads[0].items()} for own in grads):
        raise GradlabError("codec.apply: ranks have gradients of other names or shapes, expected the same of all")
    return grads


def shown_settings(settings: Any, *, first: bool) -> list[str]:
    """List the settings that are not at their defaults, as "name=value".

    settings: an instance of a codec's `Settings`.
    first: whether the first setting is listed even at its default.

    >>> from gradlab.codec import shown_settings
    >>> shown_settings(codecs.get("qsgd").Settings(bits=2), first=True)
    ['bits=2']
    """
    known = [(field, getattr(settings, field.name)) for field in fields_of(type(settings))]
    return [
        f"{field.name}={value!r}"
        for number, (field, value) in enumerate(known)
        if value != field.default or (first and number == 0)
    ]


def hash_tensor(tensor: torch.Tensor) -> str:
    """Compute the SHA-256, in hexadecimal, of a tensor's dtype, shape and bytes.

    >>> from gradlab.codec import hash_tensor
    >>> zeros = torch.zeros(2)
    >>> hash_tensor(zeros) == hash_tensor(zeros.clone()), hash_tensor(zeros) == hash_tensor(-zeros)
    (True, False)
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def exchange_group(
    codec: Codec,
    grads: Tensors,
    state: Tensors,
    context: Context,
    *,
    scaled_by: float = 1.0,
    reuse: bool = False,
) -> Coroutine[Exchanged]:
    """Run a codec on one group as an executor does: in float32, and without the loss scale.

    The mean comes back in the gradients' own dtype and scale. `own`, `compressor_input` and the state stay in
    float32 without the loss scale, so that a state remains valid when the loss scale changes.

    codec: the codec with its wrappers.
    grads: this rank's gradients by layer name, of any floating-point dtype; a `Batch` if layers have roles.
    state: the state that the last exchange returned, empty at first.
    context: surroundings of the exchange.
    scaled_by: the loss scale that the gradients are multiplied by.
    reuse: whether nobody reads the gradients after the exchange, so that the mean may be written in their memory.

    >>> from gradlab.codec import Context, exchange_group
    >>> from gradlab.collectives import run_lockstep
    >>> codec, gradients = codecs.make("cast"), [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}]
    >>> ranks = [exchange_group(codec, gradients[rank], {}, Context(rank, 2, 0, "w")) for rank in range(2)]
    >>> [result.value.mean["w"].tolist() for result in run_lockstep(ranks)]
    [[2.0], [2.0]]
    """
    scaled_by = 1.0 if codec.traits.keeps_dtype else scaled_by
    prepared = torch.Tensor.contiguous if codec.traits.keeps_dtype else functools.partial(_working, scaled_by=scaled_by)
    working = Batch.of(grads).like({name: prepared(grad) for name, grad in grads.items()})
    if reuse and codec.traits.frees_gradients:
        context = replace(context, memory=Memory(context.memory.workspace, working, overwrites=True))
    try:
        done = yield from run_codec(codec, working, state, context)
    except BadMessage as wrong:
        raise BadMessage(f"codec {described(codec)} on {context.group}: {wrong}") from wrong
    mean = {name: _rescaled(value, scaled_by, grads[name].dtype) for name, value in done.mean.items()}
    return replace(done, mean=mean, compressor_input=done.compressor_input or working)


def run_codec(codec: Codec, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
    """Run `exchange`. In a dense iteration, a codec without wrappers averages its input and keeps its state."""
    dense = context.dense and not hasattr(codec, "codec")
    return mean_only(grads, state) if dense else codec.exchange(grads, state, context)


def described(codec: Codec) -> str:
    """Name a codec and the wrappers around it, such as "topk+error_feedback"."""
    around = []
    while hasattr(codec, "codec"):
        around.append(codec.name)
        codec = codec.codec
    return "+".join([codec.name, *around])


def _squared_error(codec: Codec, layer: Layer, gradient: torch.Tensor, context: Context) -> float:
    [result] = run_lockstep([exchange_group(codec, Batch.of({layer.name: gradient}, [layer]), {}, context)])
    done = result.value
    return float((done.compressor_input[layer.name] - done.own[layer.name]).double().norm()) ** 2


def _working(grad: torch.Tensor, scaled_by: float) -> torch.Tensor:
    wide = grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
    return (wide if scaled_by == 1.0 else wide / scaled_by).contiguous()


def _rescaled(mean: torch.Tensor, scaled_by: float, dtype: torch.dtype) -> torch.Tensor:
    scaled = mean if scaled_by == 1.0 else mean * scaled_by
    return scaled if scaled.dtype == dtype else scaled.to(dtype)


def mean_only(grads: Tensors, state: Tensors | None = None) -> Coroutine[Exchanged]:
    """Exchange gradients uncompressed, see `means_of`, and keep a state.

    >>> from gradlab.codec import mean_only
    >>> from gradlab.collectives import run_lockstep
    >>> results = run_lockstep([mean_only({"w": torch.tensor([value])}) for value in (1.0, 3.0)])
    >>> results[0].value.mean, results[0].payload_bytes
    ({'w': tensor([2.])}, 4)
    """
    mean = yield from means_of(grads)
    return Exchanged(mean, dict(grads), {} if state is None else state)


def means_of(tensors: Tensors) -> Coroutine[Tensors]:
    """Average tensors over ranks, by name: by one Mean per large tensor, and one for the small ones of each dtype."""
    parts: dict[Any, Tensors] = {}
    for name, tensor in tensors.items():
        parts.setdefault(tensor.dtype if tensor.numel() < _SMALL else name, {})[name] = tensor
    answers = (yield tuple(Mean(concatenate(part)) for part in parts.values())) if parts else ()
    mean: Tensors = {}
    for part, answer in zip(parts.values(), answers, strict=True):
        mean |= separate(answer, part)
    return {name: mean[name] for name in tensors}
