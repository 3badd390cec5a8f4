"""The fashion_mnist workload: IDX files as published, .npz files, every kind of bad file; the network learns."""

from __future__ import annotations

import dataclasses
import gzip
import io
import math
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlab import datasets
from gradlab.datasets.fashion_mnist import FILES, IMAGE, PIXEL_DEVIATION, PIXEL_MEAN, read_splits
from gradlab.datasets.idx import read_idx
from gradlab.datasets.splits import MAX_IMAGES, Splits
from gradlab.errors import GradlabError

WORKLOAD = datasets.get("fashion_mnist")


def _splits(seed: int = 0, train: int = 6, test: int = 3) -> Splits:
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (size, *IMAGE), dtype=np.uint8) for size in (train, test)]
    labels = [rng.integers(0, 10, size) for size in (train, test)]
    return Splits(images[0], labels[0], images[1], labels[1])


def _idx(values: np.ndarray) -> bytes:
    """An IDX file of unsigned bytes, written by the format's own words."""
    header = struct.pack(">HBB", 0, 8, values.ndim) + b"".join(struct.pack(">I", length) for length in values.shape)
    return header + values.astype(np.uint8).tobytes()


def _folder(path: Path, splits: Splits, name: Callable[[str], str] = str, packed: bool = False) -> Path:
    path.mkdir()
    for key, array in splits._asdict().items():
        content = _idx(array)
        (path / name(FILES[key])).write_bytes(gzip.compress(content) if packed else content)
    return path


def _npz(path: Path, splits: Splits, **changes: object) -> Path:
    arrays = {**splits._asdict(), **changes}
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})  # type: ignore[arg-type]
    return path


FORMS: dict[str, Callable[[Path, Splits], Path]] = {
    "plain": lambda folder, splits: _folder(folder / "a", splits),
    "gzip": lambda folder, splits: _folder(folder / "a", splits, lambda name: f"{name}.gz", packed=True),
    "gzip under a plain name": lambda folder, splits: _folder(folder / "a", splits, packed=True),
    "dotted": lambda folder, splits: _folder(folder / "a", splits, lambda name: name.replace("-idx", ".idx")),
    "npz": lambda folder, splits: _npz(folder / "a.npz", splits),
    "npz of bytes": lambda folder, splits: _npz(folder / "a.npz", splits, y_test=splits.y_test.astype(np.uint8)),
}


def _refused(path: Path | None) -> str:
    """The one line with which a path is refused."""
    with pytest.raises(GradlabError) as caught:
        WORKLOAD.load(None if path is None else str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert path is None or message.startswith(str(path))
    return message


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images(form: str, tmp_path: Path) -> None:
    splits = read_splits(str(FORMS[form](tmp_path, _splits())))
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(splits, _splits(), strict=True))


@pytest.mark.parametrize("form", ["gzip", "npz"])
def test_loaded_images_are_normalised(form: str, tmp_path: Path) -> None:
    splits = _splits()
    data = WORKLOAD.load(str(FORMS[form](tmp_path, splits)), train_limit=4)
    oracle = (splits.x_train[:4, None] / 255 - PIXEL_MEAN) / PIXEL_DEVIATION
    assert np.allclose(data.train_x.numpy(), oracle, atol=1e-5)
    assert data.train_x.dtype == torch.float32
    assert torch.equal(data.train_y, torch.from_numpy(splits.y_train[:4]))
    assert data.test_x.shape == (3, 1, 28, 28)
    assert torch.equal(data.test_y, torch.from_numpy(splits.y_test))


# --- bad input ----------------------------------------------------------------------------------------------------

IMAGES = _idx(_splits().x_train)


def _header(images: int, height: int = 28, width: int = 28) -> bytes:
    return struct.pack(">HBBIII", 0, 8, 3, images, height, width)


BAD_IMAGES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "starts with nothing, expected the magic number 00 00 08 03"),
    "labels in place of images": (_idx(_splits().y_train), "starts with 00 00 08 01, expected the magic number 00"),
    "floats": (b"\0\0\x0d\x03" + IMAGES[4:], "starts with 00 00 0d 03"),
    "little-endian": (IMAGES[3::-1] + IMAGES[4:], "starts with 03 08 00 00"),
    "text": (b"hello world", "starts with 68 65 6c 6c"),
    "half a header": (IMAGES[:9], "ends within its header: truncated"),
    "an image less": (IMAGES[:-784], "announces 4704 values, it holds only 3920: truncated"),
    "a byte less": (IMAGES[:-1], "announces 4704 values, it holds only 4703: truncated"),
    "a byte more": (IMAGES + b"\0", "announces 4704 values, it holds more than that"),
    "other images": (
        _header(6, 32, 32) + bytes(6144),
        "announces 6 x 32 x 32 values, expected (1 to 200000) x 28 x 28",
    ),
    "no images": (_header(0), "announces 0 x 28 x 28 values"),
    "2^31 images": (_header(2**31), "announces 2147483648 x 28 x 28 values"),
    "2^96 values": (_header(2**32 - 1, 2**32 - 1, 2**32 - 1), "announces 4294967295 x 4294967295 x 4294967295"),
    "too many images": (_header(MAX_IMAGES + 1), f"announces {MAX_IMAGES + 1} x 28 x 28"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", BAD_IMAGES)
def test_a_bad_idx_file_is_refused(case: str, packed: bool, tmp_path: Path) -> None:
    content, message = BAD_IMAGES[case]
    folder = _folder(tmp_path / "a", _splits())
    (folder / FILES["x_train"]).write_bytes(gzip.compress(content) if packed else content)
    text = _refused(folder)
    assert message in text
    assert FILES["x_train"] in text


@pytest.mark.parametrize("kept", [3, 12, 40, 0.5, -9, -1])
def test_a_truncated_gzip_file_is_refused(kept: float, tmp_path: Path) -> None:
    folder = FORMS["gzip"](tmp_path, _splits())
    file = folder / f"{FILES['x_test']}.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    assert f"{FILES['x_test']}.gz: damaged or truncated gzip" in _refused(folder)


def test_a_damaged_checksum_is_seen(tmp_path: Path) -> None:
    folder = FORMS["gzip"](tmp_path, _splits())
    file = folder / f"{FILES['y_train']}.gz"
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)
    assert "damaged or truncated gzip (CRC check failed" in _refused(folder)


def test_no_more_is_unpacked_than_the_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file that unpacks without end: what is read of it is bounded by the header, that by what images are."""
    file, read = tmp_path / "bomb", []
    file.write_bytes(gzip.compress(_header(2) + bytes(64 << 20)))
    original = gzip.GzipFile.read

    def counted(stream: gzip.GzipFile, size: int | None = -1) -> bytes:
        content = original(stream, size)
        read.append(len(content))
        return content

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    with pytest.raises(GradlabError, match="announces 1568 values, it holds more than that"):
        read_idx(file, IMAGE)
    assert sum(read) == 16 + 1568 + 1


def test_a_label_of_no_class_and_counts_that_differ_are_refused(tmp_path: Path) -> None:
    splits = _splits()
    wrong = splits._replace(y_test=np.array([1, 2, 10]))
    assert "y_test runs from 1 to 10, expected 0 to 9" in _refused(_folder(tmp_path / "a", wrong))
    fewer = splits._replace(y_train=splits.y_train[:-1])
    assert "6 train images but 5 labels" in _refused(_folder(tmp_path / "b", fewer))


@pytest.mark.parametrize("key", FILES)
def test_a_missing_file_is_named(key: str, tmp_path: Path) -> None:
    folder = FORMS["plain"](tmp_path, _splits())
    (folder / FILES[key]).unlink()
    assert f"no file {FILES[key]} or {FILES[key]}.gz; expected the four IDX files" in _refused(folder)


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    folder = FORMS["plain"](tmp_path, _splits())
    assert "fashion_mnist needs a path: an .npz" in _refused(None)
    assert "no such file or folder" in _refused(tmp_path / "gone")
    assert "not a regular file" in _refused(Path("/dev/null"))
    assert "not an .npz file, give an .npz with x_train" in _refused(folder / FILES["x_train"])


BAD_ARRAYS: dict[str, tuple[str, object, str]] = {
    "no key": ("x_test", None, "no array x_test; expected x_train, y_train, x_test, y_test"),
    "objects": ("y_train", np.array([{}] * 6), "y_train is object"),
    "pickled images": ("x_train", np.array([print] * 6), "x_train is object"),
    "colours": ("x_train", np.zeros((6, 28, 28, 3), np.uint8), "expected uint8 of shape (samples, 28, 28)"),
    "float images": ("x_train", np.zeros((6, 28, 28)), "x_train is float64"),
    "too few labels": ("y_train", np.zeros(5, int), "6 train images but 5 labels"),
    "label 10": ("y_train", np.full(6, 10), "y_train runs from 10 to 10"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_an_npz_with_a_bad_array_is_refused(case: str, tmp_path: Path) -> None:
    key, array, message = BAD_ARRAYS[case]
    assert message in _refused(_npz(tmp_path / "a.npz", _splits(), **{key: array}))


def test_an_npz_header_that_claims_too_much_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": (2**31, 28, 28)})
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", stream.getvalue())
    assert "x_train holds 2147483648 samples, expected 1 to" in _refused(path)


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 30), byte=st.integers(0, 255), end=st.integers(0, len(IMAGES)), packed=st.booleans())
def test_damage_is_read_or_refused(
    place: int, byte: int, end: int, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = gzip.compress(IMAGES, mtime=0) if packed else IMAGES
    file = tmp_path_factory.mktemp("damage") / "file"
    file.write_bytes((content[:place] + bytes([byte]) + content[place + 1 :])[: max(end, place + 1)])
    try:
        values = read_idx(file, IMAGE)
    except GradlabError as error:
        assert re.match(rf"{re.escape(str(file))}: .*\Z", str(error))  # noqa: PT017 - either outcome is right
    else:
        assert values.shape == (6, *IMAGE)


# --- the network --------------------------------------------------------------------------------------------------


def test_a_new_network_gives_every_class_about_the_same_chance() -> None:
    x = torch.randn(40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = WORKLOAD.model(0)(x)
    assert logits.shape == (40, 10)
    assert WORKLOAD.loss(logits, torch.arange(40) % 10).item() == pytest.approx(math.log(10), abs=0.2)


def test_the_network_learns_from_files(tmp_path: Path) -> None:
    """Bright squares, at a place of its own for every class, in noise: learnt from 120 images, told on 40 others."""
    rng = np.random.default_rng(0)

    def images(labels: np.ndarray) -> np.ndarray:
        pixels = rng.integers(0, 128, (len(labels), *IMAGE), dtype=np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            row, column = 5 * (label // 5) + 8, 5 * (label % 5) + 1
            image[row : row + 4, column : column + 4] = 255
        return pixels

    y_train, y_test = np.arange(120) % 10, np.arange(40) % 10
    splits = Splits(images(y_train), y_train, images(y_test), y_test)
    data = WORKLOAD.load(str(_folder(tmp_path / "a", splits)))
    model, recipe = WORKLOAD.model(0), dataclasses.replace(WORKLOAD.recipe, steps=30, warmup_steps=5)
    optimizer = datasets.build_optimizer(recipe, model.parameters())
    before = WORKLOAD.score(model, data.test_x, data.test_y)
    for step, indices in enumerate(datasets.batches(120, 30, 0, 1, 0, recipe.steps)):
        optimizer.param_groups[0]["lr"] = datasets.learning_rate_at(recipe, step)
        optimizer.zero_grad()
        WORKLOAD.loss(model(data.train_x[indices]), data.train_y[indices]).backward()
        optimizer.step()
    assert before < 0.4
    assert WORKLOAD.score(model, data.test_x, data.test_y) >= 0.9
