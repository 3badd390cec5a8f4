"""Plans that need no fit, as curves: each family's settings from as good as dense to too much.

A family is one method with one setting that trades bytes for error. Settings stand in the order of the bytes that they
send, most first, so that a search (`gradlab.analysis.forecast.search`) can bisect for the last one within a limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Plan, Wrap, named_plan

HALF_PLAN = "16-bit floats"
_BOTH_WAYS = (*FEEDBACK, Wrap("two_way"))
_BITS = (4.0, 3.0, 2.0, 1.5, 1.0, 0.75, 0.5, 0.25, 0.125)
# (bits, bucket size): a smaller bucket has a smaller error at a few more bytes.
_LEVELS = ((8, 512), (6, 512), (5, 512), (4, 128), (4, 512), (3, 128), (3, 512), (2, 128), (2, 512))
_DENSITIES = (0.25, 0.1, 0.03, 0.01, 0.003, 0.001)
_RANKS = (32, 16, 8, 4, 2, 1)
_RANKS_TO_SIZE = 2  # payloads are compared at two ranks: the order of a family's settings is the same at any number


@dataclass(frozen=True)
class Candidate:
    """A setting of a family: its name, what it sets, and the plan of the model."""

    name: str
    setting: Mapping[str, Any]
    plan: Plan


@dataclass(frozen=True)
class Family:
    """A method's settings on a model, the most bytes first; start: position of the usual one."""

    candidates: tuple[Candidate, ...]
    start: int = 0


@dataclass(frozen=True)
class _Curve:
    """A method with its settings by name; usual: the name of the one that stands for it."""

    method: str
    settings: Mapping[str, Mapping[str, Any]]
    usual: str
    common: Mapping[str, Any]


def _curve(method: str, usual: str, settings: Mapping[str, Mapping[str, Any]], **common: Any) -> _Curve:
    return _Curve(method, settings, usual, common)


def _single(name: str, method: str, **settings: Any) -> _Curve:
    return _Curve(method, {name: settings}, name, {})


def _qsgd(bits: int, bucket_size: int) -> tuple[str, dict[str, Any]]:
    if bucket_size == 512:  # the codec's default
        return f"QSGD {bits} bits, max norm", {"bits": bits}
    return f"QSGD {bits} bits, max norm, buckets of {bucket_size}", {"bits": bits, "bucket_size": bucket_size}


def _ecsq(bits: float, end: str = "") -> tuple[str, dict[str, Any]]:
    return f"ecsq {bits:g} bit{'' if bits == 1 else 's'}{end}", {"bits": bits}


# By family, a codec or a published method of `gradlab.plan.recipes`. None of them needs a fit.
_CURVES: Mapping[str, _Curve] = {
    "16 bits": _single(HALF_PLAN, "cast", dtype="float16"),
    "blocks": _curve(
        "block_scaled",
        "int8",
        {
            "int8": {"dtype": "int8"},
            "int4, blocks of 32": {"dtype": "int4", "block_size": 32},
            "int4": {"dtype": "int4"},
        },
    ),
    "QSGD": _curve("QSGD, max norm", "QSGD 4 bits, max norm", dict(_qsgd(*level) for level in _LEVELS)),
    "1-bit SGD": _single("1-bit SGD", "1-bit SGD"),
    "PowerSGD": _curve("PowerSGD", "PowerSGD rank 4", {f"PowerSGD rank {rank}": {"rank": rank} for rank in _RANKS}),
    "top-k": _curve("topk", "top-k 1 %", {f"top-k {100 * share:g} %": {"density": share} for share in _DENSITIES}),
    "signs": _single("signs, both ways", "sign"),
    "ecsq": _curve("ecsq", "ecsq 1 bit", dict(map(_ecsq, _BITS))),
    "ecsq, both ways": _curve(
        "ecsq",
        "ecsq 0.5 bits, both ways",
        dict(_ecsq(bits, ", both ways") for bits in _BITS),
        wrappers=_BOTH_WAYS,
    ),
}


def candidates(layers: Sequence[Layer], *, coarse: bool = False, warmup_steps: int = 0) -> dict[str, Family]:
    """List the families of plans for a model, each as a curve of settings.

    Settings are left out that find no layer to compress, or that send no less than 16 bits, which lose next to nothing.

    >>> from gradlab.analysis.forecast.candidates import candidates
    >>> curve = candidates([Layer("w", (1024, 1024), "linear")])["PowerSGD"]
    >>> [one.name for one in curve.candidates][:2], curve.candidates[curve.start].name
    (['PowerSGD rank 32', 'PowerSGD rank 16'], 'PowerSGD rank 4')
    """
    half = _plan_of(layers, _CURVES["16 bits"], HALF_PLAN, 0)
    most = None if half is None else half.payload_bytes(_RANKS_TO_SIZE)
    families = {}
    for name, curve in _CURVES.items():
        if found := _fitting(layers, curve, most, warmup_steps):
            families[name] = _family(found, curve.usual, coarse)
    return families


def usual_plans(layers: Sequence[Layer]) -> dict[str, Plan]:
    """Make one plan of each family for a model: the setting at which a search begins."""
    plans = {curve.usual: _plan_of(layers, curve, curve.usual, 0) for curve in _CURVES.values()}
    return {name: plan for name, plan in plans.items() if plan is not None}


def _plan_of(layers: Sequence[Layer], curve: _Curve, name: str, warmup_steps: int) -> Plan | None:
    settings = {**curve.common, **curve.settings[name], "warmup_steps": warmup_steps}
    try:
        plan = named_plan(tuple(layers), curve.method, **settings)
    except GradlabError:  # no layer large enough
        return None
    return plan if plan.compressed_groups else None


def _fitting(layers: Sequence[Layer], curve: _Curve, most: int | float | None, warmup_steps: int) -> list[Candidate]:
    """The settings of a curve that are worth a replay, the one that sends most first."""
    found: list[tuple[float, Candidate]] = []
    for name, setting in curve.settings.items():
        plan = _plan_of(layers, curve, name, warmup_steps)
        sent = math.inf if plan is None else plan.payload_bytes(_RANKS_TO_SIZE)
        if plan is not None and (len(curve.settings) == 1 or most is None or sent < most):
            found.append((sent, Candidate(name, setting, plan)))
    return [one for _, one in sorted(found, key=lambda pair: -pair[0])]


def _family(found: Sequence[Candidate], usual: str, coarse: bool) -> Family:
    names = [one.name for one in found]
    start = names.index(usual) if usual in names else len(names) // 2
    if not coarse:
        return Family(tuple(found), start)
    return Family(tuple(found[start % 2 :: 2]), start // 2)


def without(families: Mapping[str, Family], names: Iterable[str]) -> dict[str, Family]:
    """Leave settings out by name, such as those that a run would refuse, and families of which none is left."""
    out, kept = set(names), {}
    for name, family in families.items():
        left = tuple(one for one in family.candidates if one.name not in out)
        if left:
            before = sum(one.name not in out for one in family.candidates[: family.start])
            kept[name] = Family(left, min(before, len(left) - 1))
    return kept
