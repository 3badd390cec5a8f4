"""A recorded trace: its files, its rules, and how it is read and checked."""

from gradlab.trace.checking import RankCheck, TraceCheck, check
from gradlab.trace.growing import GrowingTrace, RankProgress, TraceProgress
from gradlab.trace.trace import Trace, TraceSource, TraceStep

__all__ = [
    "GrowingTrace",
    "RankCheck",
    "RankProgress",
    "Trace",
    "TraceCheck",
    "TraceProgress",
    "TraceSource",
    "TraceStep",
    "check",
]
