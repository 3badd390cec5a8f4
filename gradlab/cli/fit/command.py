"""`gradlab fit`: one command for all methods; its options and help come from the method's dataclass of settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from gradlab.cli.console import OUT, print_json, progress_bars
from gradlab.cli.setting_texts import Settings, parse_settings
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.cli.fit.methods import Made, Method
    from gradlab.codec.settings import Field

ABOUT = {
    "gradiveq": "PCA bases of gradient slices (GradiVeQ)",
    "ecsq": "One step for all values, entropy-coded",
    "signs": "Signs with feedback (dist-EF-blockSGDM)",
    "lgreco": "A setting for each layer (L-GreCo)",
    "lgc": "An autoencoder of several ranks' values (LGC)",
    "uniform": "One codec with one setting: needs no fit",
}
_TrainedWith = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:KEY=VALUE,...]",
        help="Optimizer of the training by its torch.optim name, such as AdamW or SGD:momentum=0.9. Default: the "
        "recorded one.",
    ),
]
_SHARED: dict[str, tuple[Any, Any]] = {  # annotation and default of the options that every method has
    "trace": (Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")], inspect.Parameter.empty),
    "out": (
        Annotated[Path, typer.Option(metavar="ARTIFACT", help="The file to write (.safetensors).")],
        inspect.Parameter.empty,
    ),
    "settings": (Settings, None),
    "warmup_steps": (
        Annotated[int | None, typer.Option(help="Number of dense training steps before the first compressed one.")],
        None,
    ),
    "optimizer": (_TrainedWith, None),
    "seed": (Annotated[int, typer.Option(help="Seed of the random streams that ranks share.")], 0),
    "workers": (Processes, None),
    "dask": (Dask, None),
    "average_ranks": (AverageRanks, 1),
    "overwrite": (Annotated[bool, typer.Option(help="Replace a file that is there.")], False),
    "as_json": (Annotated[bool, typer.Option("--json", help="Print JSON.")], False),
}


class Fits(TyperGroup):
    """The methods. A method's own command is built when it is called: its settings come from slow imports.

    A codec that needs no fit is no method: the error names the command to use.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(ABOUT)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command_of(cmd_name) if cmd_name in ABOUT else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(ABOUT.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0].lower() if args else ""
        if name and name not in ABOUT:
            from gradlab import codecs

            if name in codecs.names():
                how = "lgc TRACE" if codecs.get(name).about.learns else f"uniform TRACE --codec {name}"
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


@app.callback()
def _group() -> None:
    pass


class _FitCommand(TyperCommand):
    """A command that lists settings below its options."""

    rows: tuple[tuple[str, str], ...] = ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Settings (-s NAME=VALUE)"):
            formatter.write_dl(self.rows)


def _command_of(name: str) -> _FitCommand:
    from gradlab import codecs
    from gradlab.cli.fit.methods import METHODS
    from gradlab.codec.settings import fields_of

    method = METHODS[name]
    fields = {field.name: field for field in fields_of(method)}
    shared = {key: value for key, value in _SHARED.items() if key != "optimizer" or method.replays}
    own = {shown: (_option_of(fields[shown]), None) for shown in method.options}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    run = partial(_fit, method)
    parameters = {**shared, **own}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for key, (annotation, default) in parameters.items()
        ]
    )
    run.__annotations__ = {key: annotation for key, (annotation, _) in parameters.items()}
    app.command(name, cls=_FitCommand, help=inspect.cleandoc(method.__doc__ or ""))(run)
    command = get_command(app)
    assert isinstance(command, _FitCommand)
    rest = [field for field in fields.values() if field.name not in method.options]
    of_codec = fields_of(codecs.get(method.listed).Settings) if method.listed else ()
    listed = [*rest, *(field for field in of_codec if field.name not in fields)]
    command.rows = tuple((_default_of(field), _meaning(field)) for field in listed)
    if not method.listed:
        command.rows += (("NAME=VALUE", "Any setting of --codec: `gradlab methods CODEC` lists them."),)
    return command


def _option_of(field: Field) -> Any:
    """The option of a method's setting; None stands for an option that was not given."""
    several = field.hint == tuple[str, ...]
    kinds = [kind for kind in get_args(field.hint) if kind is not type(None)] or [field.hint]
    hint: Any = (list[str] if several else kinds[0]) | None
    name = f"--{field.name.replace('_', '-')}"
    if field.hint is bool:
        return Annotated[hint, typer.Option(name, help=_meaning(field))]
    default = f" [default: {field.default}]" if field.default not in (None, (), dataclasses.MISSING) else ""
    named = (name,) if hint != (bool | None) else ()
    metavar = field.name.upper() if kinds[0] is str or several else None
    return Annotated[hint, typer.Option(*named, metavar=metavar, help=_meaning(field) + default)]


def _default_of(field: Field) -> str:
    return field.name if field.default is dataclasses.MISSING else f"{field.name}={field.default}"


def _meaning(field: Field) -> str:
    """Say what a setting is: its unit, what it does, and its range."""
    words = " ".join(part for part in (field.about.unit, field.about.help) if part)
    allowed = field.values.removesuffix(", or None")
    ranged = field.about.bounded or field.about.choices
    return f"{words.rstrip('.')}." + (f" Allowed: {allowed}." if ranged else "")


def _fit(method: type[Method], /, **given: Any) -> None:
    """Make an artifact, and print what its method measured."""
    from gradlab.analysis.outputs import require_free
    from gradlab.cli.figures import require_figure, write_figure
    from gradlab.cli.fit.methods import Job
    from gradlab.trace import Trace

    out, overwrite = given["out"], given["overwrite"]
    require_free(out, overwrite)
    chosen = {name: given[name] for name in method.options if given[name] is not None}
    options, rest = _split(method, chosen | parse_settings(given["settings"] or []))
    figures = [Path(path) for path in (getattr(options, "figure", None),) if path]
    for figure in figures:
        require_figure(figure, overwrite)
        if figure == out:
            raise GradlabError(f"{out}: given for the artifact and for the figure, expected two names")
    sharing = workers_of(given["workers"], given["dask"])
    with Trace(given["trace"], average_ranks=given["average_ranks"]) as opened, progress_bars() as progress:
        optimizer = given.get("optimizer")
        job = Job(opened, out, rest, given["warmup_steps"], optimizer, given["seed"], sharing, progress)
        made = options.make(job)
    made.artifact.save(out, overwrite)
    for figure, draw in zip(figures, made.draw, strict=True):
        write_figure(draw, figure)
    _print(made, given["as_json"], [out, *figures])


def _split(method: type[Method], values: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """Take a method's own settings; the others are its codec's.

    Raises:
        GradlabError: for a setting that neither has, and for a value out of range.
    """
    from gradlab import codecs
    from gradlab.codec.settings import built, fields_of

    own = [field.name for field in fields_of(method)]
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    options = built(method, f"fit {method.name}", {name: value for name, value in values.items() if name in own})
    rest = {name: value for name, value in values.items() if name not in own}
    known = [field.name for field in fields_of(codecs.get(options.codec_name).Settings)]
    unknown = sorted(name for name in rest if name not in known and not (method.by_layer and ":" in name))
    if unknown:
        raise GradlabError(
            f"fit {method.name}: no setting {', '.join(unknown)[:200]}; known: {', '.join(own)}; of codec "
            f"{options.codec_name}: {', '.join(known) or 'none'}"
        )
    return options, rest


def _print(made: Made, as_json: bool, paths: list[Path]) -> None:
    """Print the artifact's metadata as JSON; or tables, up to how many ranks the plan pays, notes and files."""
    from gradlab.plan import pays_up_to

    if as_json:
        print_json(made.artifact.provenance)
        return
    made.show()
    if limit := pays_up_to(made.artifact.plan):
        OUT.print(f"this plan {limit}", markup=False)
    for line in (*filter(None, made.notes), *map(str, paths)):
        OUT.print(line, markup=False)
