"""The command `gradlab`, whose commands' helps are the docstrings of their modules.

Bad input is one line on standard error and exit code 2, never a traceback; so is a warning, with whatever exit code the
command has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from gradlab.cli import analyze, compare, demo, evaluate, inspect, methods, predict, recommend, streams, trace
from gradlab.cli.console import warnings_as_lines
from gradlab.cli.fit import command as fit
from gradlab.cli.pilot import command as pilot
from gradlab.cli.train import command as train
from gradlab.cli.watch import command as watch
from gradlab.errors import GradlabError
from gradlab.printable import printable
from gradlab.version import VERSION

app = typer.Typer(
    name="gradlab",
    help="Measure the gradients of a PyTorch DDP run, fit compressors on them, train compressed, compare.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (demo.demo, "The whole loop on bundled data, in two minutes"),
    (train.train, "Train a workload: plain, recorded or compressed"),
    (analyze.analyze, "Write a report on a recording: will it pay?"),
    (compare.compare, "Set two reports side by side"),
    (recommend.recommend, "Choose one plan for your network, or none"),
    (pilot.pilot, "Try plans on your own training command"),
    (evaluate.evaluate, "Replay methods on recorded gradients"),
    (predict.predict, "Forecast the step times of an artifact's plan"),
    (watch.watch, "Show a run while it trains or records"),
    (inspect.inspect, "Show what an artifact does, or spans of a step"),
    (methods.methods, "List codecs, wrappers and published methods"),
)
for _command, _about in _COMMANDS:
    app.command(_command.__name__, short_help=_about, help=sys.modules[_command.__module__].__doc__)(_command)
app.add_typer(trace.app, name="trace", short_help="Look at, check and repair a recording")
app.add_typer(fit.app, name="fit", short_help="Make an artifact from a recording")


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
        streams.settle()
        try:
            with warnings_as_lines():
                app()
        finally:
            streams.flush()
    except BrokenPipeError:
        _end_of_pipe()
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
        if streams.is_of_broken_pipe(end):  # Typer's and rich's answer is exit code 1
            _end_of_pipe()
        raise


def _end_of_pipe() -> None:
    """End as the signal would: whoever read the output has what was wanted of it."""
    streams.silence()
    sys.exit(streams.BROKEN_PIPE)


if __name__ == "__main__":
    main()
