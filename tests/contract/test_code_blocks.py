"""Every code block of the README and the docs runs: Python on four ranks, commands in a folder with a recording."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gradlab.analysis.forecast.calibration import read_observations
from jobs.code_block_tasks import GIVEN
from support.code_blocks import COMMANDS, DOCS, PAGES, ROOT, Block, blocks_of, commands_of, is_printed, run_command
from support.command_line import Command
from support.process_pool import ProcessPool

# Blocks that no test runs, and those of output that no test compares. They may only fall.
NOT_RUN, NOT_COMPARED = 6, 4
# Its blocks are files that belong together: tests/contract/test_docs.py runs them.
TUTORIAL = DOCS / "add-a-codec.md"
BLOCKS = {page: blocks_of(page) for page in PAGES if page != TUTORIAL}
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
# The examples of the frameworks, which take long to import; tests/runtime/test_integrations.py runs these files too.
FRAMEWORKS = {DOCS / "train" / f"{name}.md" for name in ("trainer", "lightning", "accelerate", "torchtitan")}
Scratch = Callable[[Path], Path]


def pages_with(language: str) -> list[Path]:
    return [page for page, blocks in BLOCKS.items() if any(block.language == language for block in blocks)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_blocks_that_are_not_run_say_so_and_are_counted() -> None:
    blocks = [block for of_page in BLOCKS.values() for block in of_page]
    skipped = [block.place for block in blocks if block.note == "not run" and not block.why.startswith("tests/")]
    assert len(skipped) == NOT_RUN, skipped
    assert sum(block.note == "one run" for block in blocks) == NOT_COMPARED
    assert {block.why for block in blocks if block.note == "given"} <= set(GIVEN)
    comments = [re.findall(r"<!-- (?:not run|thorough|given|one run): ", page.read_text()) for page in BLOCKS]
    assert sum(map(len, comments)) == sum(bool(block.note) for block in blocks), "a comment that is above no block"


def test_code_is_in_blocks_that_say_its_language() -> None:
    for page, blocks in BLOCKS.items():
        for block in blocks:
            assert block.language in ("", "text", "sh", "python", "json"), block.place
            if block.language in ("", "text") and block.note != "one run":  # which may print lines to paste
                assert not [line for line in block.text.splitlines() if line.startswith(COMMANDS)], block.place
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        assert not [line for line in re.findall(r"^    (.+)$", text, re.M) if line.startswith(COMMANDS)], page


@pytest.mark.parametrize("page", pages_with("python"), ids=name)
def test_python_blocks_run(page: Path, pool: ProcessPool, tmp_path: Path) -> None:
    """On all ranks at once, in order, each with a model of its own."""
    blocks = [block for block in BLOCKS[page] if block.language == "python" and block.note != "not run"]
    if blocks:
        texts = [(block.line, block.why if block.note == "given" else "", block.text) for block in blocks]
        run = "jobs.code_block_tasks:run_blocks"
        assert set(pool.run(run, 4, page=name(page), blocks=texts, folder=str(tmp_path))) == {len(blocks)}


# Options whose argument a command makes.
MAKES = ("--out", "--record", "--capture")


@pytest.fixture(scope="module")
def recording(pool: ProcessPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two ranks, for all pages that do not record one themselves."""
    path = tmp_path_factory.mktemp("recording") / "trace"
    pool.run("jobs.code_block_tasks:recorded", 2, folder=str(path))
    return path


@pytest.fixture
def scratch(recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """A folder with the examples, and the trace if no command of the page makes one."""

    def fill(page: Path) -> Path:
        for example in EXAMPLES:
            shutil.copy(example, tmp_path)
        commands = [words for block in BLOCKS[page] if block.language == "sh" for words in commands_of(block)]
        own = [words[: words.index("--")] if "--" in words else words for words in commands]  # not of a command in them
        made = [words[words.index(way) + 1] for words in own for way in MAKES if way in words]
        if recording.name not in made:
            (tmp_path / recording.name).symlink_to(recording)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return fill


# Before a release: test_docs.py looks their options up in every run.
@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page in pages_with("sh") if page not in FRAMEWORKS], ids=name)
def test_commands_run_and_print_what_the_page_shows(page: Path, scratch: Scratch, gradlab: Command) -> None:
    run_page(page, scratch(page), gradlab, skip=("not run", "thorough"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "page", [page for page in pages_with("sh") if any(one.note == "thorough" for one in BLOCKS[page])], ids=name
)
def test_commands_that_take_long_run_too(page: Path, scratch: Scratch, gradlab: Command) -> None:
    run_page(page, scratch(page), gradlab, skip=("not run",))


@pytest.mark.thorough
@pytest.mark.parametrize("page", sorted(FRAMEWORKS), ids=name)
def test_the_frameworks_examples_print_what_the_page_shows(page: Path, scratch: Scratch, gradlab: Command) -> None:
    pytest.importorskip({"trainer": "transformers"}.get(page.stem, page.stem))
    run_page(page, scratch(page), gradlab, skip=("not run",))


def run_page(page: Path, folder: Path, gradlab: Command, skip: tuple[str, ...]) -> None:
    """Run the shell blocks of a page in order, and hold what they print against the text below them."""
    following = [*BLOCKS[page][1:], None]
    for block, after in zip(BLOCKS[page], following, strict=True):
        if block.language == "sh" and block.note not in skip:
            printed = "\n".join(run_on_its_recording(words, folder, gradlab) for words in commands_of(block))
            if after is not None and after.language == "text" and after.note != "one run":
                assert is_printed(after.text, printed), f"{block.place} prints\n{printed}"


def run_on_its_recording(words: list[str], folder: Path, gradlab: Command) -> str:
    """Run a command; one that runs another, on the recording that this one makes: the page's is of another model."""
    if "--" not in words:
        return run_command(words, folder, gradlab)
    inner = words[words.index("--") + 1 :]
    trace = folder / inner[inner.index("--record") + 1]
    others = trace.readlink()
    trace.unlink()
    run_command(inner, folder, gradlab)
    printed = run_command(words, folder, gradlab)
    shutil.rmtree(trace)
    trace.symlink_to(others)
    return printed


def test_what_is_shown_is_held_against_what_is_printed() -> None:
    printed = "loss 0.123, 4.5 ms a step\n\n  a  │ 12 kB\n─────\nend"
    assert is_printed("loss 9.876, 1.2 s a step\n...\nend", printed)
    assert is_printed("a │ 3 MB end", printed)
    assert not is_printed("loss 0.123, 4.5 ms per step", printed)
    assert not is_printed("end\n...\nloss 1", printed)


def test_files_of_measurements_are_read(tmp_path: Path) -> None:
    for block in (block for page in pages_with("json") for block in BLOCKS[page]):
        if block.language == "json":
            (tmp_path / "times.json").write_text(block.text)
            assert len(read_observations(tmp_path / "times.json")) > 1


def test_every_example_is_shown_by_a_page() -> None:
    shown = "".join(page.read_text() for page in BLOCKS)
    assert not [example.name for example in EXAMPLES if f"(../examples/{example.name})" not in shown]


def test_a_command_that_fails_is_told(tmp_path: Path, gradlab: Command) -> None:
    commands = ("gradlab trace info nothing", "make nothing", "ls")
    for words in map(str.split, commands):
        with pytest.raises(AssertionError, match=re.escape(words[-1])):
            run_command(words, tmp_path, gradlab)


def test_blocks_are_found_with_their_notes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n<!-- not run: needs a GPU -->\n\n```sh\nmake gpu\n```\n\n```python file=x.py\nx = 1\n```\n")
    first, second = blocks_of(page)
    assert first == Block(page, 6, "sh", "make gpu\n", "not run", "needs a GPU")
    assert second == Block(page, 10, "python", "x = 1\n", "", "")
