"""Places of layers in their network, as LGC's Fig. 4 marks it: first, last, after a residual addition."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.trace import Trace

FIRST, LAST, AFTER_ADDITION = "first", "last", "after a residual addition"


def layer_places(trace: Trace, after_addition: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return marks by layer name; first and last are among layers of two or more dimensions."""
    names = [layer.name for layer in trace.layers]
    matrices = [layer.name for layer in trace.layers if len(layer.shape) > 1] or names
    patterns = list(after_addition)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise GradlabError(f"{trace.path}: no layer matches {pattern!r}; it has {', '.join(names[:3])}, ...")
    recorded = trace.metadata.get("after_addition")
    summed = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not patterns and isinstance(recorded, list):
        summed = {name for name in recorded if name in names}
    return {
        name: [FIRST] * (name == matrices[0]) + [LAST] * (name == matrices[-1]) + [AFTER_ADDITION] * (name in summed)
        for name in names
    }
