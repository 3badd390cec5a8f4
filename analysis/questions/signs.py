"""How well do signs stand for gradients? Fig. 1 and Table 1 of dist-EF-blockSGD, and what more scales would keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradlab.analysis.figures.chart import Chart, Panel, lines, note, rule
from gradlab.analysis.figures.palette import BLACK, BLUE, VERMILION
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.formatting import format_count
from gradlab.saving import Saving

Json = Mapping[str, Any]
_GAUSSIAN = (math.pi / 2 - 1) ** 0.5


def signs_section(data: Json) -> Section | None:
    """Make the page; None: signs were not measured. data: a trace report's."""
    blocks = data.get("sign_blocks")
    if not blocks:
        return None
    return Section("signs", "How well signs stand for gradients", "", [sign_table(blocks)], sign_drawings(blocks))


def sign_table(blocks: Json) -> Table:
    """Compute Table 1 of dist-EF-blockSGD for the recorded model and ranks: bits per iteration, a row per method."""
    bits = blocks["bits_per_iteration"]
    dense = bits["full-precision SGD"]
    counted = blocks["counted_bits_per_iteration"]
    rows = [
        [method, format_count(count), format_count(counted[method]), *Saving.of(counted[method], dense).cells]
        for method, count in bits.items()
    ]
    note = (
        "All ranks, to a server and back: by the formulas of Table 1 of dist-EF-blockSGD, every tensor a block, and "
        "counted off what the codecs make of a recorded gradient, whose last byte is filled up."
    )
    return Table("Bits per iteration of signs", ["method", "computed", "counted", "ratio", "vs 16 bits"], rows, note)


def sign_drawings(blocks: Json) -> list[Drawing]:
    """List the figures: Fig. 1, and energy kept over bits per value."""
    return [
        Drawing(
            "sign_statistics",
            "How well signs stand for gradients",
            f"After Fig. 1 of dist-EF-blockSGD, a point for {blocks['window']} iterations: (a) how much magnitudes "
            "differ within tensors, standard deviation over mean, averaged; (b) the smallest δ = ‖v‖₁² / (d ‖v‖²), "
            "with what it can fall to at worst (1 / d).",
            _figure_1(blocks["figure_1"]),
        ),
        Drawing(
            "sign_blocks",
            "Where more scales pay",
            "Share of the gradients' energy that signs keep, over bits per value. The leftmost point is one scale per "
            "tensor; block sizes of every point are in report.json.",
            _kept(blocks["suggestion"]),
        ),
    ]


def _figure_1(drawn: Json) -> Chart:
    at = drawn["iterations"]
    left = [lines(at, drawn["variation"], BLUE, marker="o"), rule(_GAUSSIAN, linestyle=":")]
    left.append(note(at[-1], _GAUSSIAN, "Gaussian", ha="right", va="bottom"))
    right = []
    for what, color, marker, label in (
        ("by_tensor", VERMILION, "s", "a scale per tensor"),
        ("of_model", BLACK, "o", "one for the model"),
    ):
        right.append(lines(at, drawn[f"delta_{what}"], color, label, marker=marker))
        right.append(rule(drawn[f"bound_{what}"], color, linestyle=":"))
    variation = "coefficient of variation\nof |g| within tensors"
    return Chart(
        [
            Panel(left, "iteration", variation, "(a)", look={"ylim": (0, None)}),
            Panel(right, "iteration", "smallest δ (dotted: bounds)", "(b)", look={"yscale": "log"}),
        ],
        columns=2,
        height=2.3,
    )


def _kept(suggestion: Json) -> Chart:
    rows = suggestion["rows"]
    bits = [row["bits_per_value"] for row in rows]
    marks = [
        lines(bits, [row["kept"] for row in rows], VERMILION, "shared out by what they keep", marker="s"),
        lines(bits, [row["kept_by_equal_blocks"] for row in rows], BLUE, "blocks of one size", marker="o", ls="--"),
        rule(suggestion["kept_by_one_block"], BLACK, "one block for the model", linestyle=":"),
    ]
    return Chart([Panel(marks, "bits per value", "energy kept\nΣ ‖v_b‖₁² / d_b over ‖v‖²")], height=2.3)
