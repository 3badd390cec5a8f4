"""Draw docs/figures/how-it-works.svg: a codec's exchange as a conversation with its driver, and the four drivers.

    python benchmarks/how_it_works_figure.py docs/figures/how-it-works.svg

A test compares the committed figure with what this draws.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 760, 610
# Colour-blind readers can tell these apart (Okabe & Ito, 2008), the second of each pair is its tint.
BLUE, PALE_BLUE, ORANGE, PALE_ORANGE = "#0072B2", "#E3F0F8", "#D55E00", "#FBEBDF"
INK, GREY, LINE = "#1a1a1a", "#5c5c5c", "#b5b5b5"
RANKS, DRIVER = (130, 630), 380
CODE = "ui-monospace, Menlo, Consolas, monospace"
# Who drives a codec: name, where gradients come from, where it runs, and what serves the requests.
GROUP = "a process group"
DRIVERS = (
    ("lockstep", ("a recording, or tensors", "of all ranks"), ("all ranks step together", "in one process"), "memory"),
    ("engine", ("DDP's buckets, as", "backward fills them"), ("a thread beside", "backward"), GROUP),
    ("inline", ("your own, or FSDP2's", "sharded gradients"), ("the calling thread,", "done on return"), GROUP),
    ("outer step", ("how far H local", "steps went"), ("the calling thread, or", "beside later steps"), GROUP),
)


def text(
    x: float, y: float, words: str, *, size: int = 13, fill: str = INK, anchor: str = "middle", code: bool = False
) -> str:
    """Write one line of text around, or from, a point."""
    font = f' font-family="{CODE}"' if code else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{font}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, stroke: str, fill: str) -> str:
    """Draw a rounded box from its upper left corner."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" stroke="{stroke}" fill="{fill}"/>'


def lifeline(x: float, title: str, stroke: str, fill: str) -> list[str]:
    """Draw a participant, with a dashed line below for its time."""
    return [
        f'<line x1="{x}" y1="52" x2="{x}" y2="372" stroke="{LINE}" stroke-dasharray="4 4"/>',
        box(x - 85, 22, 170, 30, stroke, fill),
        text(x, 42, title),
    ]


def both_ranks(y: float, words: str, *, to_driver: bool) -> list[str]:
    """Draw the same message between each rank's codec and the driver."""
    drawn = []
    for rank in RANKS:
        near = DRIVER - 8 if rank < DRIVER else DRIVER + 8
        begin, end = (rank, near) if to_driver else (near, rank)
        drawn += [
            f'<line x1="{begin}" y1="{y}" x2="{end}" y2="{y}" stroke="{INK}" marker-end="url(#to)"/>',
            text((rank + DRIVER) / 2, y - 6, words, size=12, code=True),
        ]
    return drawn


def note(x: float, y: float, lines: Sequence[str], stroke: str, fill: str, width: float = 186) -> list[str]:
    """Draw what a participant does, in a box centred on its line."""
    height = 8 + 16 * len(lines)
    return [
        box(x - width / 2, y, width, height, stroke, fill),
        *(text(x, y + 16 + 16 * number, line, size=12) for number, line in enumerate(lines)),
    ]


def conversation() -> list[str]:
    """Draw an exchange from the gradients to the result."""
    drawn = [
        *lifeline(RANKS[0], "codec on rank 0", BLUE, PALE_BLUE),
        *lifeline(DRIVER, "driver", ORANGE, PALE_ORANGE),
        *lifeline(RANKS[1], "codec on rank 1", BLUE, PALE_BLUE),
        *both_ranks(84, "exchange(gradients)", to_driver=False),
        *both_ranks(154, "yield Gather(payload)", to_driver=True),
        *note(DRIVER, 168, ("one collective: every", "payload to every rank"), ORANGE, "white"),
        *both_ranks(238, "send(all payloads)", to_driver=False),
        *both_ranks(316, "return Exchanged(mean, ...)", to_driver=True),
        *note(DRIVER, 328, ("count bytes, keep states,", "apply the mean"), ORANGE, "white"),
    ]
    for rank in RANKS:
        drawn += note(rank, 94, ("compress",), BLUE, "white", 120)
        drawn += note(rank, 248, ("decode all,", "average"), BLUE, "white", 120)
    return drawn


def drivers() -> list[str]:
    """Draw a card for each driver."""
    drawn = [text(20, 410, "The same codec, driven in four ways", size=14, anchor="start")]
    for number, (name, gradients, where, served) in enumerate(DRIVERS):
        left = 20 + 182 * number
        drawn += [box(left, 424, 174, 168, ORANGE, PALE_ORANGE), text(left + 87, 446, name, size=14)]
        rows = (("gradients", gradients), ("runs in", where), ("requests are served by", (served,)))
        top = 464
        for title, lines in rows:
            drawn.append(text(left + 12, top, title, size=11, fill=GREY, anchor="start"))
            drawn += [
                text(left + 12, top + 15 * (1 + at), line, size=12, anchor="start") for at, line in enumerate(lines)
            ]
            top += 20 + 15 * len(lines)
    return drawn


def figure(parts: Iterable[str]) -> str:
    """Put parts on a white card, which stays readable where the page is dark."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img" '
            'aria-label="A codec yields a collective and is sent its answer; four drivers serve it">',
            '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="white"/>',
            *parts,
            "</svg>\n",
        )
    )


def main() -> None:
    """See the module's text."""
    Path(sys.argv[1]).write_text(figure([*conversation(), *drivers()]), "utf-8")


if __name__ == "__main__":
    main()
