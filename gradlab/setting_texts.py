"""Settings of methods as commands take them: NAME=VALUE, with values of JSON or plain words."""

from __future__ import annotations

import json
import re
from typing import Any

from gradlab.errors import GradlabError


def split_settings(text: str) -> list[str]:
    """Split "KEY=VALUE,KEY=VALUE" into its parts; a list's commas are its own. Empty text has none."""
    return re.split(r",(?=\w+=)", text) if text else []


def parse_settings(texts: list[str], option: str = "--set") -> dict[str, Any]:
    """Read NAME=VALUE texts as settings; values are JSON, or plain words."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise GradlabError(f"{option} {text}: expected NAME=VALUE, such as density=0.01")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
        except RecursionError:
            raise GradlabError(f"{option} {text[:80]}...: nested too deeply, expected NAME=VALUE") from None
    return values
