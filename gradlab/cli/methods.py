"""List codecs with their guarantees, collectives and bytes, wrappers, and methods by name.

Examples:

  gradlab methods

  gradlab methods powersgd
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import Answer, Table, print_json
from gradlab.cli.options import AsJson
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.catalog import CodecFacts, SettingRow, WrapperFacts
    from gradlab.plan.recipes import Method


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A codec, wrapper or method; all of them if none.")
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all as a page (docs/methods.md).")] = False,
) -> None:
    from gradlab import codecs, wrappers
    from gradlab.catalog import codec_facts, wrapper_facts

    if markdown and (name is not None or as_json):
        raise GradlabError("--markdown prints all methods as a page: leave the name and --json out")
    if name is not None:
        _show(name, as_json)
        return
    codec_rows = [codec_facts(codec) for codec in codecs.names()]
    around = [wrapper_facts(wrapper) for wrapper in wrappers.names()]
    if as_json:
        print_json({"codecs": codec_rows, "wrappers": around, "methods": by_name()})
    elif markdown:
        print(page(codec_rows, around), end="")
    else:
        of_codecs = [_row(facts) for facts in codec_rows]
        of_wrappers = [(wrapper.name, _around(wrapper), wrapper.title) for wrapper in around]
        tables = [
            Table("codecs, with default settings", HEADER, of_codecs, len(HEADER)),
            Table("wrappers", ("wrapper", "around", "what it does"), of_wrappers, 3),
            Table("methods by name (gradlab.plan.method_plan)", ("method", "what it is"), list(by_name().items()), 2),
        ]
        Answer(tables=tables).print()


def _show(name: str, as_json: bool) -> None:
    """Show one codec, wrapper or method, which may be in another case."""
    from gradlab import codecs, wrappers
    from gradlab.catalog import codec_facts, wrapper_facts

    method = next((known for known in by_name() if known.lower() == name.lower()), None)
    if method and name not in (*codecs.names(), *wrappers.names()):
        made_of = by_name()[method]
        print_json({"name": method, "made_of": made_of}) if as_json else Answer([f"{method}: {made_of}"]).print()
        return
    facts = wrapper_facts(name) if name in wrappers.names() else codec_facts(name)
    print_json(facts) if as_json else Answer([_one(facts)]).print()


INTRODUCTION = """# Methods

Written by `gradlab methods --markdown`: every line follows from the code. Codecs have their default settings.
*delta*: `E||C(x) - x||^2 <= (1 - delta) ||x||^2` for every x of 1024 x 1024 elements, so that error feedback keeps the
residual bounded; - where none is guaranteed. *bits/value*: what a rank contributes, of a layer of 64 x 64 (gradiveq: of
a convolution, while it samples). *sent*: what its network interface sends for that, counted in lockstep; uncompressed
that is 32, 56 and 62 bits. A codec of your own: [add-a-codec.md](add-a-codec.md).
"""
LEFT_OUT = """- *Memory savers* (GaLore and the like) keep smaller optimizer states. The exchange stays DDP's.
- *Transport* (OptiReduce, sums in the network): which packets carry a request is the process group's.
- *Gossip* (D-PSGD, AD-PSGD) leaves ranks with different parameters, and what is promised here is of one mean for all.
- *Asynchronous SGD*: what a rank applies depends on timing, and no replay can say what training will do.
"""
HEADER = (
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


def _row(facts: CodecFacts) -> tuple[str, ...]:
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


def _around(facts: WrapperFacts) -> str:
    """Codecs that a wrapper takes, with default settings: "all codecs", or "2 of 18: qsgd, sign"."""
    if not facts.refused:
        return "all codecs"
    return f"{len(facts.around)} of {len(facts.around) + len(facts.refused)}: {', '.join(facts.around)}"


def _yes(fact: bool) -> str:
    return "yes" if fact else "-"


def _one(facts: CodecFacts | WrapperFacts) -> str:
    from gradlab.catalog import CodecFacts, WrapperFacts

    lines = [f"{facts.name}: {facts.title}", "", facts.text, "", "Settings:"]
    for row in facts.settings_table:
        lines += [f"  {row.name} = {row.default!r}: {row.values}", f"      {_meaning(row)}".rstrip()]
    lines += [] if facts.settings_table else ["  none"]
    if isinstance(facts, WrapperFacts):
        lines += ["", f"Around: {_around(facts)}"]
        lines += [f"  refused: {reason}" for reason in facts.refused.values()]
    if isinstance(facts, CodecFacts):
        lines += ["", f"Payload in bytes, n elements, N ranks: {facts.formula}", f"Paper: {facts.paper}"]
    return "\n".join(lines)


def by_name() -> dict[str, str]:
    """Describe in a line what each method of `gradlab.plan.recipes` is made of, by its name."""
    from gradlab.plan.recipes import METHODS

    return {name: _made_of(method) for name, method in METHODS.items()}


def _made_of(method: Method) -> str:
    around = [*([method.momentum] if method.momentum else []), *method.wrappers]
    parts = [_called(wrap.name, wrap.settings) for wrap in around]
    where = [
        text
        for text, holds in (("one group of all layers", method.one_block), ("every tensor", method.every_tensor))
        if holds
    ]
    text = " around ".join([*parts, _called(method.codec, method.settings)])
    return f"{text}; {', '.join(where)}" if where else text


def _called(name: str, settings: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})" if settings else name


def page(codec_rows: Sequence[CodecFacts], around: Sequence[WrapperFacts]) -> str:
    """Write the page of methods, in Markdown."""
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        *_table(HEADER, [_row(facts) for facts in codec_rows]),
        "",
        "## Methods by name",
        "",
        "`gradlab.plan.method_plan(model, name)`; wrappers outermost first.",
        "",
        *_table(("method", "what it is"), [(name, f"`{text}`") for name, text in by_name().items()]),
        "",
        "## Codecs",
    ]
    for facts in codec_rows:
        candidates = "; ".join(_called("", settings).strip("()") for settings in facts.candidates if settings)
        lines += [
            *_section(facts),
            f"Payload in bytes: `{facts.formula}`. Learns from data: {'yes' if facts.learns else 'no'}.",
            *([f"Settings worth comparing: {candidates}."] if candidates else []),
        ]
    lines += ["", "## Wrappers"]
    lines += [
        "",
        "Codecs that a wrapper takes, with default settings; `gradlab methods WRAPPER` says why others are refused.",
        "",
        *_table(("wrapper", "around"), [(wrapper.name, _around(wrapper)) for wrapper in around]),
    ]
    for wrapper in around:
        lines += _section(wrapper)[:-1]
    lines += ["", "## Left out on purpose", "", *LEFT_OUT.splitlines()]
    return "\n".join(lines) + "\n"


def _section(facts: CodecFacts | WrapperFacts) -> list[str]:
    rows = [
        (
            f"`{row.name}`",
            f"`{row.default!r}`",
            row.values.replace("|", "or"),
            _meaning(row).replace("|", "\\|"),
        )
        for row in facts.settings_table
    ]
    settings = _table(("setting", "default", "values", "meaning"), rows) if rows else ["No settings."]
    texts = ["```text", facts.text, "```"]
    return ["", f"### {facts.name}", "", facts.title, "", *settings, "", *texts, ""]


def _meaning(row: SettingRow) -> str:
    """A setting's unit, meaning, and symbol in the paper."""
    symbol = f"({row.symbol})" if row.symbol else ""
    return " ".join(part for part in (row.unit, row.help, symbol) if part)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
