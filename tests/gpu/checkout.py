"""Make the checkout importable as it is installed: `gradlab`, `gradlab.capture`, ..., by links and without installing.

pyproject.toml says which folder is which package. The links lie in build/gpu, so that `capture` or `datasets` at the
root, or another gradlab that the interpreter has, are not what is imported. `python tests/gpu/checkout.py SCRIPT
[ARGUMENTS]` runs a script of the checkout with it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "gpu" / "site"
# What the checks share with the suite and with the benchmark `codec_speed`.
BESIDE = (Path(__file__).parent, ROOT / "tests", ROOT / "benchmarks", ROOT / "benchmarks" / "speed")


def package_folders(text: str) -> dict[str, str]:
    """The package-dir table of a pyproject.toml: folders by package. Python 3.10 has no reader of TOML."""
    table = text.partition("[tool.setuptools.package-dir]\n")[2].partition("\n[")[0]
    pairs = (line.partition("=") for line in table.splitlines() if "=" in line)
    return {package.strip().strip('"'): folder.strip().strip('"') for package, _, folder in pairs}


def links(folders: dict[str, str]) -> dict[Path, Path]:
    """Where each link goes, relative to the site: the top package's own files, and the folders inside it."""
    top = min(folders, key=len)
    files = {Path(top) / entry.name: entry for entry in (ROOT / folders[top]).iterdir() if entry.name != "__pycache__"}
    return files | {Path(*name.split(".")): ROOT / folder for name, folder in folders.items() if name != top}


def make_importable() -> None:
    """Make the links, and put them first on this process's path and on that of those it starts."""
    wanted = links(package_folders((ROOT / "pyproject.toml").read_text()))
    for place, target in wanted.items():
        _link(SITE / place, target)
    for old in SITE.glob("*/*"):
        if old.relative_to(SITE) not in wanted and old.is_symlink():
            old.unlink(missing_ok=True)
    first = [str(SITE), *map(str, BESIDE)]
    sys.path[:0] = first
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])


def _link(place: Path, target: Path) -> None:
    """Whole or not at all: another run may be using the same folder."""
    if place.is_symlink() and os.readlink(place) == str(target):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(f".{place.name}.{os.getpid()}")
    new.symlink_to(target)
    new.replace(place)


if __name__ == "__main__":
    make_importable()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
