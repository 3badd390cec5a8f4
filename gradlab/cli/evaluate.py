"""Replay methods on recorded gradients with the code that trains: error, cosine, bytes, time, by layer and step.

Errors of an artifact fitted on this trace are those of iterations after its fit, with in-sample errors beside them.

On a corpus each method is replayed on every recording, and stands beside the methods that were trained there:
docs/corpus.md.

Examples:

  gradlab evaluate trace topk.safetensors gradiveq.safetensors

  gradlab evaluate trace topk:density=0.01 "QSGD, max norm:bits=4" my_codec.py

  gradlab evaluate corpus my_codec.py:density=0.05

  gradlab evaluate trace gradiveq.safetensors --cycle iterations.svg
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gradlab.analysis.corpus.judgements import judge_methods
from gradlab.analysis.corpus.manifest import is_corpus
from gradlab.analysis.figures.chart import write_chart
from gradlab.analysis.outputs import REPORT_FILES, require_figure, require_free
from gradlab.analysis.questions.accuracy import replay_table, replay_verdict
from gradlab.analysis.questions.slices import cycle_chart
from gradlab.analysis.replay.cycle import training_cycle
from gradlab.analysis.replay.named_method import NamedMethod, named_methods, plans_for, replays_of
from gradlab.analysis.replay.result import Replay
from gradlab.analysis.report.trace_report import Examination, write_trace_report
from gradlab.cli.console import OUT, Answer, command_line, print_json, print_table, progress_bars
from gradlab.cli.options import AsJson, AverageRanks, Overwrite, SharedBy, workers_of
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.progress import Progress
from gradlab.trace import Trace


def evaluate(
    trace: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a trace or of a corpus.")],
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Artifacts; codecs or published methods with settings, as topk:density=0.01; or a Python file that "
            "defines a codec, my_codec.py, which is run.",
        ),
    ],
    start: Annotated[int, typer.Option(help="Position of the first recorded step to replay, from 0.")] = 0,
    stop: Annotated[int | None, typer.Option(help="Position after the last one; default: to the end.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="REPORT", help="Folder for a report with plots.")] = None,
    cycle: Annotated[
        Path | None,
        typer.Option(
            metavar="FIGURE",
            help="Drawing of one method's dense, sampled and compressed iterations, after GradiVeQ's Fig. 6 (.svg, "
            ".pdf).",
        ),
    ] = None,
    workers: SharedBy = None,
    average_ranks: AverageRanks = 1,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:

    sharing = workers_of(workers)
    if is_corpus(trace):
        _refuse_of_corpus(trace, start=start, stop=stop, out=out, cycle=cycle, average_ranks=average_ranks)
        few = 1 if workers is None else sharing  # replays take less time than processes to start
        _evaluate_corpus(trace, named_methods(methods, not_in=trace), few, as_json)
        return
    if out is not None:
        require_free(out, overwrite, contents=REPORT_FILES)
    if cycle is not None:
        require_figure(cycle, overwrite)
        if len(methods) > 1:
            raise GradlabError(f"--cycle draws the iterations of one method, not of {len(methods)}")
    named = named_methods(methods)
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        replays = _replayed(opened, named, start, stop, sharing, progress, cycle)
        page = out and write_trace_report(
            opened,
            out,
            Examination(replays=replays),
            overwrite=overwrite,
            full=True,
            repeat=command_line(),
            workers=sharing,
            progress=progress,
        )
    if as_json:
        print_json(replays)
        return
    answer_of(replays, [str(page)] if page else ()).print()


def _replayed(
    trace: Trace,
    named: Sequence[NamedMethod],
    start: int,
    stop: int | None,
    workers: int,
    progress: Progress,
    cycle: Path | None,
) -> dict[str, Replay]:
    """Replay the methods, by their titles, and draw the cycle of one."""
    plans = _required(plans_for(named, trace, start, stop))  # before the first replay, not after it
    found = replays_of(named, plans, trace, start=start, stop=stop, workers=workers, progress=progress)
    if cycle is not None:
        [plan] = plans.values()
        iterations = training_cycle(trace, plan, start=start, stop=stop, progress=progress)
        write_chart(cycle_chart(iterations), cycle)
    return {one.title: found[one.words] for one in named}


def _required(plans: Mapping[str, Plan | GradlabError]) -> dict[str, Plan]:
    """The plans, all of which have to fit the recording."""
    fitting: dict[str, Plan] = {}
    for words, plan in plans.items():
        if isinstance(plan, GradlabError):
            raise GradlabError(f"{words}: {plan}")
        fitting[words] = plan
    return fitting


def _evaluate_corpus(path: Path, methods: Sequence[NamedMethod], workers: int, as_json: bool) -> None:
    """Judge methods by a corpus's folder, and print their figures beside its own methods'."""
    with progress_bars() as progress:
        found = judge_methods(path, methods, workers=workers, progress=progress)
    if as_json:
        print_json(found.to_json())
        return
    judged, *of_recordings = found.tables()
    Answer((), found.warnings, [judged]).print()
    for table in of_recordings:
        OUT.print()
        print_table(table)


def _refuse_of_corpus(path: Path, **options: object) -> None:
    """Refuse options that are of one trace."""
    defaults = {"start": 0, "stop": None, "out": None, "cycle": None, "average_ranks": 1}
    for name, value in options.items():
        if value != defaults[name]:
            option = f"--{name.replace('_', '-')}"
            raise GradlabError(f"{option} is for one trace, and {path} is a corpus: name one of its recordings")


def answer_of(replays: Mapping[str, Replay], notes: Sequence[str] = ()) -> Answer:
    """The answer of replays by name, with their warnings, and one row per plan."""
    written = {name: result.to_json() for name, result in replays.items()}
    warnings = [f"{name}: {line}" for name, result in replays.items() for line in result.warnings]
    return Answer([replay_verdict(written)], warnings, [replay_table(written)], notes)
