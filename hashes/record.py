"""Record the SHA-256 of every file that pip would install here for constraints.txt, for `make` to check.

    make hashes

writes hashes/<tag>.txt, such as cp311-linux-x86_64.txt: a requirements file for pip's hash-checking mode. torch is left
out, as one version has other files on every index: CPU builds, and builds for a version of CUDA.

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


def chosen() -> list[tuple[str, str, str]]:
    """Ask pip what it would install: names, versions and hashes."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    files = [str(ROOT / "constraints.txt")] * 2
    done = subprocess.run(
        [*pip, "--constraint", files[0], "--requirement", files[1]], stdout=subprocess.PIPE, check=True
    )
    rows = []
    for item in json.loads(done.stdout)["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        if name not in LEFT_OUT:
            rows.append((name, version, item["download_info"]["archive_info"]["hashes"]["sha256"]))
    return sorted(rows, key=lambda row: row[0].lower())


def main() -> None:
    """See the module's text."""
    if sys.argv[1:] == ["--tag"]:
        print(TAG)
        return
    lines = [f"{name}=={version} --hash=sha256:{digest}" for name, version, digest in chosen()]
    path = Path(__file__).with_name(f"{TAG}.txt")
    path.write_text(
        "# Written by `make hashes`. Of constraints.txt, for pip's hash-checking mode.\n" + "\n".join(lines) + "\n"
    )
    print(f"{path.relative_to(ROOT)}: {len(lines)} files")


if __name__ == "__main__":
    main()
