"""Every figure of the docs' measured tables is in the rows that its page names; the check notices one that is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Tables of which no rows were kept. It may only fall.
WITHOUT_ROWS = 0


def check(*pages: Path) -> tuple[int, list[str]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "figures_check.py"), *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.thorough
def test_every_figure_of_the_docs_is_in_the_rows_and_one_that_is_not_is_told(tmp_path: Path) -> None:
    """In one run, as most of its time goes into imports."""
    page = tmp_path / "page.md"
    rows = "benchmarks/results/lockstep-ranks.jsonl"
    command = f"<!-- printed by: benchmarks/speed/lockstep_ranks.py --rows {rows} --table -->"
    page.write_text(
        f"{command}\n\n| codec | ms |\n|---|---|\n| topk | 9.1, 9.0 |\n| clt_k | 4.4, -3.5 |\n\n"
        f"{command}\n\n```\n{'1.5 ' * 12}\n```\n\n"
        "<!-- no rows: lost -->\n| a | 5.5 |\n|---|---|\n\ntext\n\n| b | 1 |\n|---|---|\n| c | 2 |\n"
    )
    code, lines = check(*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", page)
    assert code == 1
    told = [line for line in lines if " found, 0 missing" not in line or line.startswith("page.md")]
    assert told[:-1] == [
        "page.md:3: 2 found, 2 missing",
        "    4.4",
        "    -3.5",
        "page.md:10: 0 found, 1 missing",
        "    " + "1.5 " * 12,
        "page.md:15: no rows: lost",
        "page.md:20: no comment says what prints it",
    ]
    found, missing, without = (int(words.split()[0]) for words in told[-1].split(", "))
    assert (found > 1000, missing, without - 1) == (True, 4, WITHOUT_ROWS)
