"""The properties of codecs, wrappers and methods: facts from the classes, collectives and bytes from a run.

Tables and the page of methods are made of it, so that they cannot be out of date.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from statistics import fmean
from typing import Any

import torch

from gradlab import codecs, wrappers
from gradlab.codec import Batch, Codec, Context
from gradlab.codec.settings import build_settings, fields_of, plain
from gradlab.codec.wrapper import Wrapper
from gradlab.collectives import Request, observed, run_lockstep
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.plan import Plan, default_wrappers, saving_of_sent
from gradlab.plan.recipes import METHODS, Method
from gradlab.plan.traffic import refused

RANKS = (2, 8, 32)  # at which bytes on the wire are counted
LAYER = Layer("weight", (64, 64), "linear")  # whose bytes are counted; CONVOLUTION for GradiVeQ, which is made for them
CONVOLUTION = Layer("weight", (64, 64, 3, 3), "convolution")
LARGE = Layer("weight", (1024, 1024), "linear")  # whose guarantees are shown

CODEC_COLUMNS = (
    "codec", "family", "linear", "unbiased", "delta", "feedback", "collectives", "bits/value", "sent at 2, 8, 32 ranks",
    "grows with N", "paper",
)  # fmt: skip


@dataclass(frozen=True)
class SettingRow(Jsonable):
    """One setting of a codec or wrapper.

    default: value in plain JSON; None for a setting that is required.
    values: the allowed ones, in words.
    unit, symbol: unit of a number, and the paper's symbol; empty if there is none.
    """

    name: str
    default: Any
    values: str
    unit: str
    symbol: str
    help: str


@dataclass(frozen=True)
class WrapperFacts(Jsonable):
    """One wrapper.

    title: the first sentence of its file; `text`: the docstring of its class.
    settings: defaults by name; `settings_table`: one row per setting.
    around: names of the codecs that it takes, with default settings.
    refused: reasons by the names of codecs that it refuses.
    """

    name: str
    title: str
    text: str
    settings: dict[str, Any]
    settings_table: tuple[SettingRow, ...]
    around: tuple[str, ...]
    refused: dict[str, str]


@dataclass(frozen=True)
class CodecFacts(Jsonable):
    """One codec with its default settings.

    family: family of methods that the codec belongs to.
    paper: paper in short form.
    title: the first sentence of the codec's file; `text`: the docstring of its class.
    unbiased: whether its expected error is 0.
    delta, variance_bound: bounds of `Guarantees` for a layer of 1024 x 1024. None: nothing is guaranteed.
    learns: whether the codec is fitted on gradients.
    error_feedback, two_way: whether it has these by default.
    collectives: kinds of the requests of an exchange, in the order of their first use.
    formula: payload in bytes, of n elements and N ranks.
    bits: payload bits per value, of a layer of 64 x 64, or of a convolution of 64 x 64 x 3 x 3 for GradiVeQ, with both
        ways where `two_way` is the default. A codec that works in phases has those of its first phase.
    wire_bits: bits that a rank sends per value, mean over ranks, by number of ranks.
    settings: defaults by name; `settings_table`: one row per setting.
    candidates: settings worth comparing.
    """

    name: str
    family: str
    paper: str
    title: str
    text: str
    linear: bool
    unbiased: bool
    delta: float | None
    variance_bound: float | None
    learns: bool
    error_feedback: bool
    two_way: bool
    collectives: tuple[str, ...]
    formula: str
    bits: float
    wire_bits: dict[int, float]
    settings: dict[str, Any]
    settings_table: tuple[SettingRow, ...]
    candidates: tuple[dict[str, Any], ...]


def codec_facts(name: str) -> CodecFacts:
    """Return the facts of one codec with its default settings, with the bytes of exchanges run in lockstep."""
    method = codecs.get(name)
    codec, layer = method(), CONVOLUTION if name == "gradiveq" else LAYER
    runs = {ranks: _exchange(codec, layer, ranks) for ranks in RANKS}
    holds = codec.guarantees([LARGE])
    kinds, payload, _ = runs[RANKS[0]]
    return CodecFacts(
        name=name,
        family=method.about.family,
        paper=method.about.paper,
        title=first_sentence(method),
        text=inspect.cleandoc(method.__doc__ or ""),
        linear=holds.linear,
        unbiased=holds.unbiased,
        delta=holds.delta,
        variance_bound=holds.omega,
        learns=method.about.learns,
        error_feedback=codec.about.defaults.error_feedback,
        two_way=codec.about.defaults.two_way,
        collectives=tuple(kinds),
        formula=method.about.formula,
        bits=8 * payload / layer.numel,
        wire_bits={ranks: 8 * wire / layer.numel for ranks, (_, _, wire) in runs.items()},
        settings=settings_of(method),
        settings_table=setting_rows(method),
        candidates=tuple(dict(settings) for settings in method.about.candidates),
    )


def wrapper_facts(name: str) -> WrapperFacts:
    """Return the facts of one wrapper, put around each codec."""
    method = wrappers.get(name)
    refused = {codec: why for codec in codecs.names() if (why := _refusal(method, codec))}
    return WrapperFacts(
        name=name,
        title=first_sentence(method),
        text=inspect.cleandoc(method.__doc__ or ""),
        settings=settings_of(method),
        settings_table=setting_rows(method),
        around=tuple(codec for codec in codecs.names() if codec not in refused),
        refused=refused,
    )


def _refusal(wrapper: type[Wrapper], codec: str) -> str:
    """Return a wrapper's refusal of a codec, both with default settings; empty if it takes it."""
    try:
        wrapper(codecs.make(codec))
    except GradlabError as reason:
        return str(reason)
    return ""


def first_sentence(method: type[Codec]) -> str:
    """Return the first sentence of a codec or wrapper's file, which gives the idea, in one line."""
    text = inspect.cleandoc(sys.modules[method.__module__].__doc__ or method.__doc__ or "")
    return " ".join(text.split("\n\n")[0].split())


def settings_of(method: type[Codec]) -> dict[str, Any]:
    """Return the defaults of a method's settings by name; None for a setting that is required."""
    return {row.name: row.default for row in setting_rows(method)}


def setting_rows(method: type[Codec]) -> tuple[SettingRow, ...]:
    """Return one row per setting, in the order of the settings class."""
    return tuple(
        SettingRow(
            name=field.name,
            default=None if field.default is MISSING else plain(field.default),
            values=field.values,
            unit=field.about.unit,
            symbol=field.about.symbol,
            help=field.about.help,
        )
        for field in fields_of(method.Settings)
    )


def _exchange(codec: Codec, layer: Layer, ranks: int) -> tuple[list[str], float, float]:
    """Run one exchange, inside `two_way` where a plan has it by default: return the collectives' kinds in the order of
    first use, and payload and wire bytes, means over ranks."""
    for wrap in default_wrappers(codec):
        if wrap.name == "two_way":
            wrapper = wrappers.get("two_way")
            codec = wrapper(codec, build_settings(wrapper, wrap.settings))
    generator = torch.Generator().manual_seed(0)
    grads = [Batch.of({layer.name: torch.randn(layer.shape, generator=generator)}, [layer]) for _ in range(ranks)]
    seen: list[Request] = []
    coroutines = [codec.exchange(grads[rank], {}, Context(rank, ranks, 0, layer.name)) for rank in range(ranks)]
    results = run_lockstep([observed(coroutines[0], seen), *coroutines[1:]])
    kinds = list(dict.fromkeys(type(request).__name__ for request in seen))
    return kinds, fmean(r.payload_bytes for r in results), fmean(r.wire_bytes for r in results)


def sent_shares(codec: str, ranks: Sequence[int], settings: Mapping[str, Any]) -> dict[int, float | None]:
    """Return the bytes that a rank sends over those of plain DDP, by number of ranks, of four layers of 256 x 256.
    None: the codec refuses so many ranks."""
    shape, role = ((256, 256, 3, 3), "convolution") if codec == "gradiveq" else ((256, 256), "linear")
    plan = Plan.uniform([Layer(f"layer{number}", shape, role) for number in range(4)], codec, **settings)
    return {n: None if refused(plan, n) else 1 / (saving_of_sent(plan, n).ratio or math.inf) for n in ranks}


def row_of(facts: CodecFacts) -> tuple[str, ...]:
    """Return the cells of a codec under `CODEC_COLUMNS`."""
    wire = list(facts.wire_bits.values())
    return (
        facts.name,
        facts.family,
        _yes(facts.linear),
        _yes(facts.unbiased),
        "-" if facts.delta is None else f"{facts.delta:.3g}",
        "both ways" if facts.two_way else _yes(facts.error_feedback),
        ", ".join(facts.collectives) or "none",
        f"{facts.bits:.3g}",
        ", ".join(f"{bits:.3g}" for bits in wire),
        _yes(wire[-1] > 2 * wire[1]),
        facts.paper,
    )


def taken_by(facts: WrapperFacts) -> str:
    """Codecs that a wrapper takes, with default settings: "all codecs", or "2 of 18: qsgd, sign"."""
    if not facts.refused:
        return "all codecs"
    return f"{len(facts.around)} of {len(facts.around) + len(facts.refused)}: {', '.join(facts.around)}"


def _yes(fact: bool) -> str:
    return "yes" if fact else "-"


def described(facts: CodecFacts | WrapperFacts) -> str:
    """A codec or wrapper in lines: its docstring, settings, and the codecs that it takes, or bytes and paper."""
    lines = [f"{facts.name}: {facts.title}", "", facts.text, "", "Settings:"]
    for row in facts.settings_table:
        lines += [f"  {row.name} = {row.default!r}: {row.values}", f"      {meaning_of(row)}".rstrip()]
    lines += [] if facts.settings_table else ["  none"]
    if isinstance(facts, WrapperFacts):
        lines += ["", f"Around: {taken_by(facts)}"]
        lines += [f"  refused: {reason}" for reason in facts.refused.values()]
    if isinstance(facts, CodecFacts):
        lines += ["", f"Payload in bytes, n elements, N ranks: {facts.formula}", f"Paper: {facts.paper}"]
    return "\n".join(lines)


def by_name() -> dict[str, str]:
    """Describe in a line what each method of `gradlab.plan.recipes` is made of, by its name."""
    return {name: _made_of(method) for name, method in METHODS.items()}


def _made_of(method: Method) -> str:
    around = [*([method.momentum] if method.momentum else []), *method.wrappers]
    parts = [called(wrap.name, wrap.settings) for wrap in around]
    where = [
        text
        for text, holds in (("one group of all layers", method.one_block), ("every tensor", method.every_tensor))
        if holds
    ]
    text = " around ".join([*parts, called(method.codec, method.settings)])
    return f"{text}; {', '.join(where)}" if where else text


def called(name: str, settings: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})" if settings else name


def meaning_of(row: SettingRow) -> str:
    """A setting's unit, meaning, and symbol in the paper."""
    symbol = f"({row.symbol})" if row.symbol else ""
    return " ".join(part for part in (row.unit, row.help, symbol) if part)
