"""What users write themselves: settings as words, and files of measurements as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from campaigns.fuzzed.case import Case, Format, altered_json, damaged, odd
from gradlab import codecs, wrappers
from gradlab.analysis.forecast.calibration import calibrate_link, read_observations
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.network import compute_seconds_of
from gradlab.chrome_trace import read_step
from gradlab.codec import Codec
from gradlab.codec.settings import build_settings, fields_of
from gradlab.codec.wrapper import Wrapper
from gradlab.codecs.topk import TopK
from gradlab.errors import GradlabError
from gradlab.setting_texts import parse_settings

NUMBERS = (
    "1e400",
    "-1e400",
    "NaN",
    "1" * 5000,
    "-0",
    "0x10",
    "1_000",
    "1e-320",
    "9" * 400,
    "0.1",
    "1",
    "-1",
    "2",
    "1e9",
)
TEXTS = ("", "true", "null", '"1"', '"0.01"', "[1]", "{}", "[" * 50_000, '{"a":' * 20_000, "\x1b[31m", "\u202e", "a=b")


class Settings(Format):
    """A codec or wrapper, and NAME=VALUE words of it; the codec is used on a small gradient."""

    file_name = "settings.json"

    def case(self, draw: np.random.Generator) -> Case:
        names = [*codecs.names(), *wrappers.names()]
        name = str(draw.choice(names))
        known = [field.name for field in fields_of(method(name).Settings)] or ["density"]
        words = [f"{draw.choice([*known, *known, 'x'])}={value(draw)}" for _ in range(int(draw.integers(1, 4)))]
        content = json.dumps([name, words], ensure_ascii=True)
        return Case(
            f"settings of a {'codec' if name in codecs.names() else 'wrapper'}", content.encode(), True, "", use
        )


def value(draw: np.random.Generator) -> str:
    """A value as a word: odd text, a large number, or JSON of its own."""
    way = int(draw.integers(3))
    if way < 2:
        words = NUMBERS if way else TEXTS
        return words[int(draw.integers(len(words)))]
    return json.dumps(odd(draw))


def method(name: str) -> type[Codec]:
    return codecs.get(name) if name in codecs.names() else wrappers.get(name)


def use(path: Path) -> str:
    name, words = json.loads(path.read_text(encoding="utf-8"))
    chosen = method(name)
    settings = build_settings(chosen, parse_settings(words))
    codec = chosen(TopK(), settings) if issubclass(chosen, Wrapper) else chosen(settings)
    grads = {"a": torch.linspace(-1, 1, 60).view(6, 10), "b": torch.ones(7)}
    codec.apply([grads, grads])
    return repr(codec)


# --- measurements ----------------------------------------------------------------------------------------------------

OBSERVATIONS = [
    {"nodes": nodes, "bytes": nbytes, "bandwidth": "200mbit", "seconds": 1.2e-7 * nbytes, "collective": kind}
    for nodes, nbytes, kind in ((2, 10**6, "all-reduce"), (4, 4 * 10**7, "all-reduce"), (4, 10**6, "all-gather"))
]
RUN = {"plan": "0" * 64, "world_size": 4, "time": {"compute": 0.1, "compress": 0.02}, "bytes": {"sent": 1}}
EVENTS = [
    {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "network"}},
    *(
        {"name": f"span {step}", "ph": "X", "pid": 0, "tid": 1, "ts": 1e3 * step, "dur": 10.0, "args": {"step": step}}
        for step in range(3)
    ),
]


def calibrated(path: Path) -> str:
    return repr(calibrate_link(Link(25e6, 1e-4), read_observations(path)))


KINDS: dict[str, tuple[Any, Callable[[Path], Any]]] = {
    "collectives": (OBSERVATIONS, calibrated),
    "run": (RUN, compute_seconds_of),
    "chrome trace": ({"traceEvents": EVENTS}, lambda path: read_step(path).times),
}


class Measurements(Format):
    """JSON that is damaged or altered, or that stands for much more than its bytes."""

    file_name = "measured.json"

    def case(self, draw: np.random.Generator) -> Case:
        kind = str(draw.choice(list(KINDS)))
        content, read = KINDS[kind]
        way = int(draw.integers(10))
        if way == 0:
            data = [b"[" * 10**6, b"[" + b"{}," * 2**22 + b"1]", b"1" * 10**5, b"\xff\xfe", b""][int(draw.integers(5))]
        elif way < 4:
            _, data = damaged(json.dumps(content).encode(), draw)
        else:
            data = json.dumps(altered_json(content, draw)).encode()
        return Case(kind, data, True, "", lambda path: refusing_missing(read, path))


def refusing_missing(read: Callable[[Path], Any], path: Path) -> str:
    try:
        return repr(read(path))
    except OSError as error:
        raise GradlabError(str(error)) from None
