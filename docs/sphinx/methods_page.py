"""The methods of docs/methods.md, which follow from the code."""

from __future__ import annotations

from collections.abc import Sequence

from gradlab import codecs, wrappers
from gradlab.catalog import (
    CODEC_COLUMNS,
    CodecFacts,
    WrapperFacts,
    by_name,
    called,
    codec_facts,
    meaning_of,
    row_of,
    taken_by,
    wrapper_facts,
)

MARK = "```{methods}\n```\n"


def filled(text: str) -> str:
    """Write the methods in place of `MARK` in a page, in Markdown."""
    return text.replace(MARK, _methods()) if MARK in text else text


def _methods() -> str:
    codec_rows = [codec_facts(codec) for codec in codecs.names()]
    around = [wrapper_facts(wrapper) for wrapper in wrappers.names()]
    lines = [
        *_table(CODEC_COLUMNS, [row_of(facts) for facts in codec_rows]),
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
        candidates = "; ".join(called("", settings).strip("()") for settings in facts.candidates if settings)
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
        *_table(("wrapper", "around"), [(wrapper.name, taken_by(wrapper)) for wrapper in around]),
    ]
    for wrapper in around:
        lines += _section(wrapper)[:-1]
    return "\n".join(lines) + "\n"


def _section(facts: CodecFacts | WrapperFacts) -> list[str]:
    rows = [
        (
            f"`{row.name}`",
            f"`{row.default!r}`",
            row.values.replace("|", "or"),
            meaning_of(row).replace("|", "\\|"),
        )
        for row in facts.settings_table
    ]
    settings = _table(("setting", "default", "values", "meaning"), rows) if rows else ["No settings."]
    texts = ["```text", facts.text, "```"]
    return ["", f"### {facts.name}", "", facts.title, "", *settings, "", *texts, ""]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
