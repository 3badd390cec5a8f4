"""How much of a model a plan compresses, and what its roles leave dense: nothing is sent dense in silence."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence

from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, format_percent
from gradlab.layout import Layer
from gradlab.roles import ROLES


def known_roles(roles: Collection[str]) -> tuple[str, ...]:
    """Return names of roles, given as several or one alone; refuse one that is none of `ROLES`."""
    names = (roles,) if isinstance(roles, str) else tuple(roles)
    if unknown := [name for name in names if name not in ROLES]:
        raise GradlabError(f"role {unknown[0]!r}: expected one of {', '.join(ROLES)}")
    return names


def list_roles(layers: Iterable[Layer]) -> str:
    """Return roles with their bytes of float32 gradients and numbers of layers, the largest first: "linear 4.00 kB (1
    layer), bias 72 B (2 layers)"."""
    sizes: dict[str, list[int]] = {}
    for layer in layers:
        sizes.setdefault(layer.role, []).append(4 * layer.numel)
    rows = sorted(sizes.items(), key=lambda row: -sum(row[1]))
    shown = [f"{role} {format_bytes(sum(sized))} ({_counted(len(sized))})" for role, sized in rows]
    return ", ".join(shown) or "no layer"


def _counted(number: int) -> str:
    return f"{number} layer" if number == 1 else f"{number} layers"


def require_compressed(method: str, layers: Sequence[Layer], compressed: Sequence[Layer], wanted: str) -> None:
    """Refuse a plan that compresses nothing of a model that has gradients, with a list of the roles that there are."""
    if not compressed and any(layer.numel for layer in layers):
        raise GradlabError(
            f"{method} would compress nothing: it takes {wanted}; there are {list_roles(layers)}; lower "
            "minimum_numel or minimum_dimensions, or name further roles"
        )


def left_dense(
    method: str, layers: Sequence[Layer], compressed: Sequence[Layer], eligible: Sequence[Layer], roles: Collection[str]
) -> str:
    """Return one line of what roles leave dense, if they are why less than half of a model's bytes is compressed, else
    "". `eligible` are the layers that would be in groups if all roles were compressed."""
    total, held, possible = (sum(layer.numel for layer in some) for some in (layers, compressed, eligible))
    if 2 * held >= total or 2 * possible < total:
        return ""
    others = [layer for layer in eligible if layer.role not in roles]
    return (
        f"{method} compresses {format_percent(held / total)} of the model's gradients, those of role "
        f"{', '.join(roles)}. It leaves these dense: {list_roles(others)}. Name their roles to compress them."
    )


def warn_left_dense(line: str, stacklevel: int) -> None:
    """Warn with a line of `left_dense`, if it is not empty."""
    if line:
        warnings.warn(f"gradlab: {line}", stacklevel=stacklevel)
