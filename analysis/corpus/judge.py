"""Judge a method by a corpus: replay it on each recording, and look at what became of methods like it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlab.analysis.corpus.outcome import Outcome, replayed_figures
from gradlab.analysis.forecast.endings import EndingRange
from gradlab.analysis.forecast.speed import Judged
from gradlab.analysis.replay.result import Replay
from gradlab.jsonable import Jsonable
from gradlab.saving import Saving


@dataclass(frozen=True)
class Place(Jsonable):
    """A place among several, from 1, the best."""

    place: int
    of: int

    def __str__(self) -> str:
        return f"{self.place} of {self.of}"


@dataclass(frozen=True)
class Judgement(Jsonable):
    """A method on one recording; fields of the same name are those of `Outcome`.

    codec_seconds: processor seconds in the codec per step and rank, on this machine.
    by_cosine: place by the cosine among the corpus's methods of its own kind, with or without memory; None: not known.
    by_bytes: place among all methods by the payload.
    """

    payload_bytes: float
    dense_payload_bytes: float
    cosine: float | None
    length: int | None
    memory: bool
    aggregate_error: float | None
    predicted: EndingRange | None
    codec_seconds: float | None
    by_cosine: Place | None
    by_bytes: Place
    warnings: tuple[str, ...]

    @property
    def saving(self) -> Saving:
        """How many times smaller the payload is, against 32 and against 16 bits."""
        return Saving.of(self.payload_bytes, self.dense_payload_bytes)

    def to_json(self) -> dict[str, object]:
        """Write every field, and both ratios."""
        return {**super().to_json(), **self.saving.to_json()}


def judge(replay: Replay, outcomes: Sequence[Outcome]) -> Judgement:
    """Put a replay beside what became of methods on the same recording."""
    summary, judged = replay.summary(), Judged.of(replay)
    figures = replayed_figures(summary, judged)
    del figures["cosines"]
    known = [one for one in outcomes if one.cosine is not None]
    return Judgement(
        **figures,
        codec_seconds=summary.codec_seconds,
        by_cosine=_by_cosine(judged, known),
        by_bytes=_place(summary.payload_bytes_per_step.mean, [one.payload_bytes for one in known]),
        warnings=tuple(line for line in (judged.caution, *summary.warnings) if line),
    )


def _by_cosine(judged: Judged, known: Sequence[Outcome]) -> Place | None:
    if judged.cosine is None or judged.length is None:
        return None
    alike = [one.cosines.get(judged.length) for one in known if one.memory == judged.memory]
    return _place(-judged.cosine, [-cosine for cosine in alike if cosine is not None])


def _place(value: float, others: Sequence[float]) -> Place:
    """The place of a value among others and itself, of which smaller ones are better; equal ones share a place."""
    return Place(1 + sum(other < value for other in others), len(others) + 1)
