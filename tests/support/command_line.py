"""What the fixture `gradlab` gives: a command, run as a user types it."""

from collections.abc import Callable

# Words of the command -> exit code, standard output, standard error.
Command = Callable[..., tuple[int, str, str]]
