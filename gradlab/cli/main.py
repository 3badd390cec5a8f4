"""The command `gradlab`. Bad input is one line on standard error and exit code 2, never a traceback; so is a warning,
with whatever exit code the command has."""

from __future__ import annotations

import sys

import typer

from gradlab.cli import analyze, demo, evaluate, inspect, methods, predict, recommend, timeline, trace
from gradlab.cli.console import warnings_as_lines
from gradlab.cli.fit import command as fit
from gradlab.cli.train import command as train
from gradlab.errors import GradlabError
from gradlab.printable import printable
from gradlab.version import VERSION

app = typer.Typer(
    name="gradlab",
    help="Measure the gradients of a PyTorch DDP run, fit compressors on them, train compressed, compare.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.add_typer(trace.app, name="trace")
app.command("analyze")(analyze.analyze)
app.add_typer(fit.app, name="fit")
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("recommend")(recommend.recommend)
app.command("timeline")(timeline.timeline)
app.command("inspect")(inspect.inspect)
app.command("methods")(methods.methods)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"gradlab {VERSION}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    try:
        with warnings_as_lines():
            app()
    except GradlabError as error:
        print(f"gradlab: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        # A path that cannot be used, in the system's own words.
        said = f"gradlab: {error.filename or 'input or output'}: {error.strerror or error}"
        print(printable(said), file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # Typer's answer to Ctrl-C, without a word
            print("gradlab: interrupted", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
