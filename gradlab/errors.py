"""Errors that a user can act on: commands print them as one line and exit with code 2."""

from gradlab.printable import printable


class GradlabError(ValueError):
    """Bad input. The message names the thing, what came, what was expected, and what to do. It can be printed.

    >>> from gradlab import GradlabError
    >>> try:
    ...     codecs.make("topk", density=2.0)
    ... except GradlabError as error:
    ...     print(error)
    topk: setting density = 2.0, expected a share of elements in (0, 1]
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class BadMessage(GradlabError):
    """A rank sent a message that its codec could not have sent. The message names the rank."""


class NewerFormat(GradlabError):
    """A file that a newer gradlab wrote: sound, but this version must not read, repair or replace it."""
