"""The contract of a codec, and the entry point that both executors share.

A codec turns one group of layers on one rank into requests and back (DESIGN: a coroutine that yields the collectives
it needs). It is pure: it changes none of its arguments; its memory between iterations is a dict of tensors that goes
in and comes back; its settings are a frozen dataclass; what was learned from data is kept apart in `learned`.
"""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from statistics import fmean
from typing import Any, ClassVar, TypeVar

import torch

from gradlab.codec.registry import CODECS
from gradlab.codec.settings import build_settings, check_ranges, fields_of
from gradlab.collectives import Coroutine, Mean, run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import ROLES, Layer
from gradlab.workspace import Workspace

Tensors = dict[str, torch.Tensor]
Own = TypeVar("Own", bound="type[Codec]")


def seeded_generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator whose stream follows from `key` alone, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class Context:
    """Where and when an exchange happens. Random streams follow from (seed, iteration, group): resume needs no state.

    rank: of this process, from 0.
    world_size: number of ranks, N.
    iteration: synchronised steps since the start of the run, from 0.
    group: the group's name.
    seed: of the plan's random streams.
    learning_rate: by layer name.
    previous_learning_rate: by layer name, the last one that was not zero.
    loss_scale: the run's factor on its loss; gradients that reach a codec are free of it.
    start: the first iteration that the schedule compresses.
    plain_sgd: whether the optimizer is SGD without momentum of its own.
    parameters: by layer name, the model's at this iteration; empty where they are not known, as in a trace's replay.
    workspace: where results as large as gradients take their memory from.
    """

    rank: int
    world_size: int
    iteration: int
    group: str = ""
    seed: int = 0
    learning_rate: Mapping[str, float] = field(default_factory=dict)
    previous_learning_rate: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float = 1.0
    start: int = 0
    plain_sgd: bool = False
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)

    def shared_generator(self, *key: object, every_iteration: bool = True) -> torch.Generator:
        """Make a CPU generator that is in the same state on every rank.

        key: tells apart several streams of one group, such as its layers.
        every_iteration: whether the stream is another in every iteration, or the same in all (for starts).
        """
        when = self.iteration if every_iteration else "start"
        return seeded_generator("shared", self.seed, when, self.group, *key)

    def rank_generator(self, *key: object) -> torch.Generator:
        """Make a CPU generator of this rank's own, another stream in every iteration."""
        return seeded_generator("rank", self.seed, self.iteration, self.group, self.rank, *key)

    def residual_ratio(self, layer: str, wanted: bool | None) -> float:
        """The factor on a layer's residual, eta_(t-1) / eta_t; 1 where one of the rates is unknown or zero.

        wanted: the wrapper's setting, whether there is to be a ratio; None: if the optimizer is SGD without momentum.
        """
        if not self._follows_rates(wanted):
            return 1.0
        now, before = self.learning_rate.get(layer, 0.0), self.previous_learning_rate.get(layer, 0.0)
        return before / now if now > 0 and before > 0 else 1.0

    def stands_still(self, layer: str, wanted: bool | None) -> bool:
        """Whether a layer's learning rate is zero: what this iteration sends is not applied, so its residual is held.

        x~_t = x_t - eta e then stays as it is, with eta the last rate that was not zero.
        wanted: see `residual_ratio`.
        """
        return self._follows_rates(wanted) and self.learning_rate.get(layer) == 0

    def _follows_rates(self, wanted: bool | None) -> bool:
        return self.plain_sgd if wanted is None else wanted


class Deferred(Mapping[str, torch.Tensor]):
    """Tensors by layer name, computed when the first of them is read: most exchanges need no `own`.

    Args:
        names: of the layers.
        compute: gives the tensors: the decoded contribution of this rank.
        unsent: gives the compression error, the gradients less these tensors, in fewer passes than a subtraction; None:
            subtract.
    """

    def __init__(
        self,
        names: Iterable[str],
        compute: Callable[[], Mapping[str, torch.Tensor]],
        unsent: Callable[[], Tensors] | None = None,
    ) -> None:
        self._names = tuple(names)
        self._compute = compute
        self.unsent = unsent
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
    """What an exchange returns. Tensors are by layer name and of the layers' shapes.

    A codec sets `mean`, `own` and, if it has one, `state`. Wrappers and executors set the other two.

    mean: the aggregated gradient, which every rank applies.
    own: this rank's decoded contribution, C(x): what the other ranks decode from what it sent.
    state: the new state, keys "<layer name>/<what>".
    asked: the compressor's input, x: the gradient, or under error feedback the gradient plus the residual.
    unsent: the compression error, asked - own, where a wrapper has computed it; else empty.
    """

    mean: Tensors
    own: Mapping[str, torch.Tensor]
    state: Tensors = field(default_factory=dict)
    asked: Tensors = field(default_factory=dict)
    unsent: Tensors = field(default_factory=dict)


Gradients = torch.Tensor | Tensors | Sequence[torch.Tensor] | Sequence[Tensors]


@dataclass(frozen=True)
class Applied:
    """What `Codec.apply` gives.

    decoded: the aggregated gradient that every rank would apply: a tensor, or tensors by layer name, as was given.
    payload_bytes: bytes that a rank contributed, mean over ranks.
    dense_bytes: bytes of a rank's uncompressed gradient, 4 per element.
    relative_error: ||decoded - m|| / ||m||, m the mean of the gradients.
    """

    decoded: torch.Tensor | Tensors
    payload_bytes: float
    dense_bytes: int
    relative_error: float

    @property
    def ratio(self) -> float:
        """How many times smaller the payload is than the gradient."""
        return self.dense_bytes / self.payload_bytes if self.payload_bytes else float("inf")

    def __repr__(self) -> str:
        return (
            f"Applied({self.payload_bytes:,.0f} bytes instead of {self.dense_bytes:,}, "
            f"relative error {self.relative_error:.3g})"
        )


@dataclass(frozen=True)
class About:
    """What a codec is, for tables.

    family: such as "sparsification".
    formula: of payload bytes, from n elements, N ranks and settings by their names.
    paper: authors, venue, year; the module's docstring names the paper in full.
    """

    family: str
    formula: str
    paper: str = "-"


@dataclass(frozen=True)
class PlanDefaults:
    """What `Plan.uniform` does with a codec by default.

    roles: of the layers that are compressed.
    minimum_dimensions, minimum_numel: dimensions and elements that a layer needs to be compressed.
    group_bytes: bytes of gradients up to which consecutive layers share a group; 0: one group per layer.
    warmup_steps: dense iterations before the first compressed one.
    error_feedback, two_way: whether these wrappers are put around the codec.
    """

    roles: tuple[str, ...] = ROLES
    minimum_dimensions: int = 2
    minimum_numel: int = 256
    group_bytes: int = 0
    warmup_steps: int = 0
    error_feedback: bool = True
    two_way: bool = False


@dataclass(frozen=True)
class Guarantees:
    """What holds for every gradient x of a group. C(x) is one rank's decoded contribution, E is over the codec's draws.

    linear: whether C commutes with the sum over ranks.
    unbiased: whether E C(x) = x, to the resolution of the random numbers.
    delta: in (0, 1], E||C(x) - x||^2 <= (1 - delta) ||x||^2; None: no such bound.
    omega: of an unbiased codec, E||C(x) - x||^2 <= omega ||x||^2; None: no such bound.
    """

    linear: bool = False
    unbiased: bool = False
    delta: float | None = None
    omega: float | None = None


class Codec(ABC):
    """One compression method with its settings.

    A subclass sets `name` (the file's name), `about` and `Settings`, a frozen dataclass, and defines `exchange` and
    `payload_bytes`. A codec's state is the same on every rank; only wrappers keep state that differs between ranks
    (see `gradlab.codec.wrapper`).

    Args:
        settings: of the class's `Settings`; None: the defaults.
        learned: tensors that were learned from data, by name.
    """

    name: ClassVar[str]
    about: ClassVar[About]
    defaults: PlanDefaults = PlanDefaults()  # an instance may set its own, where they follow from its settings
    learns: ClassVar[bool] = False
    selects: ClassVar[bool] = False  # whether it sends some elements, and of others nothing
    keeps_dtype: ClassVar[bool] = False  # whether gradients travel in their own dtype, with the loss scale on them
    group_state: ClassVar[frozenset[str]] = frozenset()  # names of state entries that are the group's, not a layer's
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)  # settings worth comparing, for a planner
    Settings: ClassVar[type]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "Settings" in vars(cls):
            check_ranges(cls.Settings, getattr(cls, "name", cls.__name__))

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        self.settings = self.Settings() if settings is None else settings
        self.learned = dict(learned or {})
        if not isinstance(self.settings, self.Settings):
            raise GradlabError(f"{self.name} takes {self.Settings.__qualname__}, not {type(self.settings).__name__}")

    def __repr__(self) -> str:
        """The class with its first setting, and with those that are not at their defaults."""
        parts = [f"learned={len(self.learned)} tensors"] if self.learned else []
        return f"{type(self).__name__}({', '.join([*shown_settings(self.settings, first=True), *parts])})"

    def __eq__(self, other: object) -> bool:
        """Whether both have the same name, settings and learned tensors."""
        return isinstance(other, Codec) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return self.name, self.settings, tuple(sorted((key, hash_tensor(t)) for key, t in self.learned.items()))

    @abstractmethod
    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        """Compress, exchange and decompress one group on one rank: a coroutine that yields the collectives it needs.

        grads: this rank's gradients by layer name, contiguous, float32 or float64.
        state: what the last exchange returned, empty at first.
        context: where and when.
        """

    def dense_exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        """Run in place of `exchange` in iterations that the schedule leaves uncompressed; the state is kept."""
        done = yield from mean_only(grads)
        return replace(done, state=state)

    def acts_when_dense(self, state: Tensors) -> bool:
        """Whether `dense_exchange` does more than average, so that the executor has to run it."""
        return False

    @abstractmethod
    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        """Forecast the bytes that a rank contributes per exchange, mean over ranks and a run, for float32 gradients."""

    def next_payload_bytes(self, layers: Sequence[Layer], world_size: int, state: Tensors) -> float:
        """Forecast the bytes of the exchange that starts from `state`; it differs for codecs that work in phases."""
        return self.payload_bytes(layers, world_size)

    def running_state(self, layers: Sequence[Layer], world_size: int) -> Tensors:
        """The state from which most exchanges of a run start, for forecasts; empty if all exchanges are alike."""
        return {}

    @property
    def refuses_error_feedback(self) -> str:
        """Why error feedback would diverge around this codec; empty if it does not."""
        return ""

    @property
    def varying(self) -> bool:
        """Whether message sizes depend on the gradients' values, so that forecasts of bytes are estimates."""
        return False

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        """What holds for a group of these layers, whatever their gradients."""
        return Guarantees()

    @classmethod
    def squared_errors(
        cls, codecs: Sequence[Codec], layer: Layer, gradient: torch.Tensor, context: Context
    ) -> list[float]:
        """Measure ||C(x) - x||^2 for several settings of this method, on one rank alone and from an empty state.

        Methods whose settings can share the work override this, and those that need several iterations until they send
        what they usually send.

        codecs: one per setting.
        gradient: x, of the layer's shape.
        Returns one squared error per codec.
        """
        return [_squared_error(codec, layer, gradient, context) for codec in codecs]

    def apply(self, gradients: Gradients, *, seed: int = 0) -> Applied:
        """Try the codec out: run one exchange, the first of a run, on given gradients.

        gradients: one rank's, a tensor or tensors by layer name; or a list of such, one per rank.
        seed: of the codec's random numbers.
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
        if self.learned and not self.learns:
            raise GradlabError(f"codec {self.name} learns nothing, but came with {sorted(self.learned)}")

    def fit(self, layers: Sequence[Layer], samples: Mapping[str, torch.Tensor]) -> Codec:
        """A codec of this kind fitted on samples; methods that learn override this.

        samples: averaged gradients by layer name, (T, *layer.shape).
        """
        return self

    def to(self, device: torch.device | str) -> Codec:
        """Move the learned tensors to a device, in place; returns self."""
        self.learned = {key: value.to(device) for key, value in self.learned.items()}
        return self

    def with_settings(self, **changes: Any) -> Codec:
        """A codec with some settings changed; it shares the learned tensors."""
        return type(self)(replace(self.settings, **changes), self.learned)

    def adopted_state(self, state: Tensors) -> Tensors:
        """The part of another setting's state with which this codec goes on; nothing by default."""
        return {}

    def redistribute(self, states: Sequence[Tensors], rank: int, world_size: int, residuals: str) -> Tensors:
        """The state of rank `rank` of `world_size` ranks that continue a run of len(states) ranks.

        residuals: what becomes of state that differs between ranks, see `Wrapper.redistribute`.
        """
        return states[0]


def register(codec: Own) -> Own:
    """Make a codec of your own known by its `name` in this process, for plans and artifacts: a decorator.

    Every process that builds or loads a plan with the codec has to register it: an artifact holds names and settings,
    never code. A class of the same module and name replaces the registered one, as after a reload.

    Raises:
        GradlabError: for a class that is no complete codec, or a name that another one has.
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
    for settings in codec.candidates:
        build_settings(codec, settings)
    CODECS.registered[codec.name] = codec
    return codec


def _named(gradients: Any) -> bool:
    """Whether gradients came by layer name."""
    return isinstance(gradients[0] if isinstance(gradients, (list, tuple)) and gradients else gradients, Mapping)


def _by_rank(gradients: Any) -> list[Tensors]:
    ranks = gradients if isinstance(gradients, (list, tuple)) else [gradients]
    grads = [dict(rank) if isinstance(rank, Mapping) else {"gradient": rank} for rank in ranks]
    if not grads or not all(isinstance(grad, torch.Tensor) for own in grads for grad in own.values()):
        raise GradlabError(
            f"codec.apply: gradients = {str(gradients)[:80]}, expected a tensor, tensors by layer name, or a list of "
            "such, one per rank"
        )
    if any({k: t.shape for k, t in own.items()} != {k: t.shape for k, t in grads[0].items()} for own in grads):
        raise GradlabError("codec.apply: ranks have gradients of other names or shapes, expected the same of all")
    return grads


def shown_settings(settings: Any, *, first: bool) -> list[str]:
    """Settings that are not at their defaults, as "name=value". first: whether the first one is among them anyway."""
    known = [(field, getattr(settings, field.name)) for field in fields_of(type(settings))]
    return [
        f"{field.name}={value!r}"
        for number, (field, value) in enumerate(known)
        if value != field.default or (first and number == 0)
    ]


def hash_tensor(tensor: torch.Tensor) -> str:
    """Sha256 (hex) of a tensor's dtype, shape and bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return hashlib.sha256(head + flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def exchange_group(
    codec: Codec, grads: Tensors, state: Tensors, context: Context, *, scaled_by: float = 1.0, dense: bool = False
) -> Coroutine[Exchanged]:
    """Run a codec on one group as an executor does: in float32, and without the loss scale.

    The mean comes back in the gradients' own dtype and scale. `own`, `asked` and the state stay in float32 without the
    loss scale, so that another loss scale leaves states sound.

    scaled_by: the loss scale that is on the gradients.
    dense: whether the schedule leaves this iteration uncompressed.
    """
    if codec.keeps_dtype:
        working, scaled_by = {name: grad.contiguous() for name, grad in grads.items()}, 1.0
    else:
        working = {name: _working(grad, scaled_by) for name, grad in grads.items()}
    run = codec.dense_exchange if dense else codec.exchange
    done = yield from run(working, state, context)
    mean = {name: _rescaled(value, scaled_by).to(grads[name].dtype) for name, value in done.mean.items()}
    return replace(done, mean=mean, asked=done.asked or working)


def _squared_error(codec: Codec, layer: Layer, gradient: torch.Tensor, context: Context) -> float:
    [result] = run_lockstep([exchange_group(codec, {layer.name: gradient}, {}, context)])
    done = result.value
    return float((done.asked[layer.name] - done.own[layer.name]).norm()) ** 2


def _working(grad: torch.Tensor, scaled_by: float) -> torch.Tensor:
    wide = grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
    return (wide if scaled_by == 1.0 else wide / scaled_by).contiguous()


def _rescaled(mean: torch.Tensor, scaled_by: float) -> torch.Tensor:
    return mean if scaled_by == 1.0 else mean * scaled_by


def mean_only(grads: Tensors) -> Coroutine[Exchanged]:
    """Exchange gradients uncompressed, by one Mean per layer."""
    names = list(grads)
    answers = yield tuple(Mean(grads[name]) for name in names)
    return Exchanged(dict(zip(names, answers, strict=True)), dict(grads))


def concatenate(grads: Tensors) -> torch.Tensor:
    """Lay all layers of a group end to end, as one vector (sum of numel,); of a single layer the vector is a view."""
    pieces = [grad.reshape(-1) for grad in grads.values()]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def separate(vector: torch.Tensor, like: Tensors) -> Tensors:
    """The inverse of `concatenate`: cut a vector into tensors shaped like those of `like` (views of the vector)."""
    pieces = vector.split([grad.numel() for grad in like.values()])
    return {name: piece.reshape(grad.shape) for (name, grad), piece in zip(like.items(), pieces, strict=True)}
