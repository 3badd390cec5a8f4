"""`gradlab fit`: make an artifact, and say how it does on gradients the fit did not see."""

from __future__ import annotations

import typer

from gradlab.cli.fit.ecsq import ecsq
from gradlab.cli.fit.gradiveq import gradiveq
from gradlab.cli.fit.lgc import lgc
from gradlab.cli.fit.lgreco import lgreco
from gradlab.cli.fit.options import CodecCommand
from gradlab.cli.fit.signs import signs
from gradlab.cli.fit.uniform import uniform

app = typer.Typer(
    help="Make an artifact from a trace; errors on later iterations are printed.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
for command in (gradiveq, ecsq, signs, lgreco, lgc, uniform):
    app.command(command.__name__, cls=CodecCommand)(command)
