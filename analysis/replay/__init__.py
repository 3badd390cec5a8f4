"""What does a plan do to recorded gradients?"""

from gradlab.analysis.replay.result import Replay, ReplayStep, ReplaySummary
from gradlab.analysis.replay.run import (
    check_replay,
    holds_unused,
    lockstep_of,
    methods_of,
    parts_of,
    refresh_remark,
    replay,
    replay_plans,
    replay_steps,
)

__all__ = [
    "Replay",
    "ReplayStep",
    "ReplaySummary",
    "check_replay",
    "holds_unused",
    "lockstep_of",
    "methods_of",
    "parts_of",
    "refresh_remark",
    "replay",
    "replay_plans",
    "replay_steps",
]
