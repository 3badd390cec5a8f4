"""A file is written whole or not at all."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradlab.files import write_all, write_whole
from support.small_disk import fill, small_disk


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


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_several_files_appear_together_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for old in (b"1", b"longer"):
        write_all(folder, {"x": old, "sub/y": old})
        assert contents(tmp_path) == {"a/b/x": old, "a/b/sub/y": old}
    (folder / "mine").write_bytes(b"kept")
    write_all(folder, {"x": b"2"})
    assert contents(folder) == {"x": b"2", "sub/y": b"longer", "mine": b"kept"}


@pytest.mark.parametrize("left", [0, 4096, 20 * 4096, 60 * 4096])
def test_a_full_disk_leaves_all_files_as_they_were(tmp_path: Path, left: int) -> None:
    new = {f"part {number}": bytes([number]) * 20_000 for number in range(20)}
    with small_disk(tmp_path, 2**20) as disk:
        write_all(disk / "there", {"part 0": b"old", "sub/z": b"old"})
        fill(disk, left)
        before = contents(disk)
        for folder in ("there", "not yet"):
            with pytest.raises(OSError, match="No space left on device"):
                write_all(disk / folder, new)
            assert contents(disk) == before
            assert not (disk / "not yet").exists()
        (disk / "filling").unlink()
        write_all(disk / "there", new)
        assert contents(disk) == {**{f"there/{name}": data for name, data in new.items()}, "there/sub/z": b"old"}


def test_a_folder_in_the_place_of_a_file_leaves_all_files_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "r" / "b").mkdir(parents=True)
    (tmp_path / "r" / "a").write_bytes(b"old")
    with pytest.raises(IsADirectoryError):
        write_all(tmp_path / "r", {"a": b"new", "b": b"new"})
    assert contents(tmp_path / "r") == {"a": b"old"}
