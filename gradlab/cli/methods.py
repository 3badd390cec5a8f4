"""List codecs with their guarantees, collectives and bytes, wrappers, and methods by name.

Examples:

  gradlab methods

  gradlab methods powersgd

  gradlab methods --ranks 2,4,8,16,32,1024

  gradlab methods topk --ranks 8,64

  gradlab methods my_codec.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gradlab import codecs, wrappers
from gradlab.catalog import (
    CODEC_COLUMNS,
    by_name,
    called,
    codec_facts,
    described,
    row_of,
    sent_shares,
    taken_by,
    wrapper_facts,
)
from gradlab.cli.console import Answer, Table, print_json
from gradlab.cli.options import AsJson, counts_of
from gradlab.codec.from_file import codec_from_file


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
    chosen = (
        [(name, one) for one in codecs.get(name).about.candidates] if name else [(one, {}) for one in codecs.names()]
    )
    rows = {called(codec, settings): sent_shares(codec, ranks, settings) for codec, settings in chosen}
    if as_json:
        print_json(rows)
        return
    spelled = {title: ["-" if share is None else f"{share:.3g}" for share in of.values()] for title, of in rows.items()}
    cells = [(title, *shares) for title, shares in spelled.items()]
    title = "bytes that a rank sends over plain DDP's, by number of ranks: four layers of 256 x 256, default wrappers"
    Answer(tables=[Table(title, ("codec", *map(str, ranks)), cells)]).print()


def _show(name: str, as_json: bool) -> None:
    """Show one codec, wrapper or method, which may be in another case; or the codec that a Python file defines."""
    name = codec_from_file(Path(name)).name if name.endswith(".py") else name
    method = next((known for known in by_name() if known.lower() == name.lower()), None)
    if method and name not in (*codecs.names(), *wrappers.names()):
        made_of = by_name()[method]
        print_json({"name": method, "made_of": made_of}) if as_json else Answer([f"{method}: {made_of}"]).print()
        return
    facts = wrapper_facts(name) if name in wrappers.names() else codec_facts(name)
    print_json(facts) if as_json else Answer([described(facts)]).print()
