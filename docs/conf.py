"""Sphinx's settings for `make docs`. The sources are the repository's own Markdown pages, so links work there too."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "sphinx"))

from docstrings import as_google
from methods_page import filled as with_methods
from public_names import filled
from sphinx.domains.python import PyObject

from gradlab import __version__

if typing.TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "gradlab"
author = "the gradlab developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# The source folder is the repository's root: pages may point to README.md, SECURITY.md and benchmarks.
root_doc = "docs/contents"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "runs", "tests", "gradlab", "analysis", "capture", "runtime", "datasets"]
templates_path = ["sphinx/templates"]

# Anchors as GitHub makes them, so that a link to a heading works in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
# Quotation marks stay as they are typed: many stand around values of settings.
smartquotes = False

default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"gradlab {release}"
html_static_path = ["sphinx/static"]
html_css_files = ["site.css"]
# The site opens with the front page, wherever its root is opened.
html_additional_pages = {"index": "open.html"}
# What `make docs` has made of a recording, beside the pages: play/report.html.
html_extra_path = ["../build/play"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"source_repository": "", "navigation_with_keys": True}
# Commands and rows are no Python; code without a language is not coloured.
highlight_language = "none"


def prepare_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Fill in the reference's entries and the methods, and take links to folders out, before a page is read."""
    source[0] = without_folders(with_methods(filled(source[0])), Path(app.srcdir, page).parent)


def without_folders(text: str, folder: Path) -> str:
    """Replace links to folders by their texts: a site has no lists of files.

    Args:
        text: Markdown.
        folder: that the page lies in.
    """

    def shown(found: re.Match[str]) -> str:
        return found[1] if (folder / found[2]).is_dir() else found[0]

    return re.sub(r"\[([^\[\]]+)\]\(([\w./-]+)\)", shown, text)


def read_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Turn a docstring into what napoleon, which comes after it, reads."""
    lines[:] = as_google(lines, fields_of(thing), "Attributes" if inspect.isclass(thing) else "Args")


def read_signature(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Write a dataclass's made defaults as `...`, so that the signature is Python."""
    return (signature or "").replace("<factory>", "...") or None, returns


def fields_of(thing: object) -> set[str]:
    """Names that a docstring may explain: fields and attributes of a class, parameters of a function."""
    if inspect.isclass(thing):
        own = {name for kind in thing.__mro__ for name in (*vars(kind), *inspect.get_annotations(kind))}
        fields = {item.name for item in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
        return own | fields | parameters(thing.__init__)
    return parameters(thing)


def parameters(function: object) -> set[str]:
    """Names of a function's parameters; none of what is no function."""
    callable_here = inspect.isfunction(function) or inspect.ismethod(function)
    return set(inspect.signature(function).parameters) if callable_here else set()


def setup(app: Sphinx) -> None:
    """Read pages and docstrings as they are written here: Sphinx calls this once."""
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    app.connect("autodoc-process-signature", read_signature)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
