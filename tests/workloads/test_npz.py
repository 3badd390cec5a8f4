"""The reader of .npz data sets: sound files of every packing, and every kind of bad one in one line."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlab.datasets.npz import MAX_SAMPLES, Splits, read_npz
from gradlab.errors import GradlabError
from support.code_blocks import DOCS, blocks_of

IMAGE = (8, 6)


def _splits(image: tuple[int, ...] = IMAGE, per_pixel: bool = False) -> Splits:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (count, *image), dtype=np.uint8) for count in (6, 3)]
    labels = [rng.integers(0, 10, (count, *(image[:2] if per_pixel else ()))) for count in (6, 3)]
    return Splits(images[0], labels[0], images[1], labels[1])


def _npz(path: Path, splits: Splits, packing: int = zipfile.ZIP_STORED, **changes: object) -> str:
    """Write the arrays, with some of them changed or left out, beside one that is not asked for."""
    arrays = {**splits._asdict(), "class_names": np.array(["coat", "bag"]), **changes}
    with zipfile.ZipFile(path, "w", packing) as archive:
        for key, array in arrays.items():
            if array is not None:
                stream = io.BytesIO()
                np.save(stream, np.asarray(array))
                archive.writestr(f"{key}.npy", stream.getvalue())
    return str(path)


def _refused(path: str, image: tuple[int | None, ...] = IMAGE, per_pixel: bool = False) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(GradlabError) as caught:
        read_npz(path, image, 10, per_pixel=per_pixel)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(path)
    return str(caught.value)


def _same(first: Splits, second: Splits) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_arrays_of_every_packing_are_read_with_labels_of_any_integer_type(packing: int, tmp_path: Path) -> None:
    splits = _splits()
    path = _npz(tmp_path / "a.npz", splits, packing, y_test=splits.y_test.astype(np.uint8))
    assert _same(read_npz(path, IMAGE, 10), splits)


def test_the_file_may_determine_the_size_of_images(tmp_path: Path) -> None:
    splits = _splits((24, 32, 3), per_pixel=True)
    assert _same(read_npz(_npz(tmp_path / "a.npz", splits), (None, None, 3), 10, per_pixel=True), splits)
    for side in (8, 4096):
        path = _npz(tmp_path / "b.npz", splits, x_train=np.zeros((1, 24, side, 3), np.uint8))
        assert "expected uint8 of shape (samples, 16 to 2048, 16 to 2048, 3)" in _refused(path, (None, None, 3), True)
    other = np.zeros((3, 24, 24, 3), np.uint8)
    path = _npz(tmp_path / "c.npz", splits, x_test=other)
    assert "x_test is uint8 of shape (3, 24, 24, 3), expected uint8 of shape (samples, 24, 32, 3)" in _refused(
        path, (None, None, 3), True
    )
    path = _npz(tmp_path / "d.npz", splits, y_train=np.zeros(6, int))
    assert "y_train is int64 of shape (6,), expected integers of shape (samples, 24, 32)" in _refused(
        path, (None, None, 3), True
    )


BAD_ARRAYS: dict[str, tuple[str, object, str]] = {
    "no key": ("y_test", None, "no array y_test; expected an .npz with x_train, y_train, x_test, y_test, found class_"),
    "float images": ("x_train", np.zeros((6, *IMAGE)), "x_train is float64 of shape"),
    "colours": ("x_train", np.zeros((6, *IMAGE, 3), np.uint8), "expected uint8 of shape (samples, 8, 6)"),
    "scalar": ("x_test", np.uint8(3), "x_test is uint8 of shape ()"),
    "float labels": ("y_train", np.zeros(6), "y_train is float64"),
    "objects": ("y_train", np.array([{}] * 6), "y_train is object"),
    "pickled images": ("x_train", np.array([print] * 6), "x_train is object"),
    "label 10": ("y_train", np.full(6, 10), "y_train runs from 10 to 10, expected 0 to 9"),
    "label -1": ("y_test", np.full(3, -1), "y_test runs from -1 to -1"),
    "too few labels": ("y_train", np.zeros(5, int), "6 train images but 5 labels"),
    "no images": ("x_test", np.zeros((0, *IMAGE), np.uint8), "x_test holds 0 samples"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_a_bad_array_is_refused(case: str, tmp_path: Path) -> None:
    key, array, message = BAD_ARRAYS[case]
    assert message in _refused(_npz(tmp_path / "a.npz", _splits(), **{key: array}))


def _with_member(path: Path, member: bytes) -> str:
    """A file whose x_train is these bytes."""
    _npz(path, _splits(), x_train=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x_train.npy", member)
    return str(path)


def test_a_header_that_claims_too_much_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    for shape, image, message in (
        ((MAX_SAMPLES + 1, *IMAGE), IMAGE, f"x_train holds {MAX_SAMPLES + 1} samples, expected 1 to {MAX_SAMPLES}"),
        ((MAX_SAMPLES, 2000, 2000), (2000, 2000), "holds 800000000000 values, at most 1073741824"),
    ):
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        with pytest.raises(GradlabError, match=message):
            read_npz(_with_member(tmp_path / "a.npz", stream.getvalue()), image, 10)


@pytest.mark.parametrize("opened", ["(", "[", "{0:", "-"])
def test_a_header_of_any_nesting_is_one_line(opened: str, tmp_path: Path) -> None:
    for depth in (50, 1000, 9000):
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': " + opened.encode() * (depth // len(opened))
        member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"
        assert "not a whole .npz" in _refused(_with_member(tmp_path / f"{depth}.npz", member))


def test_a_member_that_goes_on_behind_its_values_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, _splits().x_train)
    path = _with_member(tmp_path / "a.npz", stream.getvalue() + b"x")
    assert "x_train goes on behind the values" in _refused(path)


@settings(max_examples=60, deadline=None)
@given(
    packing=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    cut=st.booleans(),
)
def test_damage_is_refused_or_means_nothing(
    packing: int, place: float, bit: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A flipped bit, as of a member's time, or a file that ends early."""
    path = tmp_path_factory.mktemp("damage") / "a.npz"
    _npz(path, _splits(), packing)
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    content[at] ^= 1 << bit
    path.write_bytes(content[:at] if cut else content)
    try:
        splits = read_npz(str(path), IMAGE, 10)
    except GradlabError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right, a traceback or other data are not
    else:
        assert not cut
        assert _same(splits, _splits())


def test_what_is_no_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    for name, message in (
        ("gone.npz", "no such file, expected an .npz with x_train, y_train, x_test, y_test"),
        ("notes.txt", "not a whole .npz (File is not a zip file), expected an .npz with"),
        ("empty.npz", "not a whole .npz"),
        (".", "not a regular file"),
        ("x" * 300, "cannot be read"),
    ):
        assert message in _refused(str(tmp_path / name))


def test_the_converter_of_the_docs_makes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published archive of CIFAR-10: six files of records, a label and three planes of 32 x 32 pixels each."""
    (block,) = [block for block in blocks_of(DOCS / "decide.md") if "cifar-10-binary.tar.gz" in block.text]
    monkeypatch.chdir(tmp_path)
    records = np.random.default_rng(0).integers(0, 10, (12, 3073), dtype=np.uint8)
    with tarfile.open("cifar-10-binary.tar.gz", "w:gz") as archive:
        for index, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
            content = records[2 * index : 2 * index + 2].tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    exec(block.text, {})
    read = read_npz("cifar10.npz", (32, 32, 3), 10)
    assert [len(array) for array in read] == [10, 10, 2, 2]
    assert read.y_train.tolist() == records[:10, 0].tolist()
    assert read.x_test[1, 5, 7].tolist() == [records[11, 1 + 1024 * plane + 32 * 5 + 7] for plane in range(3)]
