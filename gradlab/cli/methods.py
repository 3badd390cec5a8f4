"""List codecs with their guarantees, collectives and bytes, wrappers, and methods by name.

Examples:

  gradlab methods

  gradlab methods powersgd

  gradlab methods --ranks 2,4,8,16,32,1024

  gradlab methods topk --ranks 8,64

  gradlab methods my_codec.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gradlab import codecs, wrappers
from gradlab.catalog import CodecFacts, SettingRow, WrapperFacts, codec_facts, wrapper_facts
from gradlab.cli.console import Answer, Table, print_json
from gradlab.cli.options import AsJson, counts_of
from gradlab.codec.from_file import codec_from_file
from gradlab.layout import Layer
from gradlab.plan import Plan, saving_of_sent
from gradlab.plan.recipes import METHODS, Method
from gradlab.plan.traffic import refused


def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A codec, wrapper, method, or file that defines a codec; default: all."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Show the bytes that a rank sends between N ranks, over those of plain DDP. 0.5: as many as 16 bits.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:

    if ranks is not None:
        _show_sent(name, counts_of(ranks, "--ranks"), as_json)
    elif name is not None:
        _show(name, as_json)
    else:
        _show_all(as_json)


def _show_all(as_json: bool) -> None:
    codec_rows = [codec_facts(codec) for codec in codecs.names()]
    around = [wrapper_facts(wrapper) for wrapper in wrappers.names()]
    if as_json:
        print_json({"codecs": codec_rows, "wrappers": around, "methods": by_name()})
    else:
        of_codecs = [row_of(facts) for facts in codec_rows]
        of_wrappers = [(wrapper.name, taken_by(wrapper), wrapper.title) for wrapper in around]
        tables = [
            Table("codecs, with default settings", CODEC_COLUMNS, of_codecs, len(CODEC_COLUMNS)),
            Table("wrappers", ("wrapper", "around", "what it does"), of_wrappers, 3),
            Table("methods by name (gradlab.plan.method_plan)", ("method", "what it is"), list(by_name().items()), 2),
        ]
        Answer(tables=tables).print()


def _show_sent(name: str | None, ranks: Sequence[int], as_json: bool) -> None:
    """Show shares of plain DDP's bytes: of all codecs with default settings, or of one with those worth comparing."""
    chosen = [(one, {}) for one in codecs.names()] if name is None else _settings_of(name)
    rows = {called(codec, settings): sent_shares(codec, ranks, settings) for codec, settings in chosen}
    if as_json:
        print_json(rows)
        return
    spelled = {title: ["-" if share is None else f"{share:.3g}" for share in of.values()] for title, of in rows.items()}
    cells = [(title, *shares) for title, shares in spelled.items()]
    title = "bytes that a rank sends over plain DDP's, by number of ranks: four layers of 256 x 256, default wrappers"
    Answer(tables=[Table(title, ("codec", *map(str, ranks)), cells)]).print()


def _settings_of(name: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, settings) for settings in codecs.get(name).about.candidates]


def sent_shares(codec: str, ranks: Sequence[int], settings: Mapping[str, Any]) -> dict[int, float | None]:
    """Return the bytes that a rank sends over those of plain DDP, by number of ranks, of four layers of 256 x 256.
    None: the codec refuses so many ranks."""
    shape, role = ((256, 256, 3, 3), "convolution") if codec == "gradiveq" else ((256, 256), "linear")
    plan = Plan.uniform([Layer(f"layer{number}", shape, role) for number in range(4)], codec, **settings)
    return {n: None if refused(plan, n) else 1 / (saving_of_sent(plan, n).ratio or math.inf) for n in ranks}


def _show(name: str, as_json: bool) -> None:
    """Show one codec, wrapper or method, which may be in another case; or the codec that a Python file defines."""
    name = codec_from_file(Path(name)).name if name.endswith(".py") else name
    method = next((known for known in by_name() if known.lower() == name.lower()), None)
    if method and name not in (*codecs.names(), *wrappers.names()):
        made_of = by_name()[method]
        print_json({"name": method, "made_of": made_of}) if as_json else Answer([f"{method}: {made_of}"]).print()
        return
    facts = wrapper_facts(name) if name in wrappers.names() else codec_facts(name)
    print_json(facts) if as_json else Answer([_one(facts)]).print()


CODEC_COLUMNS = (
    "codec",
    "family",
    "linear",
    "unbiased",
    "delta",
    "feedback",
    "collectives",
    "bits/value",
    "sent at 2, 8, 32 ranks",
    "grows with N",
    "paper",
)


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


def _one(facts: CodecFacts | WrapperFacts) -> str:

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
