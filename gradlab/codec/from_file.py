"""Load a codec of one's own from a Python file that its user names.

The file runs with the user's rights, as a training script does. Nothing but what is named on a command line is ever
loaded in this way: recordings, artifacts and corpora hold names and settings, never code.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path

from gradlab.codec.contract import Codec, register
from gradlab.errors import GradlabError


def codec_from_file(path: Path) -> type[Codec]:
    """Run a Python file, which may import its neighbours, and return the one codec class that it defines, registered.
    The line that failed is named."""
    if not path.is_file():
        raise GradlabError(f"{path}: no such file, expected Python code that defines a codec")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise GradlabError(f"{path}: is no Python file, expected one that defines a codec, such as my_codec.py")
    module = importlib.util.module_from_spec(spec)
    before, folder = sys.modules.get(path.stem), str(path.parent.resolve())
    if before is not None and getattr(before, "__file__", None) != module.__file__:
        raise GradlabError(f"{path}: there is a module {path.stem!r} already, which it would hide: rename the file")
    sys.modules[path.stem] = module  # dataclasses look their own module up
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise GradlabError(f"{path}: cannot be run ({told_at(error, path)})") from None
    finally:
        sys.path.remove(folder)
    return _registered(path, [kind for kind in vars(module).values() if _is_defined_in(kind, module.__name__)])


def _is_defined_in(kind: object, module: str) -> bool:
    return isinstance(kind, type) and issubclass(kind, Codec) and kind.__module__ == module and "name" in vars(kind)


def _registered(path: Path, defined: list[type[Codec]]) -> type[Codec]:
    """The one codec of a file, registered."""
    names = ", ".join(kind.__qualname__ for kind in defined) or "none"
    if len(defined) != 1:
        raise GradlabError(f"{path}: defines {len(defined)} codecs ({names}), expected one class with a name")
    [codec] = defined
    try:
        register(codec)
    except GradlabError as error:
        raise GradlabError(f"{path}: {error}") from None
    return codec


def told_at(error: BaseException, path: Path) -> str:
    """Return what went wrong in a user's file, and in which line: "line 3: NameError: name 'tourch' is not defined"."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    text = " ".join(str(error).split())
    return f"{'' if line is None else f'line {line}: '}{type(error).__name__}: {text}".rstrip(": ")
