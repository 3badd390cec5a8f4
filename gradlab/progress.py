"""How long-running work reports its progress."""

from collections.abc import Callable

# Called often with (what, done, total); the caller that passes one draws it.
Progress = Callable[[str, int, int], None]
