"""Record the SHA-256 of every file that pip would install here for constraints.txt, for `make` to check.

    python hashes/record.py

writes hashes/<tag>.txt, such as cp311-linux-x86_64.txt: a requirements file for pip's hash-checking mode. torch is left
out, as one version has other files on every index: CPU builds, and builds for a version of CUDA. It also writes
hashes/loggers-<tag>.txt, of constraints-loggers.txt, for `make loggers`.

    python hashes/record.py --tag

prints the tag alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}-{sysconfig.get_platform()}"
LEFT_OUT = ("torch",)


def chosen(*options: str) -> list[tuple[str, str, str]]:
    """Ask pip what it would install: names, versions and hashes. options: of pip, with the file that names them."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run([*pip, *options], stdout=subprocess.PIPE, check=True)
    rows = []
    for item in json.loads(done.stdout)["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        if name not in LEFT_OUT:
            rows.append((name, version, item["download_info"]["archive_info"]["hashes"]["sha256"]))
    return sorted(rows, key=lambda row: row[0].lower())


def write(path: Path, source: Path, rows: list[tuple[str, str, str]]) -> None:
    """Write the hashes of what a file of versions names."""
    lines = [f"{name}=={version} --hash=sha256:{digest}" for name, version, digest in rows]
    path.write_text(
        f"# Written by hashes/record.py. Of {source.name}, for pip's hash-checking mode.\n" + "\n".join(lines) + "\n",
        encoding="utf-8",
    )
    print(f"{path.relative_to(ROOT)}: {len(lines)} files")


def main() -> None:
    """See the module's text."""
    if sys.argv[1:] == ["--tag"]:
        print(TAG)
        return
    here, all_of, loggers = Path(__file__).parent, ROOT / "constraints.txt", ROOT / "constraints-loggers.txt"
    write(here / f"{TAG}.txt", all_of, chosen("--constraint", str(all_of), "--requirement", str(all_of)))
    write(here / f"loggers-{TAG}.txt", loggers, chosen("--no-deps", "--requirement", str(loggers)))


if __name__ == "__main__":
    main()
