"""The view that an exchange has of its step while it is recorded: nothing that another step would have otherwise.

Its random numbers are an exception where they are drawn on the device: they come from generators that are seeded anew
whenever the recording runs, as they would have been without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

import torch

from gradlab.codec.context import Context, Streams, alone
from gradlab.coding.random_bits import Redrawn, next_seed
from gradlab.errors import GradlabError
from gradlab.kernels import on_device

_RANDOM_NUMBERS = "random numbers that are drawn anew"
_OTHERWISE = "its random numbers are drawn in another way from step to step"


class NotRecordable(GradlabError):
    """An exchange does what a graph cannot repeat."""


class _Changing:
    """Stands for a value, such as "the iteration", that changes from step to step: it can be passed on, and not be
    used."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotRecordable(f"it reads {self._what}")

    def __getattr__(self, name: str) -> Any:
        self._refuse()


_USES = "str format bool int float index hash len iter getitem contains eq ne lt le gt ge add radd sub rsub mul rmul"
for _use in (*_USES.split(), "mod", "rmod", "floordiv", "rfloordiv", "truediv", "rtruediv", "pow", "neg", "call"):
    setattr(_Changing, f"__{_use}__", _Changing._refuse)


class _ChangingStream(_Changing, Redrawn):
    """Stands for a rank's generator. draws: the exchange's; number: of the stream."""

    def __init__(self, draws: Draws, number: int) -> None:
        super().__init__(_RANDOM_NUMBERS)
        self._draws, self._number = draws, number

    def on(self, device: torch.device) -> torch.Generator:
        if device.type == "cpu" or on_device(device):  # the host seeds numpy there, or kernels
            self._refuse()
        return self._draws.next(self._number, device)


class Draws:
    """The device's generators from which a recorded exchange draws, and the streams that seed them. A graph has to know
    them before it is recorded: an exchange under watch, for which `watched` is None, shows which there are."""

    def __init__(self, watched: Draws | None = None) -> None:
        self._watched = watched
        self._keys: list[tuple[object, ...]] = []  # by stream, of `Streams.of_rank`
        self._stretches: list[list[tuple[int, torch.device]]] = []  # what seeds each generator, and where that is
        self._generators: list[list[torch.Generator]] = []
        self._given = 0  # in the stretch at hand
        self._sources: dict[int, torch.Generator] = {}
        self._context: Context | None = None

    def begin(self, context: Context) -> None:
        """Begin an exchange, whose streams are those of the context."""
        self._context, self._sources = context, {}

    def stream(self, key: tuple[object, ...]) -> Any:
        """Stand for the next stream of a rank that the exchange asks for."""
        self._keys.append(key)
        return _ChangingStream(self, len(self._keys) - 1)

    def stretch(self) -> list[torch.Generator]:
        """Begin a stretch that is recorded. Returns its generators, as far as they are known."""
        number, self._given = len(self._generators), 0
        known = [] if self._watched is None else self._watched._stretches[number : number + 1]
        self._stretches.append([*known[0]] if known else [])
        self._generators.append([torch.Generator(device) for _, device in self._stretches[-1]])
        self.seed(number)
        return self._generators[-1]

    def next(self, stream: int, device: torch.device) -> torch.Generator:
        """Give the stretch at hand its next generator. Raises NotRecordable for one that nobody expects."""
        if self._watched is None:
            self._stretches[-1].append((stream, device))
            self._generators[-1].append(torch.Generator(device).manual_seed(next_seed(self._source(stream))))
        elif [(stream, device)] != self._stretches[-1][self._given : self._given + 1]:
            raise NotRecordable(_OTHERWISE)
        self._given += 1
        return self._generators[-1][self._given - 1]

    def complete(self) -> None:
        """End the stretch at hand. Raises NotRecordable if it drew less than under watch."""
        if self._given < len(self._stretches[-1]):
            raise NotRecordable(_OTHERWISE)

    def seed(self, number: int) -> None:
        """Seed the generators of a stretch for the exchange that has begun."""
        for (stream, _), generator in zip(self._stretches[number], self._generators[number], strict=True):
            generator.manual_seed(next_seed(self._source(stream)))

    def _source(self, stream: int) -> torch.Generator:
        if stream not in self._sources:
            assert self._context is not None
            keys = self._keys if self._watched is None else self._watched._keys
            self._sources[stream] = self._context.random.of_rank(*keys[stream])
        return self._sources[stream]


@dataclass(frozen=True)
class _FixedStreams(Streams):
    """Streams of a recorded exchange."""

    draws: Draws

    def shared(self, *key: object, every_iteration: bool = True) -> Any:
        return _Changing(_RANDOM_NUMBERS) if every_iteration else super().shared(*key, every_iteration=False)

    def seeds(self, keys: tuple[str, ...]) -> Any:
        return _Changing(_RANDOM_NUMBERS)

    def of_rank(self, *key: object) -> Any:
        return self.draws.stream(key)


@dataclass(frozen=True)
class _FixedContext(Context):
    """A context without what changes from step to step. draws: takes note of random numbers."""

    draws: Draws = field(default_factory=Draws)

    @property
    def random(self) -> Any:
        return _FixedStreams((self.seed, "", self.group), self.rank, self.draws)


def fixed(context: Context, draws: Draws) -> Context:
    """Hide what changes from step to step. Raises NotRecordable if results are shared between ranks."""
    if context.once is not alone:
        raise NotRecordable("what ranks compute alike is shared between them")
    values = {one.name: getattr(context, one.name) for one in fields(Context)}
    rates, parameters = _Changing("learning rates"), _Changing("parameters")
    changing: Any = {"learning_rate": rates, "previous_learning_rate": rates, "parameters": parameters}
    hidden: dict[str, Any] = {
        "iteration": _Changing("the iteration"),
        "training": replace(context.training, **changing),
    }
    return _FixedContext(**{**values, **hidden, "draws": draws})


def reason(error: Exception) -> str:
    """Say in one line why an exchange could not be recorded."""
    if isinstance(error, TypeError) and "_Changing" in str(error):  # PyTorch's own words for what it cannot take
        return "it draws random numbers"
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
