"""The page of methods, which follows from the code: python docs/sphinx/methods_page.py > docs/methods.md"""

from __future__ import annotations

from collections.abc import Sequence

from gradlab import codecs, wrappers
from gradlab.catalog import CodecFacts, WrapperFacts, codec_facts, wrapper_facts
from gradlab.cli.methods import CODEC_COLUMNS, by_name, called, meaning_of, row_of, taken_by

INTRODUCTION = """# Methods

Written by `python docs/sphinx/methods_page.py`: every line follows from the code. Codecs have their default settings.
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


def page() -> str:
    """Write the page, in Markdown."""
    codec_rows = [codec_facts(codec) for codec in codecs.names()]
    around = [wrapper_facts(wrapper) for wrapper in wrappers.names()]
    lines = [
        *INTRODUCTION.splitlines(),
        "",
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
    lines += ["", "## Left out on purpose", "", *LEFT_OUT.splitlines()]
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


if __name__ == "__main__":
    print(page(), end="")
