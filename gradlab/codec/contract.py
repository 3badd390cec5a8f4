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
    """A generator whose stream is a function of `key` alone, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class Context:
    """Where and when an exchange happens. Random streams follow from (seed, iteration, group): resume needs no state.

    rank, world_size: this process and how many there are; iteration: synchronised steps since the start;
    group: the group's name; learning_rate: by layer name; previous_learning_rate: the last one that was not zero;
    loss_scale: the run's factor on its loss (gradients that reach a codec are free of it);
    start: the first iteration that the schedule compresses;
    plain_sgd: whether the optimizer is SGD without momentum of its own;
    parameters: by layer name, the model's at this iteration; empty where they are not known, as in a trace's replay;
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
        """A CPU generator in the same state on every rank; new in every iteration, or the same in all (for starts).

        key: tells apart several streams of one group, such as its layers.
        """
        when = self.iteration if every_iteration else "start"
        return seeded_generator("shared", self.seed, when, self.group, *key)

    def rank_generator(self, *key: object) -> torch.Generator:
        """A CPU generator of this rank's own, new in every iteration."""
        return seeded_generator("rank", self.seed, self.iteration, self.group, self.rank, *key)

    def residual_ratio(self, layer: str, wanted: bool | None) -> float:
        """eta_(t-1) / eta_t, what a residual is multiplied by; 1 where a rate is not known, or zero: no ratio then.

        wanted: the wrapper's setting; None asks for it if the optimizer is SGD without momentum of its own.
        """
        if not self._follows_rates(wanted):
            return 1.0
        now, before = self.learning_rate.get(layer, 0.0), self.previous_learning_rate.get(layer, 0.0)
        return before / now if now > 0 and before > 0 else 1.0

    def stands_still(self, layer: str, wanted: bool | None) -> bool:
        """Whether a layer's rate is zero: what this iteration sends is not applied, so its residual is to be held.

        x~_t = x_t - eta e then stays as it is, with eta the last rate that was not zero. wanted: see `residual_ratio`.
        """
        return self._follows_rates(wanted) and self.learning_rate.get(layer) == 0

    def _follows_rates(self, wanted: bool | None) -> bool:
        return self.plain_sgd if wanted is None else wanted


class Deferred(Mapping[str, torch.Tensor]):
    """Tensors by layer name, computed when the first of them is asked for: most exchanges need no `own`.

    unsent: computes what is left of the exchange's gradients without them, in fewer passes than a subtraction takes.
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
    """What an exchange returns; every dict is keyed by layer name and holds tensors of the layers' shapes.

    mean: the aggregated gradient that every rank applies; own: what this rank's contribution amounted to after
    compression; state: the new state, keys "<layer name>/<what>"; asked: what the codec was asked to send (gradient
    plus residual under error feedback), for measuring the error ||asked - own||; unsent: that difference, where it
    was computed anyway.
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

    decoded: the aggregated gradient that every rank would apply, a tensor or tensors by layer name, as the gradients
    came; payload_bytes: what a rank contributed, mean over ranks; dense_bytes: what it would have been uncompressed;
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

    family: such as "sparsification"; formula: of payload bytes, from n elements, N ranks and settings by their names;
    paper: authors, venue, year, which the module names in full.
    """

    family: str
    formula: str
    paper: str = "-"


@dataclass(frozen=True)
class PlanDefaults:
    """What a plan does with a codec if nothing else is asked for.

    roles, minimum_dimensions, minimum_numel: of the layers that it is given; group_bytes: of gradients, up to so many
    layers that follow each other are treated together; warmup_steps: dense iterations before it; error_feedback,
    two_way: whether it is put inside these wrappers.
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
    """What holds for every gradient x of a group, C(x) what one rank's contribution amounts to.

    linear: C commutes with the sum over ranks; unbiased: E C(x) = x, to the resolution of the random numbers;
    delta: in (0, 1], E||C(x) - x||^2 <= (1 - delta) ||x||^2; omega: E||C(x) - x||^2 <= omega ||x||^2, of an unbiased
    codec. E is over the codec's own draws; None where nothing is guaranteed.
    """

    linear: bool = False
    unbiased: bool = False
    delta: float | None = None
    omega: float | None = None


class Codec(ABC):
    """One compression method with its settings.

    Subclasses set `name` (the file's name), `about` and `Settings`, and may keep learned tensors under `learned`.
    State that is not the same on every rank belongs to wrappers (see `gradlab.codec.wrapper`): a codec's own is shared.
    """

    name: ClassVar[str]
    about: ClassVar[About]
    defaults: PlanDefaults = PlanDefaults()  # of an instance, where they follow from its settings
    learns: ClassVar[bool] = False
    selects: ClassVar[bool] = False  # whether it sends some elements, and of others nothing
    keeps_dtype: ClassVar[bool] = False  # whether gradients travel in their own dtype, with the loss scale on them
    group_state: ClassVar[frozenset[str]] = frozenset()  # names of what it keeps for a group, not for one layer of it
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)  # settings that are worth comparing, for a planner
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
        """Whether the other does the same: equal name, settings and learned tensors."""
        return isinstance(other, Codec) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return self.name, self.settings, tuple(sorted((key, hash_tensor(t)) for key, t in self.learned.items()))

    @abstractmethod
    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        """Compress, exchange and decompress one group on one rank.

        grads: this rank's gradients by layer name, contiguous, float32 or float64. state: what the last exchange
        returned, empty at first.
        """

    def dense_exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        """What stands for `exchange` in iterations that the schedule leaves uncompressed; the state is kept."""
        done = yield from mean_only(grads)
        return replace(done, state=state)

    def acts_when_dense(self, state: Tensors) -> bool:
        """Whether `dense_exchange` does anything but average, so that the executor has to run it."""
        return False

    @abstractmethod
    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        """Forecast of the bytes a rank contributes per exchange, mean over ranks and a run; float32 gradients."""

    def next_payload_bytes(self, layers: Sequence[Layer], world_size: int, state: Tensors) -> float:
        """The same for the one exchange that starts from `state`; they differ for codecs that work in phases."""
        return self.payload_bytes(layers, world_size)

    def running_state(self, layers: Sequence[Layer], world_size: int) -> Tensors:
        """A state as most exchanges of a run start from, for forecasts: empty, if the first one is like all others."""
        return {}

    @property
    def refuses_error_feedback(self) -> str:
        """Why error feedback would diverge; empty if it does not."""
        return ""

    @property
    def varying(self) -> bool:
        """Whether the sizes of messages depend on the gradients' values, so that forecasts are estimates."""
        return False

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        """What holds for a group of these layers whatever their gradients are."""
        return Guarantees()

    @classmethod
    def squared_errors(
        cls, codecs: Sequence[Codec], layer: Layer, gradient: torch.Tensor, context: Context
    ) -> list[float]:
        """||C(x) - x||^2 for several settings of this method, one rank alone and from an empty state.

        Methods whose settings can share the work, or that need several iterations to come to what they send, override
        this. gradient: x, of the layer's shape.
        """
        return [_squared_error(codec, layer, gradient, context) for codec in codecs]

    def apply(self, gradients: Gradients, *, seed: int = 0) -> Applied:
        """What one exchange, the first of a run, makes of gradients: to try a codec out.

        gradients: one rank's, a tensor or tensors by layer name; or a list of such, one per rank. seed: of the codec's
        random numbers.
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
        """A codec fitted on averaged gradients (T, *layer.shape) by layer name; methods that learn override this."""
        return self

    def to(self, device: torch.device | str) -> Codec:
        """Move the learned tensors to a device, in place; returns self."""
        self.learned = {key: value.to(device) for key, value in self.learned.items()}
        return self

    def with_settings(self, **changes: Any) -> Codec:
        """The same codec with some settings changed; it shares the learned tensors."""
        return type(self)(replace(self.settings, **changes), self.learned)

    def adopted_state(self, state: Tensors) -> Tensors:
        """What this codec goes on with from the state that another setting of the same method left: nothing, if the
        method does not say otherwise."""
        return {}

    def redistribute(self, states: Sequence[Tensors], rank: int, world_size: int, residuals: str) -> Tensors:
        """The state of one of `world_size` ranks that continue the run of len(states) ranks; see
        `gradlab.codec.wrapper`."""
        return states[0]


def register(codec: Own) -> Own:
    """Make a codec of your own known by its `name` in this process, for plans and artifacts; returns it (a decorator).

    Every process that builds or loads a plan with it has to do so: an artifact holds names and settings, never code. A
    class of the same module and name takes the old one's place, as after a reload.

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
    """name=value of settings that are not at their defaults; first: the first one in any case."""
    known = [(field, getattr(settings, field.name)) for field in fields_of(type(settings))]
    return [
        f"{field.name}={value!r}"
        for place, (field, value) in enumerate(known)
        if value != field.default or (first and place == 0)
    ]


def hash_tensor(tensor: torch.Tensor) -> str:
    """Sha256 (hex) of a tensor's dtype, shape and bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return hashlib.sha256(head + flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def exchange_group(
    codec: Codec, grads: Tensors, state: Tensors, context: Context, *, scaled_by: float = 1.0, dense: bool = False
) -> Coroutine[Exchanged]:
    """The coroutine an executor runs for one group: codecs compute in float32 and without the loss scale.

    scaled_by: the loss scale that is on the gradients; states never hold it, so that a change of it leaves them
    sound. dense: whether the schedule leaves this iteration uncompressed. The mean comes back in the gradients' own
    dtype and scale; `own`, `asked` and the state stay as the codec works with them.
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
    """Exchange gradients uncompressed: one Mean per layer."""
    names = list(grads)
    answers = yield tuple(Mean(grads[name]) for name in names)
    return Exchanged(dict(zip(names, answers, strict=True)), dict(grads))


def concatenate(grads: Tensors) -> torch.Tensor:
    """All layers of a group as one vector (sum of numel,), in order; one layer's is a view of it."""
    pieces = [grad.reshape(-1) for grad in grads.values()]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def separate(vector: torch.Tensor, like: Tensors) -> Tensors:
    """The inverse of `concatenate`: cut a vector into tensors shaped like those of `like` (views of the vector)."""
    pieces = vector.split([grad.numel() for grad in like.values()])
    return {name: piece.reshape(grad.shape) for (name, grad), piece in zip(like.items(), pieces, strict=True)}
