"""Decide what to train with on one link: a plan, plain 16 bits, or no compression.

The decision is made once and worded once. A report's first line and answers, `gradlab recommend` and the script of a
report's page fill the same texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradlab.formatting import format_percent, format_seconds
from gradlab.jsonable import Jsonable

if TYPE_CHECKING:
    from gradlab.analysis.forecast.speed import Configuration, Judged

#: A step must be shorter by this share before it is called faster.
SPEED_NOISE = 0.05
COMPRESS, HALF, NOTHING = "compress", "16 bits", "do not compress"
# Sentences on each decision: what to take, what that costs, all of it in short; and on the fastest plan, if it is
# another one.
WORDS: Mapping[str, str] = {
    COMPRESS: "{where} take {plan}: {seconds} a step instead of {dense} (16 bits: {half}), the fastest with {limit}.",
    HALF: "{where} take plain 16 bits: {half} a step instead of {dense}.",
    NOTHING: "{where} do not compress: a step takes {dense}.",
    f"{COMPRESS}, cost": "Loss: {judged}.",
    f"{HALF}, cost": "No plan with {limit} saves another {noise} of a step.",
    f"{NOTHING}, cost": "No plan with {limit} makes it {noise} shorter.",
    f"{COMPRESS}, in short": "{where} take {plan} ({saved} less).",
    f"{HALF}, in short": "{where} take plain 16 bits ({saved} less).",
    f"{NOTHING}, in short": "{where} do not compress.",
    "refused": "{plan} would save {saved}, at a larger loss: {judged}.",
}


@dataclass(frozen=True)
class Decision(Jsonable):
    """A decision for one number of nodes on one link, and why.

    take: `COMPRESS`, `HALF` (plain 16-bit reduction) or `NOTHING`; plan: None unless it is the first.
    why, cost, short: the decision as a sentence, what it costs in loss, and the decision in a few words.
    refused: sentence on the fastest plan if it would lose too much; break_even: one on the link speeds at which the
        decision turns. Empty: there is none.
    """

    take: str
    plan: str | None
    seconds: float
    why: str
    cost: str
    short: str
    refused: str = ""
    break_even: str = ""

    @property
    def text(self) -> str:
        """All of it but where it turns, in prose."""
        return " ".join(line for line in (self.why, self.cost, self.refused) if line)


def decide(at: Configuration, judged: Mapping[str, Judged], limit: str, break_even: str = "") -> Decision:
    """Take the fastest plan within the allowed loss, if it saves more than a forecast can tell, or plain 16 bits where
    these are about as fast. limit: the allowed loss in prose.
    """
    plan, take = at.taken, COMPRESS
    seconds = at.half_seconds if plan is None else at.seconds[plan]
    if plan is None:
        take = HALF if at.half_saves > SPEED_NOISE else NOTHING
        seconds = seconds if take == HALF else at.dense_seconds

    def filled(words: str, plan: str | None, seconds: float) -> str:
        saved = 1 - seconds / at.dense_seconds if at.dense_seconds else 0.0
        return WORDS[words].format(
            where=at.where[:1].upper() + at.where[1:],
            plan=plan,
            seconds=format_seconds(seconds),
            dense=format_seconds(at.dense_seconds),
            half=format_seconds(at.half_seconds),
            saved=format_percent(saved, 0),
            noise=format_percent(SPEED_NOISE, 0),
            limit=limit,
            judged="" if plan is None else judged[plan].text,
        )

    refused, fastest = "", at.fastest
    if fastest not in (None, at.closest) and at.seconds[fastest] < (1 - SPEED_NOISE) * seconds:
        refused = filled("refused", fastest, at.seconds[fastest])
    why, cost, short = (filled(words, plan, seconds) for words in (take, f"{take}, cost", f"{take}, in short"))
    return Decision(take, plan, seconds, why, cost, short, refused, break_even)
