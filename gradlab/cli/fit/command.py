"""`gradlab fit`: make an artifact, and say how it does on gradients the fit did not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from gradlab.cli.fit.ecsq import ecsq
from gradlab.cli.fit.gradiveq import gradiveq
from gradlab.cli.fit.lgc import lgc
from gradlab.cli.fit.lgreco import lgreco
from gradlab.cli.fit.options import CodecCommand
from gradlab.cli.fit.signs import signs
from gradlab.cli.fit.uniform import uniform
from gradlab.errors import GradlabError

_ABOUT: dict[Callable[..., None], str] = {
    gradiveq: "PCA bases of gradient slices (GradiVeQ)",
    ecsq: "One step for all values, entropy-coded",
    signs: "Signs with feedback (dist-EF-blockSGDM)",
    lgreco: "A setting for each layer (L-GreCo)",
    lgc: "An autoencoder of several ranks' values (LGC)",
    uniform: "One codec with one setting: needs no fit",
}


class Fits(TyperGroup):
    """The kinds of fits. A codec's name is no kind of its own if it needs no fit: the error says how it is meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0].lower() if args else ""
        if name and name not in self.commands:
            from gradlab import codecs

            if name in codecs.names():
                how = "lgc TRACE" if codecs.get(name).learns else f"uniform TRACE --codec {name}"
                raise GradlabError(
                    f"fit {args[0]}: no kind of fit; a plan of {name} is made by: gradlab fit {how} --out FILE"
                )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Fits,
    help="Make an artifact from a trace; errors on later iterations are printed.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
for command, about in _ABOUT.items():
    app.command(command.__name__, cls=CodecCommand, short_help=about)(command)
