"""Plans that need no fit: wrappers by text, and an artifact with the replay that speaks for it."""

from __future__ import annotations

from typing import Any

from gradlab import wrappers
from gradlab.analysis.replay.result import Replay
from gradlab.artifact import Artifact
from gradlab.codec.settings import build_settings
from gradlab.errors import GradlabError
from gradlab.jsonable import plain
from gradlab.plan import Plan, Wrap
from gradlab.setting_texts import parse_settings, split_settings


def uniform_artifact(plan: Plan, replay: Replay, **metadata: Any) -> Artifact:
    """Join a plan and its provenance: the trace it was replayed on, the bytes it will send, the replay's summary."""
    if replay.plan_digest != plan.digest:
        raise GradlabError(
            f"the replay is of plan {replay.plan_digest[:12]}, expected {plan.digest[:12]}: replay the plan itself"
        )
    provenance = {
        "method": "uniform",
        "trace": replay.trace_digest,
        "world_size": replay.world_size,
        "payload_bytes": replay.forecast_payload_bytes,
        "dense_payload_bytes": replay.dense_payload_bytes,
        "replay": plain(replay.summary()),
    } | {key: plain(value) for key, value in metadata.items() if value is not None}
    return Artifact(plan, provenance)


def parse_wrapper(text: str) -> Wrap:
    """Read NAME[:KEY=VALUE,...] as a wrapper of a plan."""
    name, _, rest = text.partition(":")
    settings = parse_settings(split_settings(rest), f"--wrap {name}")
    build_settings(wrappers.get(name), settings)
    return Wrap(name, settings)
