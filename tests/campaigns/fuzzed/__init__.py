"""Formats that `fuzz.py` attacks: sound files, what is done to them, and how each is read and used."""

from __future__ import annotations

from collections.abc import Callable

from campaigns.fuzzed.artifact import ArtifactFiles
from campaigns.fuzzed.case import Case, Format
from campaigns.fuzzed.checkpoint import CheckpointFiles
from campaigns.fuzzed.corpus import Corpus
from campaigns.fuzzed.images import Arrays
from campaigns.fuzzed.messages import Messages, Network
from campaigns.fuzzed.plain import Measurements, Settings
from campaigns.fuzzed.runs import Logs, Reports
from campaigns.fuzzed.trace import TraceFiles

FORMATS: dict[str, Callable[[], Format]] = {
    "artifact": ArtifactFiles,
    "trace": TraceFiles,
    "checkpoint": CheckpointFiles,
    "settings": Settings,
    "measurements": Measurements,
    "corpus": Corpus,
    "npz": Arrays,
    "messages": Messages,
    "network": Network,
    "log": Logs,
    "report": Reports,
}

__all__ = ["FORMATS", "Case", "Format"]
