"""Does LGC's autoencoder beat what needs no learning? Its errors while it learns and later, beside other codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradlab.analysis.figures.chart import Chart, Panel, lines, rule
from gradlab.analysis.figures.palette import BLUE, VERMILION
from gradlab.analysis.section import Table
from gradlab.formatting import format_bytes, format_percent

if TYPE_CHECKING:
    from gradlab.analysis.fit.lgc.fit import LgcMeasurement

# An autoencoder with more than this share of the error of zeros has learned next to nothing.
_NOTHING_LEARNED = 0.9
_DIVERGED = 1.5
_SHORT = 16
_COLLAPSED = 0.05  # spread of codes over their size


def selection_table(measured: LgcMeasurement) -> Table:
    """Compare ways to send the same selected values by their bytes and their error on held-out iterations."""
    rows = [
        [code.name, format_percent(code.error), format_bytes(code.payload_bytes), format_bytes(code.wire_bytes)]
        for code in measured.codes
    ]
    title = f"{measured.selected} selected values, averaged over {measured.world_size} ranks; positions come on top"
    return Table(title, ("sent as", "error, held out", "payload", "wire"), rows, text_columns=1)


def lgc_verdict(measured: LgcMeasurement) -> str:
    """Say whether the autoencoder beats codes of the same bytes that need no learning."""
    own, rival = measured.autoencoder.error, measured.better
    error = f"{format_percent(own)} of the averaged selected values is lost on later iterations"
    instead = ""
    if rival is not None:
        instead = (
            f", and {format_percent(rival.error)} by {rival.name}, which sends as many bytes or fewer and needs "
            "no learning"
        )
    if own > _DIVERGED:
        return f"Do not use the autoencoder, which is worse than sending zeros: {error}{instead}. Try a smaller rate."
    if own > _NOTHING_LEARNED:
        return f"Do not use the autoencoder, which has learned next to nothing: {error}{instead}."
    if rival is not None:
        return f"Do not use the autoencoder: {error}{instead}."
    return f"The autoencoder beats what needs no learning at its bytes: {error}."


def lgc_warnings(measured: LgcMeasurement) -> list[str]:
    """List what a user must know before training with the autoencoder."""
    warnings = []
    if measured.selected < _SHORT:
        warnings.append(
            f"{measured.selected} values are selected: padded to a multiple of 16 their code is hardly shorter; "
            "raise the density."
        )
    if measured.code_spread < _COLLAPSED:
        warnings.append(
            f"Codes of successive iterations differ by {format_percent(measured.code_spread)} of "
            "their size: they say next to nothing. With a server a smaller similarity loss may help (--set "
            "similarity=0)."
        )
    if not measured.autoencoder.error <= measured.most_error:
        warnings.append(
            f"Its error is above most_error = {measured.most_error:g}: training with it sends selected values as they "
            "are, to the end."
        )
    return warnings


def fit_chart(measured: LgcMeasurement) -> Chart:
    """Draw an autoencoder's error over epochs, learned from and stopped by, and on held-out iterations over age."""
    epochs, curve = range(1, len(measured.curve) + 1), measured.curve
    learning = [
        lines(epochs, [errors.learned for errors in curve], BLUE, "learned from"),
        lines(epochs, [errors.stop for errors in curve], VERMILION, "stopped by"),
    ]
    ages = [sum(span) / 2 for span in measured.holdout.ages]
    later = [lines(ages, measured.holdout.error_by_age, VERMILION, marker="o", ms=3), rule(1.0, linestyle=":")]
    look = {"ylim": (0, None)}
    return Chart(
        [
            Panel(learning, "epoch", "error, in that of zeros", legend=True, look=look),
            Panel(later, "iterations since it learned", "held-out error", look=look),
        ],
        columns=2,
        height=2.4,
    )
