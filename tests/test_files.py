"""A file is written whole or not at all."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradlab.files import write_whole


def test_a_file_is_written_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    for content in (b"first, and longer", memoryview(b"second")):
        write_whole(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == bytes(content)
        assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_file_has_the_mode_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_whole(tmp_path / "whole", b"")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("kept")
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", b"x")
    with pytest.raises(TypeError):
        write_whole(tmp_path / "a", "text")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "a", b"x")
    assert [file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*")] == ["folder", "folder/kept"]


def test_writers_at_once_leave_the_whole_file_of_one(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: write_whole(tmp_path / "a", content), contents))
    assert (tmp_path / "a").read_bytes() in contents
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
