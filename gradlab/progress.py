"""How long work tells how far it is."""

from collections.abc import Callable

# (what, done, total), called often; whoever passes one draws it.
Progress = Callable[[str, int, int], None]
