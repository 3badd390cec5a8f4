"""The contract of a codec, and the wrappers and entry point that both executors share.

A codec turns one group of layers on one rank into requests and back (DESIGN: a coroutine that yields the collectives
it needs). It is pure: it changes none of its arguments; its memory between iterations is a dict of tensors that goes
in and comes back; its settings are a frozen dataclass; what was learned from data is kept apart in `learned`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from gradlab.collectives import Coroutine, Mean
from gradlab.errors import GradlabError
from gradlab.layout import Layer

Tensors = dict[str, torch.Tensor]


def seeded_generator(*key: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose stream is a function of `key` alone, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class Context:
    """Where and when an exchange happens. Random streams follow from (seed, iteration, group): resume needs no state.

    rank, world_size: this process and how many there are; iteration: synchronised steps since the start;
    group: the group's name; learning_rate, previous_learning_rate: by layer name, now and one iteration before;
    """

    rank: int
    world_size: int
    iteration: int
    group: str = ""
    seed: int = 0
    learning_rate: Mapping[str, float] = field(default_factory=dict)
    previous_learning_rate: Mapping[str, float] = field(default_factory=dict)

    def shared_generator(self, *key: object, every_iteration: bool = True) -> torch.Generator:
        """A CPU generator in the same state on every rank; new in every iteration, or the same in all (for starts).

        key: tells apart several streams of one group, such as its layers.
        """
        when = self.iteration if every_iteration else "start"
        return seeded_generator("shared", self.seed, when, self.group, *key)

    def rank_generator(self, *key: object) -> torch.Generator:
        """A CPU generator of this rank's own, new in every iteration."""
        return seeded_generator("rank", self.seed, self.iteration, self.group, self.rank, *key)


@dataclass(frozen=True)
class Exchanged:
    """What an exchange returns; every dict is keyed by layer name and holds tensors of the layers' shapes.

    mean: the aggregated gradient that every rank applies; own: what this rank's contribution amounted to after
    compression; state: the new state, keys "<layer name>/<what>"; asked: what the codec was asked to send (gradient
    plus residual under error feedback), for measuring the error ||asked - own||.
    """

    mean: Tensors
    own: Tensors
    state: Tensors = field(default_factory=dict)
    asked: Tensors = field(default_factory=dict)


class Codec(ABC):
    """One compression method with its settings.

    Subclasses set `name` (the file's name) and `Settings`, and may keep learned tensors under `learned`.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    linear: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    wants_error_feedback: ClassVar[bool] = True
    keeps_dtype: ClassVar[bool] = False  # whether half-precision gradients travel as they are
    Settings: ClassVar[type]

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        self.settings = self.Settings() if settings is None else settings
        self.learned = dict(learned or {})
        if not isinstance(self.settings, self.Settings):
            raise GradlabError(f"{self.name} takes {self.Settings.__qualname__}, not {type(self.settings).__name__}")

    @abstractmethod
    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        """Compress, exchange and decompress one group on one rank.

        grads: this rank's gradients by layer name, contiguous, float32 or float64. state: what the last exchange
        returned, empty at first.
        """

    @abstractmethod
    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        """Forecast of the bytes a rank contributes per exchange, mean over ranks; float32 gradients."""

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


class ErrorFeedback(Codec):
    """Add what earlier exchanges left unsent, and keep what this one leaves (Seide 2014; Karimireddy 2019).

    asked = gradient + residual; new residual = asked - own. Law: own + new residual == gradient + old residual.
    """

    name = "error_feedback"
    family = "wrapper"
    Settings = type(None)

    def __init__(self, codec: Codec) -> None:
        if isinstance(codec, ErrorFeedback):
            raise GradlabError("error feedback stacked on error feedback: the residual would be added twice")
        super().__init__()
        self.codec = codec

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        inner = {key: value for key, value in state.items() if not key.endswith("/residual")}
        asked = {
            name: grad + state[residual_key(name)] if residual_key(name) in state else grad
            for name, grad in grads.items()
        }
        done = yield from self.codec.exchange(asked, inner, context)
        residual = {residual_key(name): asked[name] - done.own[name] for name in grads}
        return Exchanged(done.mean, done.own, {**done.state, **residual}, asked)

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        return self.codec.payload_bytes(layers, world_size)

    def check(self, layers: Sequence[Layer]) -> None:
        self.codec.check(layers)

    def fit(self, layers: Sequence[Layer], samples: Mapping[str, torch.Tensor]) -> Codec:
        return ErrorFeedback(self.codec.fit(layers, samples))

    def to(self, device: torch.device | str) -> Codec:
        self.codec.to(device)
        return self


def residual_key(name: str) -> str:
    """State key of a layer's residual."""
    return f"{name}/residual"


def exchange_group(codec: Codec, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
    """The coroutine an executor runs for one group: half-precision gradients are computed with in float32.

    The mean comes back in the gradients' own dtype; `own`, `asked` and the state stay in the working dtype.
    """
    working = {name: grad.contiguous() if codec.keeps_dtype else _working(grad) for name, grad in grads.items()}
    done = yield from codec.exchange(working, state, context)
    mean = {name: value.to(grads[name].dtype) for name, value in done.mean.items()}
    return Exchanged(mean, done.own, done.state, done.asked or working)


def _working(grad: torch.Tensor) -> torch.Tensor:
    wide = grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
    return wide.contiguous()


def mean_only(grads: Tensors) -> Coroutine[Exchanged]:
    """Exchange gradients uncompressed: one Mean per layer."""
    names = list(grads)
    answers = yield tuple(Mean(grads[name]) for name in names)
    return Exchanged(dict(zip(names, answers, strict=True)), dict(grads))


def concatenate(grads: Tensors) -> torch.Tensor:
    """All layers of a group as one vector (sum of numel,), in order; a copy."""
    return torch.cat([grad.reshape(-1) for grad in grads.values()])


def separate(vector: torch.Tensor, like: Tensors) -> Tensors:
    """The inverse of `concatenate`: cut a vector into tensors shaped like those of `like` (views of the vector)."""
    pieces = vector.split([grad.numel() for grad in like.values()])
    return {name: piece.reshape(grad.shape) for (name, grad), piece in zip(like.items(), pieces, strict=True)}


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds no infinity and no NaN: its extremes show both, 25 times faster than each element."""
    if not tensor.numel():
        return True
    least, largest = torch.aminmax(tensor)
    return bool(torch.isfinite(least) & torch.isfinite(largest))


def squared_norm(tensor: torch.Tensor) -> float:
    """||tensor||^2 by way of the norm in at least float32; accumulating in float64 would take 30 times longer.

    NaN and infinity show; norms beyond the range of float32 (3e38) become infinite.
    """
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)))
    return norm * norm


LayerErrors = dict[str, tuple[float, float]]


def contribution_error(done: Exchanged) -> LayerErrors:
    """Per layer (||asked - own||^2, ||asked||^2) of one rank: GradiVeQ's eq. (7) and what normalises it."""
    errors = {}
    for name, asked in done.asked.items():
        left = done.state.get(residual_key(name))  # under error feedback that is what asked - own is
        errors[name] = (squared_norm(asked - done.own[name] if left is None else left), squared_norm(asked))
    return errors


def add_errors(total: LayerErrors, more: Mapping[str, Sequence[float]]) -> LayerErrors:
    """Add squared errors and norms layer by layer, in place; returns `total`."""
    for name, (error, norm) in more.items():
        before = total.get(name, (0.0, 0.0))
        total[name] = (before[0] + error, before[1] + norm)
    return total


def relative(error: float, norm: float) -> float:
    """sqrt(error / norm) of squared quantities; 0 when both are 0."""
    if norm > 0.0:
        return math.sqrt(error / norm)
    return 0.0 if error == 0.0 else math.inf


def build_settings(codec: type[Codec], values: Mapping[str, Any]) -> Any:
    """Settings of a codec from plain JSON values.

    Raises:
        GradlabError: for an unknown setting, a wrong type, or a value out of range (checked by the settings class).
    """
    fields = {f.name: f for f in dataclasses.fields(codec.Settings)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        known = ", ".join(fields) or "none"
        raise GradlabError(f"codec {codec.name} has no setting {', '.join(unknown)}; it has: {known}")
    for name, value in values.items():
        _check_type(codec.name, fields[name], value)
    return codec.Settings(**values)


_ACCEPTED: dict[str, Callable[[Any], bool]] = {
    "None": lambda v: v is None,
    "int": lambda v: type(v) is int,
    "float": lambda v: (type(v) is float and math.isfinite(v)) or (type(v) is int and abs(v) < 2**53),
    "bool": lambda v: type(v) is bool,
    "str": lambda v: type(v) is str,
}


def _check_type(codec: str, setting: Any, value: Any) -> None:
    wanted = setting.type if isinstance(setting.type, str) else setting.type.__name__
    if not any(_ACCEPTED[part](value) for part in wanted.split(" | ")):
        raise GradlabError(f"{codec}: setting {setting.name} = {repr(value)[:80]}, expected {wanted}")


def require(condition: bool, codec: str, setting: str, value: object, expected: str) -> None:
    """Check of one setting's range.

    Raises:
        GradlabError: "<codec>: setting <setting> = <value>, expected <expected>".
    """
    if not condition:
        raise GradlabError(f"{codec}: setting {setting} = {value!r}, expected {expected}")
