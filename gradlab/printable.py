"""Any text as something that can be shown: names come from files and models, and may hold whatever there is."""

from __future__ import annotations

import re

# What drives a terminal, breaks a line or a document, changes the direction of what follows, or cannot be seen or
# encoded: controls but tab and newline, separators of lines, marks of direction and of no width, tags, surrogates.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_HALF = re.compile("[\ud800-\udfff]")  # of a UTF-16 pair
_LONGEST = 400  # characters without a space


def can_be_written(text: str) -> bool:
    """Return whether a text has no half of a UTF-16 pair, which no file can hold."""
    return _HALF.search(text) is None


def visible(text: str) -> str:
    r"""Write characters that would drive a terminal or break a document as escapes.

    >>> visible("a\x1b[31mb\u202ec")
    'a\\x1b[31mb\\u202ec'
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def printable(text: str, one_line: bool = False, longest: int = _LONGEST) -> str:
    """Do as `visible`, and show half of `longest` characters where more come without a space.

    >>> printable("layer " + "x" * 10_000)[-30:]
    'xxxxxxxxxx... 10000 characters'
    """

    def cut(found: re.Match[str]) -> str:
        return f"{found[0][: longest // 2]}... {len(found[0])} characters"

    shown = re.sub(rf"\S{{{longest + 1},}}", cut, visible(text))
    return shown.replace("\n", "\\n").replace("\t", "\\t") if one_line else shown
