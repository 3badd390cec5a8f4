"""Check where results go before the work, not after it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gradlab.errors import GradlabError

# What makes a folder a report.
REPORT_FILES = ("report.html", "report.json", "figures")
FIGURES = (".svg", ".pdf")


def require_free(
    target: str | os.PathLike[str], overwrite: bool = False, *, contents: Sequence[str] | None = None
) -> Path:
    """Check that a target, a file or a folder to hold `contents`, can be written before the work begins."""
    path = Path(target)
    if contents is not None and path.exists() and not path.is_dir():
        raise GradlabError(f"{path} is a file; a report is a folder: choose another name")
    if contents is None and path.exists() and not path.is_file():
        raise GradlabError(f"{path} is no regular file: choose another name")
    if contents is None and path.parent.exists() and not path.parent.is_dir():
        raise GradlabError(f"{path}: {path.parent} is no folder: choose another name")
    files = [path] if contents is None else [path / name for name in contents]
    there = [file for file in files if os.path.lexists(file)]
    if there and not overwrite:
        raise GradlabError(f"{there[0]} exists already: choose another name or ask to overwrite it (--overwrite)")
    return path


def require_figure(out: Path, overwrite: bool) -> None:
    """Refuse a name that no figure can have, or that is taken."""
    if out.suffix not in FIGURES:
        raise GradlabError(f"{out}: a figure is written as {' or '.join(FIGURES)}")
    require_free(out, overwrite)
