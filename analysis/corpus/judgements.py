"""Methods judged on a corpus: each beside those that were trained on its recordings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlab.analysis.corpus.manifest import Corpus, read_corpus
from gradlab.analysis.corpus.outcome import Judgement, Outcome, judge
from gradlab.analysis.forecast.endings import EndingRange
from gradlab.analysis.replay.named_method import NamedMethod, plans_for, replays_of
from gradlab.analysis.section import Table
from gradlab.errors import GradlabError
from gradlab.formatting import ABSENT, format_bytes, format_number, format_percent, format_seconds
from gradlab.progress import Progress
from gradlab.trace import Trace

_FIGURE_COLUMNS = ("payload/step", "payload ratio", "payload vs 16 bits", "cosine", "error of the mean")
_JUDGED_COLUMNS = (
    "method",
    "recording",
    *_FIGURE_COLUMNS,
    "codec time",
    "by cosine",
    "by bytes",
    "similar methods ended",
)
_CORPUS_COLUMNS = ("method", *_FIGURE_COLUMNS, "similar methods ended", "ended")


@dataclass(frozen=True)
class CorpusJudgements:
    """Methods on a corpus.

    by_recording: judgements by recording and by the method's words; an error says why it cannot be replayed there.
    """

    corpus: Corpus
    methods: Sequence[NamedMethod]
    by_recording: Mapping[str, Mapping[str, Judgement | GradlabError]]

    def to_json(self) -> dict[str, Any]:
        """Judgements, refusals in a line, and the corpus's own outcomes."""
        judgements = {
            recording: {
                words: {"refused": _first_line(found)} if isinstance(found, GradlabError) else found
                for words, found in of.items()
            }
            for recording, of in self.by_recording.items()
        }
        return {"recordings": self.corpus.recordings, "judgements": judgements, "outcomes": self.corpus.outcomes}

    @property
    def warnings(self) -> list[str]:
        """Warnings of the replays, once each."""
        found = ((name, one) for name, of in self.by_recording.items() for one in of.values())
        lines = (f"{name}: {line}" for name, one in found if isinstance(one, Judgement) for line in one.warnings)
        return list(dict.fromkeys(lines))

    def tables(self) -> list[Table]:
        """All judgements, then for each recording its own methods with the judged ones, by their bytes."""
        recordings = self.corpus.recordings
        rows = [
            [method.title, one.name, *_judged_cells(self.by_recording[one.name][method.words])]
            for method in self.methods
            for one in recordings
        ]
        judged = Table("what is judged", _JUDGED_COLUMNS, rows, text_columns=2)
        return [
            judged,
            *(Table(f"{one.name}: {one.title}", _CORPUS_COLUMNS, self._rows(one.name)) for one in recordings),
        ]

    def _rows(self, recording: str) -> list[list[str]]:
        found = [(method.title, self.by_recording[recording][method.words]) for method in self.methods]
        own = [
            (one.payload_bytes, [f"> {title}", *_figures(one), _range(one.predicted), ABSENT])
            for title, one in found
            if isinstance(one, Judgement)
        ]
        known = [(row.payload_bytes, outcome_cells(row)) for row in self.corpus.outcomes_of(recording)]
        return [cells for _, cells in sorted([*own, *known], key=lambda pair: pair[0])]


def judge_methods(
    path: Path, methods: Sequence[NamedMethod], *, workers: int = 1, progress: Progress | None = None
) -> CorpusJudgements:
    """Replay methods on each recording of a corpus's folder.

    Raises:
        GradlabError: if the folder is no corpus, or a method cannot be replayed on any recording.
    """
    corpus = read_corpus(path)
    judged = {one.name: _judged(corpus, one.name, methods, workers, progress) for one in corpus.recordings}
    for method in methods:
        reasons = [found for of in judged.values() if isinstance(found := of[method.words], GradlabError)]
        if len(reasons) == len(judged):
            raise GradlabError(f"{method.words}: {_first_line(reasons[0])}")
    return CorpusJudgements(corpus, methods, judged)


def _judged(
    corpus: Corpus, recording: str, methods: Sequence[NamedMethod], workers: int, progress: Progress | None
) -> dict[str, Judgement | GradlabError]:

    with Trace(corpus.folder / recording) as trace:
        plans = plans_for(methods, trace)
        fitting = {words: plan for words, plan in plans.items() if not isinstance(plan, GradlabError)}
        replays = replays_of(methods, fitting, trace, workers=workers, progress=progress)
    outcomes = corpus.outcomes_of(recording)
    judged: dict[str, Judgement | GradlabError] = {
        words: plan for words, plan in plans.items() if isinstance(plan, GradlabError)
    }
    return judged | {words: judge(replay, outcomes) for words, replay in replays.items()}


def _first_line(reason: GradlabError) -> str:
    """A refusal without the layers of another recording's model."""
    return str(reason).splitlines()[0].rstrip(":")


def _judged_cells(found: Judgement | GradlabError) -> list[str]:
    if isinstance(found, GradlabError):
        return [f"refused: {_first_line(found)}", *[ABSENT] * (len(_JUDGED_COLUMNS) - 3)]
    return [
        *_figures(found),
        format_seconds(found.codec_seconds),
        ABSENT if found.by_cosine is None else str(found.by_cosine),
        str(found.by_bytes),
        _range(found.predicted),
    ]


def outcome_cells(row: Outcome) -> list[str]:
    return [row.method, *_figures(row), _range(row.predicted), _signed(row.excess)]


def _figures(of: Judgement | Outcome) -> list[str]:
    """The figures that both a judged method and one of the corpus have."""
    error = format_percent(of.aggregate_error)
    return [format_bytes(of.payload_bytes), *of.saving.cells, format_number(of.cosine), error]


def _range(predicted: EndingRange | None) -> str:
    return ABSENT if predicted is None else f"{_signed(predicted.low)} to {_signed(predicted.high)}"


def _signed(excess: float) -> str:
    """A loss over dense training's: "+1.2 %"."""
    if math.isinf(excess):
        return "diverged"
    return f"{'+' if excess >= 0 else '-'}{format_percent(abs(excess))}"
