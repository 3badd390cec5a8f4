"""The cifar10 workload: residual network, augmentation, files of every form (sound and hostile), the cache."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import pickletools
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlab import datasets
from gradlab.datasets import cifar_files
from gradlab.datasets.array_cache import cached
from gradlab.datasets.cifar10 import CHANNEL_DEVIATION, CHANNEL_MEAN, random_crop, random_flip
from gradlab.datasets.cifar_archive import BATCHES
from gradlab.datasets.cifar_files import IMAGE, read_splits
from gradlab.datasets.cifar_pickle import read_batch
from gradlab.datasets.published import CIFAR10, cifar10_files, fashion_mnist_files, others
from gradlab.datasets.resnet import BasicBlock
from gradlab.datasets.splits import MAX_IMAGES, Splits
from gradlab.errors import GradlabError

# --- model and augmentation --------------------------------------------------------------------------------------


def test_a_new_convolution_has_the_variance_of_he_initialisation() -> None:
    weight = datasets.get("cifar10").model(0).state_dict()["stages.2.0.conv1.weight"]  # 32 -> 64: fan out counts
    assert weight.var().item() == pytest.approx(2 / (64 * 9), rel=0.05)


def test_a_block_without_its_branch_is_the_parameter_free_shortcut() -> None:
    block = BasicBlock(4, 8, stride=2).eval()
    torch.nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = block(x)
    assert torch.equal(y[:, :4], x[:, :, ::2, ::2].relu())
    assert torch.equal(y[:, 4:], torch.zeros(2, 4, 3, 3))


def _image_batch(size: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(size, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) + 0.1


def test_a_random_crop_is_a_window_of_the_padded_image_and_reaches_every_offset() -> None:
    x = _image_batch(300)
    y = random_crop(x, 1, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(x, (1,) * 4)
    seen = set()
    for image, crop in zip(padded, y, strict=True):
        windows = {(i, j): image[:, i : i + 32, j : j + 32] for i in range(3) for j in range(3)}
        matches = [place for place, window in windows.items() if torch.equal(window, crop)]
        assert len(matches) == 1
        seen.update(matches)
    assert len(seen) == 9


def test_a_random_flip_mirrors_about_half_of_the_images() -> None:
    x = _image_batch(400)
    y = random_flip(x, torch.Generator().manual_seed(1))
    mirrored = [torch.equal(b, a.flip(2)) for a, b in zip(x, y, strict=True)]
    assert all(flag or torch.equal(b, a) for flag, a, b in zip(mirrored, x, y, strict=True))
    assert 140 < sum(mirrored) < 260


# --- files of every published form -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "gradlab"


def _splits(seed: int = 0) -> Splits:
    """20 training images (4 in each of 5 batches) and 4 test images."""
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (size, 32, 32, 3), dtype=np.uint8) for size in (20, 4)]
    labels = [rng.integers(0, 10, size) for size in (20, 4)]
    return Splits(images[0], labels[0], images[1], labels[1])


def _batches_of(splits: Splits) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The six batches: name, pixels in colour planes (4, 3072), labels (4,)."""
    images, labels = np.concatenate([splits.x_train, splits.x_test]), np.concatenate([splits.y_train, splits.y_test])
    for index, name in enumerate(BATCHES):
        part = slice(4 * index, 4 * index + 4)
        yield name, images[part].transpose(0, 3, 1, 2).reshape(4, 3072), labels[part]


def _text(value: str) -> bytes:
    return b"U" + bytes([len(value)]) + value.encode()


def _python2_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """What Python 2's cPickle wrote for a batch, opcode by opcode (protocol 2)."""
    half = len(labels) // 2
    numbers = [b"".join(b"K" + bytes([int(label)]) for label in part) for part in (labels[:half], labels[half:])]
    names = b"".join(_text(f"image_{index}.png") for index in range(len(labels)))
    raw = pixels.tobytes()
    dtype = b"cnumpy\ndtype\nq\x0a" + _text("u1") + b"K\x00K\x01\x87Rq\x0b(K\x03" + _text("|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85" + _text("b") + b"\x87R"
    array += b"(K\x01M" + struct.pack("<H", len(pixels)) + b"M\x00\x0c\x86" + dtype
    array += b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    entries = _text("batch_label") + b"q\x02" + _text("training batch") + b"q\x03"
    entries += _text("labels") + b"q\x04]q\x05(" + numbers[0] + b"e(" + numbers[1] + b"e"
    entries += _text("data") + array + _text("filenames") + b"]q\x0c(" + names + b"e"
    return b"\x80\x02}q\x01(" + entries + b"u."


def _python3_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return pickle.dumps({b"labels": labels.tolist(), "data": pixels}, protocol=3)


def _records(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()


def _contents(splits: Splits, form: str) -> dict[str, bytes]:
    encode = {"python": _python2_pickle, "python3": _python3_pickle, "binary": _records}[form]
    ending = ".bin" if form == "binary" else ""
    return {name + ending: encode(pixels, labels) for name, pixels, labels in _batches_of(splits)}


def _tar(path: Path, contents: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in {"readme.html": b"<html>", "batches.meta": b"cos\nsystem\n.", **contents}.items():
            member = tarfile.TarInfo(f"cifar-10-batches/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def _npz(path: Path, splits: Splits, **changes: object) -> Path:
    arrays = {**splits._asdict(), "class_names": np.array(["plane", "car"]), **changes}
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})  # type: ignore[arg-type]
    return path


def _lzma_npz(path: Path, splits: Splits) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for key, array in splits._asdict().items():
            stream = io.BytesIO()
            np.save(stream, array)
            archive.writestr(f"{key}.npy", stream.getvalue())
    return path


def _folder(path: Path, contents: dict[str, bytes]) -> Path:
    path.mkdir()
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return path


FORMS: dict[str, Callable[[Path, Splits], Path]] = {
    "npz": lambda folder, splits: _npz(folder / "a.npz", splits),
    "npz of bytes": lambda folder, splits: _npz(folder / "a.npz", splits, y_train=splits.y_train.astype(np.uint8)),
    "lzma": lambda folder, splits: _lzma_npz(folder / "a.npz", splits),
    "python": lambda folder, splits: _tar(folder / "a.tar.gz", _contents(splits, "python")),
    "binary": lambda folder, splits: _tar(folder / "a.tar.gz", _contents(splits, "binary")),
    "plain tar": lambda folder, splits: _tar(folder / "a.tar", _contents(splits, "python"), "w"),
    "python folder": lambda folder, splits: _folder(folder / "a", _contents(splits, "python")),
    "python 3 folder": lambda folder, splits: _folder(folder / "a", _contents(splits, "python3")),
    "binary folder": lambda folder, splits: _folder(folder / "a", _contents(splits, "binary")),
}


def _same(first: Splits, second: Splits) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(first, second, strict=True))


def test_the_hand_made_batch_is_a_sound_pickle() -> None:
    listing = io.StringIO()
    pickletools.dis(_python2_pickle(np.zeros((4, 3072), np.uint8), np.arange(4)), listing)
    assert "highest protocol among opcodes = 2" in listing.getvalue()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images_the_first_time_and_from_the_cache(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path, _splits())
    assert _same(read_splits(str(path)), _splits())
    assert _same(read_splits(str(path)), _splits())


def test_loaded_images_are_normalised_by_colour(tmp_path: Path) -> None:
    splits = _splits()
    data = datasets.get("cifar10").load(str(_npz(tmp_path / "a.npz", splits)), train_limit=6)
    oracle = (splits.x_train[:6] / 255 - CHANNEL_MEAN) / CHANNEL_DEVIATION
    assert np.allclose(data.train_x.permute(0, 2, 3, 1).numpy(), oracle, atol=1e-5)
    assert data.train_x.dtype == torch.float32
    assert data.train_x.is_contiguous()
    assert torch.equal(data.train_y, torch.from_numpy(splits.y_train[:6]))
    assert data.test_x.shape == (4, 3, 32, 32)


# --- the cache ---------------------------------------------------------------------------------------------------


def _cached_file(root: Path, key: str = "x_train") -> Path:
    (file,) = root.glob(f"*/{key}.npy")
    return file


def test_the_cache_lies_in_the_users_folder_and_is_mapped_not_read(tmp_path: Path, user_cache: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    path = _npz(folder / "a.npz", _splits())
    read_splits(str(path))
    again = read_splits(str(path))
    assert isinstance(again.x_train, np.memmap)
    assert Path(again.x_train.filename or "") == _cached_file(user_cache)
    assert not again.x_train.flags.writeable
    assert [file.name for file in folder.iterdir()] == ["a.npz"]


def test_without_a_named_cache_folder_it_is_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for named in (None, "", "relative"):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if named is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", named)
        path = _npz(tmp_path / f"{named}.npz", _splits())
        read_splits(str(path))
        home = tmp_path / "home" / ".cache" / "gradlab"
        assert home in Path(read_splits(str(path)).x_train.filename or "").parents  # type: ignore[attr-defined]


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = _npz(tmp_path / "a.npz", _splits(0))
    size = path.stat().st_size
    read_splits(str(path))
    _npz(path, _splits(1))
    assert path.stat().st_size == size
    assert _same(read_splits(str(path)), _splits(1))


def test_files_of_one_size_and_time_do_not_share_a_cache(tmp_path: Path) -> None:
    paths = [_npz(tmp_path / f"{seed}.npz", _splits(seed)) for seed in (0, 1)]
    for path in paths:
        os.utime(path, ns=(10**18, 10**18))
    assert paths[0].stat().st_size == paths[1].stat().st_size
    for _ in range(2):
        assert all(_same(read_splits(str(path)), _splits(seed)) for seed, path in enumerate(paths))


def test_a_file_that_changes_while_it_is_read_is_not_cached(tmp_path: Path, user_cache: Path) -> None:
    path = _npz(tmp_path / "a.npz", _splits(0))

    def read() -> Splits:
        os.utime(path, ns=(10**18, 10**18))
        return _splits(0)

    assert _same(cached(path, IMAGE, read, lambda _: [])[0], _splits(0))
    assert not user_cache.exists()


@pytest.mark.parametrize("damage", ["truncated", "empty", "gone", "foreign", "labels", "a bit", "digests"])
def test_a_damaged_cache_is_replaced(damage: str, tmp_path: Path, user_cache: Path) -> None:
    path = _npz(tmp_path / "a.npz", _splits())
    read_splits(str(path))
    file = _cached_file(user_cache, "y_train" if damage == "labels" else "x_train")
    if damage == "gone":
        file.unlink()
    elif damage == "labels":
        np.save(file, np.full(20, 10))
    elif damage == "a bit":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "digests":
        file.with_name("digests.json").write_text("[" * 100_000)
    else:
        file.write_bytes({"truncated": file.read_bytes()[:-1], "empty": b"", "foreign": b"x" * 99}[damage])
    assert _same(read_splits(str(path)), _splits())
    assert isinstance(read_splits(str(path)).x_train, np.memmap)


def test_where_no_cache_can_be_written_the_file_is_still_read(tmp_path: Path) -> None:
    path = _npz(tmp_path / "a.npz", _splits())
    (tmp_path / "user").write_text("a file where the folder would be")
    for _ in range(2):
        assert _same(read_splits(str(path)), _splits())


def test_many_readers_at_once_leave_one_sound_cache(tmp_path: Path, user_cache: Path) -> None:
    path = _npz(tmp_path / "a.npz", _splits())
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(read_splits, [str(path)] * 16))
    assert all(_same(result, _splits()) for result in results)
    names = [file.name for file in user_cache.glob("*/*")]
    assert sorted(names) == sorted(["digests.json", *(f"{key}.npy" for key in Splits._fields)])


# --- bad input ---------------------------------------------------------------------------------------------------


def _refused(path: Path | None) -> str:
    """The one line with which a path is refused."""
    with pytest.raises(GradlabError) as caught:
        datasets.get("cifar10").load(None if path is None else str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert path is None or message.startswith(str(path))
    return message


def test_cifar10_asks_for_a_path() -> None:
    assert "cifar10 needs a path" in _refused(None)


BAD_ARRAYS: dict[str, tuple[str, object, str]] = {
    "no key": ("y_test", None, "no array y_test; expected x_train, y_train, x_test, y_test"),
    "float images": ("x_train", np.zeros((20, 32, 32, 3)), "x_train is float64 of shape"),
    "planes first": ("x_train", np.zeros((20, 3, 32, 32), np.uint8), "expected uint8 of shape"),
    "scalar": ("x_test", np.uint8(3), "x_test is uint8 of shape ()"),
    "float labels": ("y_train", np.zeros(20), "y_train is float64"),
    "objects": ("y_train", np.array([{}] * 20), "y_train is object"),
    "label 10": ("y_train", np.full(20, 10), "y_train runs from 10 to 10, expected 0 to 9"),
    "label -1": ("y_test", np.full(4, -1), "y_test runs from -1 to -1"),
    "too few labels": ("y_train", np.zeros(19, int), "20 train images but 19 labels"),
    "no images": ("x_test", np.zeros((0, 32, 32, 3), np.uint8), "x_test holds 0 samples"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_an_npz_with_a_bad_array_is_refused(case: str, tmp_path: Path) -> None:
    key, array, message = BAD_ARRAYS[case]
    assert message in _refused(_npz(tmp_path / "a.npz", _splits(), **{key: array}))
    assert not (tmp_path / "user").exists()


def test_a_header_that_claims_too_much_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    stream = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": (MAX_IMAGES + 1, 32, 32, 3)}
    np.lib.format.write_array_header_1_0(stream, header)
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", stream.getvalue())
    assert f"x_train holds {MAX_IMAGES + 1} samples" in _refused(path)


@pytest.mark.parametrize("form", ["npz", "lzma", "python", "binary", "plain tar"])
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.8])
def test_a_truncated_file_is_refused(form: str, kept: float, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path, _splits())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    message = _refused(path)
    assert any(word in message for word in ("truncated", "no CIFAR-10 batches", "no data_batch", "no test_batch"))


@pytest.mark.parametrize("form", ["npz", "lzma", "python", "binary"])
@settings(max_examples=25, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_never_ends_in_another_error(
    form: str, place: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = FORMS[form](tmp_path_factory.mktemp("flip"), _splits())
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        splits = read_splits(str(path))
    except GradlabError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right, a traceback or other data are not
    else:
        assert _same(splits, _splits())  # a bit that means nothing, as of a time


@pytest.mark.parametrize("opened", ["(", "[", "{0:", "-"])
def test_a_header_of_any_nesting_is_one_line(opened: str, tmp_path: Path) -> None:
    for depth in (50, 1000, 9000):
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': " + opened.encode() * (depth // len(opened))
        path = tmp_path / f"{depth}.npz"
        with zipfile.ZipFile(path, "w") as archive:
            member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"
            archive.writestr("x_train.npy", member)
        assert "damaged or truncated" in _refused(path)


def test_a_member_that_goes_on_behind_its_values_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for key, array in _splits()._asdict().items():
            stream = io.BytesIO()
            np.save(stream, array)
            archive.writestr(f"{key}.npy", stream.getvalue() + (b"x" if key == "y_test" else b""))
    assert "y_test goes on behind the values" in _refused(tmp_path / "a.npz")


def test_what_is_not_the_published_set_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the binary form's SHA-256, for every form, and when it comes from the cache."""
    splits = _splits()
    files = [
        _records(np.ascontiguousarray(x.transpose(0, 3, 1, 2)).reshape(len(x), -1), y)
        for x, y in ((splits.x_train, splits.y_train), (splits.x_test, splits.y_test))
    ]
    known = {name: hashlib.sha256(file).hexdigest() for name, file in zip("ab", files, strict=True)}
    counts = len(splits.x_train), len(splits.x_test)
    assert others(splits, known, cifar10_files(splits), counts) == []
    assert others(splits, CIFAR10, iter(()), (50_000, 10_000)) == []  # somebody's own images
    altered = splits._replace(x_test=splits.x_test ^ 1)
    monkeypatch.setattr(cifar_files, "_others", lambda given: others(given, known, cifar10_files(given), counts))
    for form, make in FORMS.items():
        (folder := tmp_path / form).mkdir()
        path = make(folder, altered)
        for _ in range(2):
            with pytest.warns(UserWarning, match=r"not the same \(by SHA-256, b\): a damaged copy"):
                read_splits(str(path))


def test_the_published_fashion_mnist_is_told_by_its_idx_files() -> None:
    images, labels = np.arange(2 * 28 * 28).reshape(2, 28, 28).astype(np.uint8), np.array([3, 9])
    splits = Splits(images, labels, images[:1], labels[:1])
    written = [
        *(b"\0\0\x08\x03" + struct.pack(">3I", 2, 28, 28) + images.tobytes(), b"\0\0\x08\x01\0\0\0\2\3\x09"),
        *(b"\0\0\x08\x03" + struct.pack(">3I", 1, 28, 28) + images[:1].tobytes(), b"\0\0\x08\x01\0\0\0\1\3"),
    ]
    assert list(fashion_mnist_files(splits)) == written


def test_what_is_no_data_file_is_refused(tmp_path: Path) -> None:
    text, empty = tmp_path / "notes.txt", tmp_path / "empty.npz"
    text.write_text("hello")
    empty.write_bytes(b"")
    assert "no such file" in _refused(tmp_path / "gone.npz")
    assert "neither a zip nor a tar file" in _refused(text)
    assert "neither a zip nor a tar file" in _refused(empty)
    assert "not a regular file" in _refused(Path("/dev/null"))
    assert "holds no CIFAR-10 batches" in _refused(_folder(tmp_path / "folder", {}))


def test_an_archive_must_hold_each_batch_once_and_whole(tmp_path: Path) -> None:
    contents = _contents(_splits(), "binary")
    lacking = {name: content for name, content in contents.items() if "3" not in name}
    assert "no data_batch_3.bin; expected the six batches" in _refused(_tar(tmp_path / "a.tar.gz", lacking))
    short = {**contents, "data_batch_2.bin": contents["data_batch_2.bin"][:-1]}
    assert "data_batch_2.bin: 12291 bytes, expected records of 3073" in _refused(_tar(tmp_path / "b.tar.gz", short))
    label = {**contents, "test_batch.bin": b"\x0a" + contents["test_batch.bin"][1:]}
    assert "test_batch.bin: label 10, expected 0 to 9" in _refused(_tar(tmp_path / "c.tar.gz", label))
    twice = {**contents, "x/data_batch_1.bin": b""}
    assert "holds data_batch_1.bin twice" in _refused(_tar(tmp_path / "d.tar.gz", twice))


def test_a_small_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradlab.datasets.cifar_archive.MAX_TAR_BYTES", 1 << 20)
    path = tmp_path / "bomb.tar.gz"
    member = tarfile.TarInfo("padding")
    member.size = 1 << 34
    path.write_bytes(gzip.compress(member.tobuf() + bytes(4 << 20)))
    assert "unpacks to more than" in _refused(path)


def test_an_archive_writes_nothing_outside_and_follows_no_link(tmp_path: Path) -> None:
    contents = _contents(_splits(), "binary")
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in {**contents, "../../escaped": b"x"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name == "data_batch_1.bin":
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0
            archive.addfile(member, io.BytesIO(content))
    assert "no data_batch_1.bin" in _refused(path)
    assert not (tmp_path.parent.parent / "escaped").exists()


EVIL = b"\x80\x02cposix\nsystem\n" + _text("touch pwned") + b"\x85R."
# Each tuple holds the one before twice: whatever walks the nest does not come back.
NEST = b")" + b"q\x14h\x14\x86" * 60
SOUND = _python2_pickle(np.zeros((4, 3072), np.uint8), np.arange(4))


def _swap(old: bytes, new: bytes) -> bytes:
    assert SOUND.count(old) == 1
    return SOUND.replace(old, new)


BAD_PICKLES: dict[str, tuple[bytes, str]] = {
    "a call": (EVIL, "refers to 'posix system', which no CIFAR-10 batch does; nothing was run"),
    "an object": (b"\x80\x02c__builtin__\nobject\n)\x81.", "refers to '__builtin__ object'"),
    "an opcode": (b"\x80\x02}(" + _text("data") + b"\x8a\x01\x01u.", "pickle opcode LONG1"),
    "a nest": (b"\x80\x02" + NEST + b".", "a tuple where a dict belongs"),
    "a nest as shape": (_swap(b"M\x04\x00M\x00\x0c\x86", NEST), "a tuple where a int belongs"),
    "a newer protocol": (pickle.dumps({}, protocol=4), "pickle opcode MEMOIZE"),
    "empty": (b"", "not a CIFAR-10 batch"),
    "stop alone": (b".", "not a CIFAR-10 batch"),
    "no labels": (_swap(_text("labels"), _text("titles")), "no entry 'labels'"),
    "label 10": (_swap(b"K\x02K\x03", b"K\x02K\x0a"), "expected 4 labels from 0 to 9"),
    "a label less": (_swap(b"K\x02K\x03", b"K\x02"), "expected 4 labels"),
    "a text label": (_swap(b"K\x02K\x03", b"K\x02" + _text("3")), "expected 4 labels"),
    "other shape": (_swap(b"M\x04\x00M\x00\x0c", b"M\x04\x00M\x00\x0d"), "has the shape [4, 3328]"),
    "no images": (_swap(b"M\x04\x00M", b"M\x00\x00M"), "has the shape [0, 3072]"),
    "other type": (_swap(_text("u1"), _text("f4")), "no row-major uint8 array"),
    "column-major": (_swap(b"\x89T", b"\x88T"), "no row-major uint8 array"),
    "other size": (_swap(b"M\x04\x00M", b"M\x05\x00M"), "has 12288 bytes, expected 5 x 3072"),
}


def test_false_may_be_written_the_older_way() -> None:
    pixels, labels = read_batch(_swap(b"\x89T", b"I00\nT"), "batch")
    assert not pixels.any()
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("case", BAD_PICKLES)
def test_a_hostile_or_foreign_pickle_is_refused_and_nothing_runs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = BAD_PICKLES[case]
    monkeypatch.chdir(tmp_path)
    folder = _folder(tmp_path / "batches", {**_contents(_splits(), "python"), "data_batch_4": content})
    assert message in _refused(folder)
    assert not (tmp_path / "pwned").exists()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_pickle_with_any_damage_is_read_or_refused(data: st.DataObject) -> None:
    """Damage falls on the opcodes, not on the zeros of the pixels."""
    edges = [*range(260), *range(len(SOUND) - 100, len(SOUND))]
    place, byte = data.draw(st.sampled_from(edges)), data.draw(st.integers(0, 255))
    content = SOUND[:place] + bytes([byte]) + SOUND[place + 1 :]
    end = data.draw(st.sampled_from([*edges, len(SOUND)]))
    try:
        pixels, labels = read_batch(content[:end], "batch")
    except GradlabError as error:
        assert str(error).startswith("batch: ")  # noqa: PT017 - either outcome is right, another error is not
    else:
        assert pixels.shape == (4, 3072)
        assert labels.shape == (4,)


def test_an_escape_that_python_warns_of_is_refused_like_any_damage() -> None:
    """Splitting such a text into opcodes warns; a user's run may treat warnings as errors."""
    with pytest.raises(GradlabError, match=r"batch\.bin"):
        read_batch(b"\x80\x02S'\\u'\n.", "batch.bin")
