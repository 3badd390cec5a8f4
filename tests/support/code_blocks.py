"""The code blocks of the docs: found, with what a comment above them says, and shell blocks run as somebody types them.

A block that no test runs says so in a comment right above it, `<!-- not run: WHY -->`; one that takes long says
`<!-- thorough: WHY -->`. A block of `text` right after one of `sh` is what the commands print: its numbers may differ,
and `...` stands for anything. One whose words follow from times too says `<!-- one run: WHY -->`, and is not compared.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.command_line import Command
from support.warm_python import GRADLAB, python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NOTE = re.compile(r"<!-- (not run|thorough|given|one run): (.+) -->")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What a command line begins with, in a block that claims to be none.
COMMANDS = ("gradlab ", "make ", "torchrun ", "python ", "pip ", "import ", "from ", "plan = ")
# A number with its unit, whose size may be another one on another machine.
NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?(?: ?(?:us|ms|s|kB|MB|GB|B|%|x|bit/s|[kMG]bit/s)\b)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    page: its file; line: of the first line inside, from 1; language: what stands behind the fence, or ""; text: what is
    inside; note, why: what the comment above says, such as "not run" and the reason, or "" and "".
    """

    page: Path
    line: int
    language: str
    text: str
    note: str
    why: str

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        above = text[: match.start()].rstrip().rpartition("\n")[2]
        note = NOTE.fullmatch(above.strip())
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(page, line, match[1], match[2], *(note.groups() if note else ("", ""))))
    return found


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command of a shell block; a line that ends with a backslash goes on in the next one."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def run_command(words: list[str], folder: Path, gradlab: Command) -> str:
    """Run one command in a folder, and return what it printed on standard output."""
    program, *arguments = words
    if program == "gradlab":
        code, out, err = gradlab(*arguments)
        assert code == 0, f"{shlex.join(words)}: {err}"
        return out
    if program == "make":
        targets = set(re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert arguments[0] in {name for names in targets for name in names.split()}, shlex.join(words)
        return ""
    assert program in ("torchrun", "python"), f"{shlex.join(words)}: neither gradlab, make, torchrun nor python"
    warm = python(*GRADLAB, "sklearn.datasets")  # whose import takes each rank of an example a second
    command = [warm, *(("-m", "torch.distributed.run") if program == "torchrun" else ()), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
    return done.stdout


def is_printed(shown: str, printed: str) -> bool:
    """Whether each part of what a page shows, between "...", is in what was printed, in this order."""
    rest = _without_numbers(printed)
    for part in filter(None, map(_without_numbers, shown.split("..."))):
        _, found, rest = rest.partition(part)
        if not found:
            return False
    return True


def _without_numbers(text: str) -> str:
    """Text in which every number is #, on one line, without the rules of tables."""
    text = re.sub(r"[─━┄-]{3,}", " ", text)
    return " ".join(NUMBER.sub("#", text).split())
