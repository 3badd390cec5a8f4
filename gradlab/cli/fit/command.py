"""`gradlab fit`: one command for all methods; its options and help come from the method's dataclass of settings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from gradlab import codecs
from gradlab.analysis.figures.chart import write_chart
from gradlab.analysis.outputs import require_figure, require_free
from gradlab.cli.console import print_json, progress_bars
from gradlab.cli.fit.methods import METHODS, Job, Made, Method
from gradlab.cli.options import AsJson, Overwrite, Settings, SharedBy, TraceFolder, workers_of
from gradlab.codec.settings import Field, built, check_ranges, fields_of
from gradlab.errors import GradlabError
from gradlab.plan.traffic import remarks_on_ranks
from gradlab.setting_texts import parse_settings
from gradlab.trace import Trace

_OUT = Annotated[Path, typer.Option(metavar="ARTIFACT", help="The file to write (.safetensors).")]
_SHARED: dict[str, tuple[Any, Any]] = {  # annotation and default of the options that every method has
    "trace": (TraceFolder, inspect.Parameter.empty),
    "out": (_OUT, inspect.Parameter.empty),
    "settings": (Settings, None),
    "workers": (SharedBy, None),
    "overwrite": (Overwrite, False),
    "as_json": (AsJson, False),
}


class Fits(TyperGroup):
    """The methods. A method's own command is built when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(METHODS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command_of(cmd_name) if cmd_name in METHODS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, method.about) for name, method in METHODS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0].lower() if args else ""
        if name and name not in METHODS and name in codecs.names():
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

    method = METHODS[name]
    fields = {field.name: field for field in fields_of(method)}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    run = partial(_fit, method)
    parameters = {**_SHARED, **{shown: (_option_of(fields[shown]), None) for shown in method.with_option()}}
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
    of_codec = fields_of(codecs.get(method.listed).Settings) if method.listed else ()
    rest = [field for field in fields.values() if field.name not in method.with_option()]
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
    """A setting's unit, meaning and range."""
    words = " ".join(part for part in (field.about.unit, field.about.help) if part)
    allowed = field.values.removesuffix(", or None")
    ranged = field.about.bounded or field.about.choices
    return f"{words.rstrip('.')}." + (f" Allowed: {allowed}." if ranged else "")


def _fit(method: type[Method], /, **given: Any) -> None:
    """Make an artifact, and print what its method measured."""
    out, overwrite = given["out"], given["overwrite"]
    require_free(out, overwrite)
    chosen = {name: given[name] for name in method.with_option() if given[name] is not None}
    options, rest = _split(method, chosen | parse_settings(given["settings"] or []))
    figure = getattr(options, "figure", None) and Path(options.figure)  # type: ignore[attr-defined]
    if figure:
        require_figure(figure, overwrite)
        if figure == out:
            raise GradlabError(f"{out}: given for the artifact and for the figure, expected two names")
    workers = workers_of(given["workers"])
    with Trace(given["trace"], average_ranks=options.average_ranks) as opened, progress_bars() as progress:
        made = options.make(Job(opened, out, rest, workers, progress))
    made.artifact.save(out, overwrite)
    if figure and made.chart:
        write_chart(made.chart, figure)
    if given["as_json"]:
        print_json(made.artifact.provenance)
    else:
        _print(made, [out, figure] if figure else [out])


def _split(method: type[Method], values: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """Take a method's own settings; the others are its codec's."""
    own = [field.name for field in fields_of(method)]
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    options = built(method, f"fit {method.name}", {name: value for name, value in values.items() if name in own})
    check_ranges(options, f"fit {method.name}")
    rest = {name: value for name, value in values.items() if name not in own}
    known = [field.name for field in fields_of(codecs.get(options.codec_name).Settings)]
    unknown = sorted(name for name in rest if name not in known and not (method.by_layer and ":" in name))
    if unknown:
        raise GradlabError(
            f"fit {method.name}: no setting {', '.join(unknown)[:200]}; known: {', '.join(own)}; of codec "
            f"{options.codec_name}: {', '.join(known) or 'none'}"
        )
    return options, rest


def _print(made: Made, paths: list[Path]) -> None:
    """Print the answer, with the number of ranks up to which the plan pays, and the files."""
    remarks = remarks_on_ranks(made.artifact.plan)
    dataclasses.replace(made.answer, notes=[*made.answer.notes, *remarks, *map(str, paths)]).print()
