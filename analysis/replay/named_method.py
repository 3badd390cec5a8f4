"""How a command's words name a method: an artifact, a codec or a published method with settings, a file of one's own.

plan.safetensors                an artifact
topk:density=0.01               a codec with settings, or "PowerSGD:rank=4", a published method
my_codec.py:density=0.05        the codec that a Python file of the user's defines; my_codec is short for it
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradlab import codecs
from gradlab.analysis.replay import check_replay, replay_plans
from gradlab.analysis.replay.result import Replay
from gradlab.artifact import Artifact
from gradlab.codec.from_file import codec_from_file, told_at
from gradlab.codec.registry import CODECS
from gradlab.codec.settings import build_settings
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.plan.plan import check_model
from gradlab.plan.recipes import METHODS, method_plan
from gradlab.progress import Progress
from gradlab.setting_texts import parse_settings, split_settings
from gradlab.trace import Trace

EXPECTED = (
    "an artifact (plan.safetensors), a codec or a published method with settings (topk:density=0.01), or a Python file "
    "that defines a codec (my_codec.py)"
)
PlanOf = Callable[[Sequence["Layer"]], "Plan"]  # raises GradlabError for layers that the plan does not fit


@dataclass(frozen=True)
class NamedMethod:
    """A method by the words that were typed, with its title in tables.

    provenance: an artifact's.
    file: the Python file that defines its codec; None: the codec is gradlab's.
    """

    words: str
    title: str
    plan_of: PlanOf
    provenance: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None


def parse_method(words: str, not_in: Path | None = None) -> NamedMethod:
    """Read the words that name a method. A Python file that they name is run, unless it lies in the folder not_in."""
    if words.endswith(".safetensors") or (Path(words).is_file() and not words.endswith(".py")):
        return _artifact(words)
    name, _, rest = words.partition(":")
    file, settings = _file_of(name), parse_settings(split_settings(rest), f"{words}:")
    if file is None:
        return NamedMethod(words, words, _built_in(words, name, settings))

    if not_in is not None and file.resolve().is_relative_to(not_in.resolve()):
        raise GradlabError(f"{file}: lies in {not_in}, of which no code is run: move it elsewhere if it is yours")
    return NamedMethod(words, words, _uniform(words, codec_from_file(file).name, settings), file=file)


def loaded_plans(paths: Sequence[Path], taken: Sequence[str] = ()) -> dict[str, Artifact]:
    """Load artifacts by their files' stems; by their paths if two stems are equal, or one is taken."""
    stems = {path.stem for path in paths}.union(taken)
    apart = len(stems) == len(paths) + len(taken)
    return {path.stem if apart else str(path): Artifact.load(path) for path in paths}


def _artifact(words: str) -> NamedMethod:

    artifact = Artifact.load(words)

    def plan_of(layers: Sequence[Layer]) -> Plan:
        check_model(artifact.plan, layers)
        return artifact.plan

    return NamedMethod(words, Path(words).stem, plan_of, artifact.provenance)


def _file_of(name: str) -> Path | None:
    """The Python file that a name stands for; None: it is no file."""
    if name.endswith(".py"):
        return Path(name)
    beside = Path(f"{name}.py")
    return beside if name not in METHODS and name not in codecs.names() and beside.is_file() else None


def _built_in(words: str, name: str, settings: dict[str, Any]) -> PlanOf:

    if name in METHODS:
        method = METHODS[name]
        build_settings(codecs.get(method.codec), {**method.settings, **settings})
        return lambda layers: method_plan(layers, name, **settings)
    if name not in codecs.names():
        close = difflib.get_close_matches(name, [*METHODS, *codecs.names()], n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise GradlabError(f"{name[:80]}: names no method{hint}; expected {EXPECTED}")
    return _uniform(words, name, settings)


def _uniform(words: str, codec: str, settings: dict[str, Any]) -> PlanOf:
    """A uniform plan of a codec; error_feedback may stand among the settings, and is no setting of the codec."""
    feedback = settings.pop("error_feedback", None)
    if feedback is not None and type(feedback) is not bool:
        raise GradlabError(f"{words}: error_feedback = {str(feedback)[:80]}, expected true or false")
    build_settings(codecs.get(codec), settings)  # names the codec's settings; Plan.uniform has arguments of its own
    return lambda layers: Plan.uniform(layers, codec, error_feedback=feedback, warmup_steps=0, **settings)


def named_methods(words: Sequence[str], not_in: Path | None = None) -> list[NamedMethod]:
    """Read the words of several methods; artifacts of one name in several folders are told apart by their paths."""
    if len(set(words)) < len(words):
        raise GradlabError(f"{next(each for each in words if words.count(each) > 1)}: is named twice")
    methods = [parse_method(each, not_in) for each in words]
    titles = [method.title for method in methods]
    return methods if len(set(titles)) == len(titles) else [replace(one, title=one.words) for one in methods]


def plans_for(
    methods: Sequence[NamedMethod], trace: Trace, start: int = 0, stop: int | None = None
) -> dict[str, Plan | GradlabError]:
    """By words, a plan for the recording, or why it cannot be replayed from position start to stop."""
    if trace.world_size == 1:
        raise GradlabError(f"{trace.path}: recorded on one rank: there is no exchange to replay")
    last = len(trace.steps) if stop is None else stop
    return {method.words: _fitting(method, trace, start, last) for method in methods}


def _fitting(method: NamedMethod, trace: Trace, start: int, stop: int) -> Plan | GradlabError:

    try:
        plan = method.plan_of(trace.model_layers)
        check_replay(trace, plan, start, stop)
    except GradlabError as error:
        return error
    return plan


def replays_of(
    methods: Sequence[NamedMethod],
    plans: Mapping[str, Plan],
    trace: Trace,
    *,
    start: int = 0,
    stop: int | None = None,
    workers: int,
    progress: Progress | None = None,
) -> dict[str, Replay]:
    """Replay those methods that have a plan, judged on iterations that no plan was fitted on, by words.

    Codecs of the user's are replayed in this process: others do not know them.
    """
    named = {method.words: method for method in methods if method.words in plans}
    own = [words for words in named if any(group.codec in CODECS.registered for group in plans[words].groups)]
    shared = {words: plans[words] for words in named if words not in own}
    found = dict(replay_plans(trace, shared, start=start, stop=stop, workers=workers, progress=progress))
    for words in own:
        with _failures_of(named[words].file):
            found |= replay_plans(trace, {words: plans[words]}, start=start, stop=stop, progress=progress)
    return {words: _held_out(found[words], method) for words, method in named.items()}


def _held_out(found: Replay | GradlabError, method: NamedMethod) -> Replay:
    if isinstance(found, GradlabError):
        raise GradlabError(f"{method.words}: {found}")
    return found.held_out(method.provenance)


@contextmanager
def _failures_of(file: Path | None) -> Iterator[None]:
    """Raise an error of a user's codec as one line, which names the line of its file."""
    try:
        yield
    except GradlabError:
        raise
    except Exception as error:
        if file is None:
            raise
        raise GradlabError(f"{file}: its codec fails on this recording ({told_at(error, file)})") from None
