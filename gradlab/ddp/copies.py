"""The states and hooks of gradlab in a copy of the model that they are attached to.

`copy.deepcopy`, `torch.save` and `AveragedModel` copy a module with all that is registered on it. A state holds threads
and process groups, of which there are no copies. DDP makes a copy a reducer of its own, without communication hook. So
a copy trains and evaluates as one of a plain DDP model does: states become a `Detached`, hooks do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from gradlab.errors import GradlabError

Own = TypeVar("Own", bound="Uncopied")


class DetachedError(GradlabError, AttributeError):
    """A copy of a state was used; an AttributeError too, so that `hasattr` answers."""


class Detached:
    """Stands in a copy for a state that is attached to the original.

    >>> import copy
    >>> from gradlab.ddp.copies import Detached
    >>> copy.deepcopy(Detached("CompressionState"))
    Detached('CompressionState')
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"Detached({self.kind!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise DetachedError(
            f"{name}: this is a copy of a {self.__dict__.get('kind')}, and copies are detached: use the original, or "
            "attach a new one to the copied model"
        )


class Uncopied:
    """A base of what is attached to a running model, mostly by `with`: copied or pickled, it becomes a `Detached`."""

    def __enter__(self: Own) -> Own:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Detached, (type(self).__name__,)


class Hook(partial[Any]):
    """A hook for a module, parameter or optimizer, which in a copy does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _idle, ()


def take_away(handles: list[Any]) -> None:
    """Remove hooks by their handles, and forget these."""
    while handles:
        handles.pop().remove()


def _idle() -> Callable[..., None]:
    return do_nothing


def do_nothing(*arguments: object) -> None:
    """Do nothing: what a `Hook` is in a copy."""
