"""`gradlab evaluate` on a corpus: a method beside those that were trained on its recordings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradlab.analysis.corpus.manifest import Corpus, read_corpus
from gradlab.analysis.corpus.outcome import Judgement, Outcome, judge
from gradlab.analysis.forecast.endings import EndingRange
from gradlab.analysis.replay.named_method import NamedMethod, plans_for, replays_of
from gradlab.cli.console import OUT, Answer, Table, print_json, progress_bars
from gradlab.errors import GradlabError
from gradlab.formatting import ABSENT, format_bytes, format_number, format_percent, format_seconds
from gradlab.progress import Progress
from gradlab.trace import Trace

_JUDGED_COLUMNS = (
    "method",
    "recording",
    "payload/step",
    "payload ratio",
    "payload vs 16 bits",
    "cosine",
    "error of the mean",
    "codec time",
    "by cosine",
    "by bytes",
    "similar methods ended",
)
_CORPUS_COLUMNS = (
    "method",
    "payload/step",
    "payload ratio",
    "payload vs 16 bits",
    "cosine",
    "error of the mean",
    "similar methods ended",
    "ended",
)
# By recording, and by the method's words: its judgement, or why it cannot be replayed there.
Judgements = Mapping[str, Mapping[str, "Judgement | GradlabError"]]


def evaluate_corpus(path: Path, methods: Sequence[NamedMethod], workers: int, as_json: bool) -> None:
    """Judge methods by a corpus's folder, and print their figures beside its own methods'."""
    corpus = read_corpus(path)
    with progress_bars() as progress:
        judgements = {one.name: _judged(corpus, one.name, methods, workers, progress) for one in corpus.recordings}
    for method in methods:
        reasons = [found for of in judgements.values() if isinstance(found := of[method.words], GradlabError)]
        if len(reasons) == len(judgements):
            raise GradlabError(f"{method.words}: {_first_line(reasons[0])}")
    if as_json:
        print_json(_as_json(corpus, judgements))
    else:
        _print(corpus, methods, judgements)


def _judged(
    corpus: Corpus, recording: str, methods: Sequence[NamedMethod], workers: int, progress: Progress
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


def _as_json(corpus: Corpus, judgements: Judgements) -> dict[str, Any]:
    return {
        "recordings": corpus.recordings,
        "judgements": {
            recording: {
                words: {"refused": _first_line(found)} if isinstance(found, GradlabError) else found
                for words, found in of.items()
            }
            for recording, of in judgements.items()
        },
        "outcomes": corpus.outcomes,
    }


def _first_line(reason: GradlabError) -> str:
    """A refusal without the layers of another recording's model."""
    return str(reason).splitlines()[0].rstrip(":")


def _print(corpus: Corpus, methods: Sequence[NamedMethod], judgements: Judgements) -> None:
    warnings = [
        f"{recording}: {line}"
        for recording, of in judgements.items()
        for found in of.values()
        if not isinstance(found, GradlabError)
        for line in found.warnings
    ]
    rows = [
        [method.title, one.name, *_judged_cells(judgements[one.name][method.words])]
        for method in methods
        for one in corpus.recordings
    ]
    judged = Table("what is judged", _JUDGED_COLUMNS, rows, 2)
    Answer((), list(dict.fromkeys(warnings)), [judged]).print()
    for one in corpus.recordings:
        OUT.print()
        own = [
            (found.payload_bytes, [f"> {method.title}", *_figures(found), _range(found.predicted), ABSENT])
            for method in methods
            if not isinstance(found := judgements[one.name][method.words], GradlabError)
        ]
        known = [(row.payload_bytes, _outcome_cells(row)) for row in corpus.outcomes_of(one.name)]
        ordered = [cells for _, cells in sorted([*own, *known], key=lambda pair: pair[0])]
        Answer(tables=[Table(f"{one.name}: {one.title}", _CORPUS_COLUMNS, ordered)]).print()


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


def _outcome_cells(row: Outcome) -> list[str]:
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
