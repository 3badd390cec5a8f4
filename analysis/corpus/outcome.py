"""Outcomes of methods: the figures of its replay, predicted beforehand, beside how training with it ended.

A corpus has one line of JSON per method and recording, in rows.jsonl. They are what a new method is compared with.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gradlab.analysis.forecast.endings import EndingRange
from gradlab.analysis.forecast.speed import Judged
from gradlab.analysis.replay.result import Replay, ReplaySummary
from gradlab.errors import GradlabError
from gradlab.json_form import require_form
from gradlab.jsonable import Jsonable, plain
from gradlab.saving import Saving

_MOST_BYTES = 2**24  # of rows.jsonl
_LARGEST = 1e150
_LENGTH = re.compile(r"[0-9]{1,9}")
_RANGE = {"low": (float, None), "middle": (float, None), "high": (float, None), "least_cosine": float}
_RANGE |= {"most_cosine": float, "methods": int}
_OUTCOME = {
    **{"recording": str, "method": str, "words": str, "memory": bool, "cosines": {str: float}},
    **{"cosine": (float, None), "length": (int, None), "aggregate_error": (float, None), "loss": (float, None)},
    **{"payload_bytes": float, "dense_payload_bytes": float, "dense_loss": float, "predicted": (None, _RANGE)},
    **{"steps": int, "warmup_steps": int, "seed": int},
}


@dataclass(frozen=True)
class Outcome(Jsonable):
    """A method on one recording of a corpus.

    Attributes:
        recording: name of the recording.
        method: name of the method in tables.
        words: method as `gradlab evaluate` takes it, such as "topk:density=0.01"; empty where no such words say it.
        memory: whether its plan applies gradients of earlier steps.
        cosines: cosines of the replay's sums with the true sums, by number of steps.
        cosine, length: cosine and length of the window that judge it; None: no step had an error.
        aggregate_error: median ||mean - true mean|| / ||true mean|| of a step; None: not known.
        payload_bytes, dense_payload_bytes: bytes per rank and step, of the plan while compressing, and of float32.
        predicted: range that trainings with similar cosines ended in, by gradlab's calibration; None: not known.
        loss: mean over the last steps of training with the method; None: it diverged.
        dense_loss: the same of dense training with the same seed, which sees the same batches.
        steps, warmup_steps, seed: length, dense steps and seed of the training.
    """

    recording: str
    method: str
    words: str
    memory: bool
    cosines: Mapping[int, float]
    cosine: float | None
    length: int | None
    aggregate_error: float | None
    payload_bytes: float
    dense_payload_bytes: float
    predicted: EndingRange | None
    loss: float | None
    dense_loss: float
    steps: int
    warmup_steps: int
    seed: int

    @property
    def excess(self) -> float:
        """The loss over dense training's, minus 1; infinite if training diverged."""
        return math.inf if self.loss is None else self.loss / self.dense_loss - 1

    @property
    def saving(self) -> Saving:
        """How many times smaller the payload is, against 32 and against 16 bits."""
        return Saving.of(self.payload_bytes, self.dense_payload_bytes)

    @classmethod
    def from_json(cls, value: Any, where: str) -> Outcome:
        """Read what `to_json` writes; an error names `where`."""
        value = require_form(value, _OUTCOME, where)
        cosines = {
            int(length): float(cosine) for length, cosine in value["cosines"].items() if _LENGTH.fullmatch(length)
        }
        predicted = value["predicted"] and EndingRange(**{name: _end(value["predicted"][name]) for name in _RANGE})
        read = cls(
            **{item.name: value[item.name] for item in fields(cls)} | {"cosines": cosines, "predicted": predicted}
        )
        numbers = (read.payload_bytes, read.dense_payload_bytes, read.dense_loss)
        if len(cosines) < len(value["cosines"]) or not all(0 < number < _LARGEST for number in numbers):
            raise GradlabError(f"{where}: cosines, bytes or dense_loss are out of range")
        return read


def _end(end: Any) -> Any:
    """JSON knows no infinity: an end without a number diverged."""
    return math.inf if end is None else end


def replayed_figures(summary: ReplaySummary, judged: Judged) -> dict[str, Any]:
    """The fields of `Outcome` that follow from a method's replay."""
    return {
        "memory": summary.memory,
        "cosines": {window.length: window.cosine for window in summary.windows},
        "cosine": judged.cosine,
        "length": judged.length,
        "aggregate_error": summary.aggregate_error,
        "payload_bytes": summary.payload_bytes_per_step.mean,
        "dense_payload_bytes": summary.dense_payload_bytes,
        "predicted": judged.ended,
    }


def written(outcomes: Sequence[Outcome]) -> bytes:
    """Write rows.jsonl: a line each, in the order given."""
    lines = (json.dumps(plain(one), sort_keys=True, allow_nan=False) for one in outcomes)
    return "".join(f"{line}\n" for line in lines).encode()


def read_outcomes(path: Path) -> tuple[Outcome, ...]:
    """Read rows.jsonl."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise GradlabError(f"{path}: larger than {_MOST_BYTES} bytes, expected a line per method and recording")
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise GradlabError(f"{path}: cannot be read ({reason})") from None
    return tuple(_of_line(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1))


def _of_line(line: str, where: str) -> Outcome:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise GradlabError(f"{where} is not JSON: expected a method and what became of it") from None
    return Outcome.from_json(value, where)


# --- a method beside the outcomes of others ---------------------------------------------------------------------------


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
