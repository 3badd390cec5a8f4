"""Run a benchmark by its name: python benchmarks NAME [OPTIONS]. Without a name, list them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Folders whose modules import each other by name.
FOLDERS = (HERE, *(HERE / name for name in ("papers", "speed", "training", "links")))


def main() -> None:
    scripts = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("[!_]*.py"))}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in scripts:
        raise SystemExit(f"python benchmarks NAME [OPTIONS]: no benchmark {name!r}, there are {', '.join(scripts)}")
    sys.path[:1] = map(str, FOLDERS)
    processes = filter(None, [*map(str, FOLDERS), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(processes)
    sys.argv[:2] = [str(scripts[name])]
    sys.exit(importlib.import_module(name).main())


if __name__ == "__main__":
    main()
