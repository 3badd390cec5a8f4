"""The command `gradlab`, whose commands' helps are the docstrings of their modules.

Bad input is one line on standard error and exit code 2, never a traceback; so is a warning, with whatever exit code the
command has.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from gradlab.cli import streams
from gradlab.cli.console import warnings_as_lines
from gradlab.errors import GradlabError
from gradlab.printable import printable
from gradlab.version import VERSION

COMMANDS = {  # module and short help, in the order of the list
    "demo": ("demo", "The whole loop on bundled data, in two minutes"),
    "train": ("train", "Train a workload: plain, recorded or compressed"),
    "analyze": ("analyze", "Write a report on a recording: will it pay?"),
    "compare": ("compare", "Set two reports side by side"),
    "doctor": ("doctor", "Measure what connects your ranks, without a model"),
    "timeline": ("timeline", "Read a trace of torch.profiler: computing, waiting"),
    "recommend": ("recommend", "Choose one plan for your network, or none"),
    "pilot": ("pilot", "Try plans on your own training command"),
    "evaluate": ("evaluate", "Replay methods on recorded gradients"),
    "predict": ("predict", "Forecast the step times of an artifact's plan"),
    "watch": ("watch", "Show a run while it trains or records"),
    "inspect": ("inspect", "Show what an artifact does, or spans of a step"),
    "methods": ("methods", "List codecs, wrappers and published methods"),
    "trace": ("trace", "Look at, check and repair a recording"),
    "fit": ("fit.command", "Make an artifact from a recording"),
}


class Commands(TyperGroup):
    """The commands. Each one's module, whose imports are slow, is imported when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gradlab.cli.{COMMANDS[cmd_name][0]}")
        if not gc.get_freeze_count():
            gc.freeze()  # imports stay: collecting garbage would go through all of them each time
        if hasattr(module, "app"):
            return get_command(module.app)
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        single.command(cmd_name, help=module.__doc__)(getattr(module, cmd_name))
        return get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])


app = typer.Typer(
    name="gradlab",
    cls=Commands,
    help="Measure the gradients of a PyTorch DDP run, fit compressors on them, train compressed, compare.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


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
