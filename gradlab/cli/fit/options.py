"""Options that the commands of `gradlab fit` share, and how their texts are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.plan import Wrap

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")]
Target = Annotated[Path, typer.Option("--out", metavar="ARTIFACT", help="The file to write (.safetensors).")]
Warmup = Annotated[
    int | None,
    typer.Option(help="Dense steps before the first compressed one in training; the codec's own habit by default."),
]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="Layers of this role only, such as convolution or linear; repeatable; the codec's own habit by default.",
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the codec; repeatable. `gradlab methods CODEC` lists them with their ranges.",
    ),
]
FitWarmup = Annotated[
    int,
    typer.Option(
        help="Dense steps before the first compressed one; the fit takes the last --samples of them. 0: compress once "
        "the first --samples are over."
    ),
]
Seed = Annotated[int, typer.Option(help="Of the random streams that ranks share.")]
Overwrite = Annotated[bool, typer.Option(help="Replace a file that is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def known_roles(roles: list[str] | None) -> tuple[str, ...] | None:
    """Roles as given; None for none.

    Raises:
        GradlabError: for one that there is not.
    """
    from gradlab.layout import ROLES

    if unknown := [role for role in roles or [] if role not in ROLES]:
        raise GradlabError(f"--role {unknown[0]}: expected one of {', '.join(ROLES)}")
    return tuple(roles) if roles else None


def parse_wrapper(text: str) -> Wrap:
    """NAME[:KEY=VALUE,...] as a wrapper of a plan.

    Raises:
        GradlabError: for a name or a setting that there is not.
    """
    from gradlab import wrappers
    from gradlab.codec.settings import build_settings
    from gradlab.plan import Wrap

    name, _, rest = text.partition(":")
    texts = re.split(r",(?=\w+=)", rest) if rest else []  # a list's commas are its own
    settings = parse_settings(texts, f"--wrap {name}")
    build_settings(wrappers.get(name), settings)
    return Wrap(name, settings)


def parse_layer_settings(texts: list[str]) -> dict[str, dict[str, Any]]:
    """LAYER:NAME=VALUE texts as settings by layer.

    Raises:
        GradlabError: for a text without ":" or "=".
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        layer, colon, setting = text.partition(":")
        if not colon:
            raise GradlabError(f"--layer-set {text}: expected LAYER:NAME=VALUE, such as stem.weight:on_loss=dense")
        found.setdefault(layer, {}).update(parse_settings([setting], f"--layer-set {layer}:"))
    return found


def parse_settings(texts: list[str], option: str = "--set") -> dict[str, Any]:
    """NAME=VALUE texts as settings; values are JSON, or plain words.

    Raises:
        GradlabError: for a text without "=".
    """
    import json

    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise GradlabError(f"{option} {text}: expected NAME=VALUE, such as density=0.01")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
