"""Workloads: recipes, sample order, models, CIFAR-10 files of every form (sound and hostile), synthetic gradients."""

from __future__ import annotations

import dataclasses
import gzip
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
from scipy.linalg import subspace_angles

from gradlab import datasets
from gradlab.datasets import synthetic
from gradlab.datasets.array_cache import cached
from gradlab.datasets.cifar10 import CHANNEL_DEVIATION, CHANNEL_MEAN, random_crop, random_flip
from gradlab.datasets.cifar_archive import BATCHES
from gradlab.datasets.cifar_files import read_splits
from gradlab.datasets.cifar_pickle import read_batch
from gradlab.datasets.resnet import BasicBlock
from gradlab.datasets.splits import MAX_IMAGES, Splits
from gradlab.errors import GradlabError

RECIPE = datasets.Recipe(learning_rate=0.4, momentum=0.9, weight_decay=0.0, batch_size=8, steps=100)


# --- registry, recipe, order of samples -------------------------------------------------------------------------


def test_every_workload_is_found_by_its_name() -> None:
    assert datasets.names() == ["digits", "cifar10"]
    for name in datasets.names():
        assert datasets.get(name).name == name


def test_an_unknown_workload_lists_the_known_ones() -> None:
    with pytest.raises(GradlabError, match="unknown workload 'mnist': expected one of digits, cifar10"):
        datasets.get("mnist")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("momentum", 1.0),
        ("weight_decay", -1e-4),
        ("batch_size", 0),
        ("steps", 0),
        ("warmup_steps", 101),
        ("schedule", "linear"),
    ],
)
def test_a_recipe_refuses_a_setting_out_of_range(setting: str, value: object) -> None:
    with pytest.raises(GradlabError, match=f"recipe: {setting} is "):
        dataclasses.replace(RECIPE, **{setting: value})  # type: ignore[arg-type]


def test_the_cosine_schedule_is_the_one_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RECIPE.learning_rate)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=RECIPE.steps)
    for step in range(RECIPE.steps):
        assert datasets.learning_rate_at(RECIPE, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        oracle.step()


@given(steps=st.integers(1, 300), fraction=st.floats(0, 1), schedule=st.sampled_from(["cosine", "constant", "step"]))
def test_the_rate_rises_in_equal_parts_to_its_peak_and_never_rises_again(
    steps: int, fraction: float, schedule: datasets.recipe.Schedule
) -> None:
    warmup = int(fraction * steps)
    recipe = dataclasses.replace(RECIPE, steps=steps, warmup_steps=warmup, schedule=schedule)
    rates = [datasets.learning_rate_at(recipe, step) for step in range(steps + 3)]
    assert rates[:warmup] == pytest.approx([recipe.learning_rate * (i + 1) / warmup for i in range(warmup)])
    assert all(0 <= later <= earlier for earlier, later in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
    assert max(rates) <= recipe.learning_rate


def test_the_step_schedule_divides_by_ten_where_the_paper_does() -> None:
    recipe = datasets.get("cifar10").recipe
    rates = [datasets.learning_rate_at(recipe, step) for step in (0, 31_999, 32_000, 47_999, 48_000, 63_999)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def _steps_of_ranks(samples: int, batch: int, world: int, seed: int, steps: int) -> list[list[list[int]]]:
    ranks = [datasets.batches(samples, batch, rank, world, seed, steps) for rank in range(world)]
    return [[indices.tolist() for indices in step] for step in zip(*ranks, strict=True)]


@given(
    world=st.integers(1, 4),
    batch=st.integers(1, 6),
    extra=st.integers(0, 30),
    seed=st.integers(0, 2**63),
    data=st.data(),
)
def test_ranks_share_out_each_epoch_without_overlap(
    world: int, batch: int, extra: int, seed: int, data: st.DataObject
) -> None:
    samples = world * batch + extra
    per_epoch = samples // (world * batch)
    steps = data.draw(st.integers(0, 3 * per_epoch))
    drawn = _steps_of_ranks(samples, batch, world, seed, steps)
    assert len(drawn) == steps
    for start in range(0, steps, per_epoch):
        epoch = [index for step in drawn[start : start + per_epoch] for rank in step for index in rank]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(samples))
    assert all(len(indices) == batch for step in drawn for indices in step)
    assert drawn == _steps_of_ranks(samples, batch, world, seed, steps)


def test_a_step_has_the_same_samples_however_many_ranks_share_it() -> None:
    one = [set(step[0]) for step in _steps_of_ranks(50, 12, 1, 7, 10)]
    three = [set().union(*step) for step in _steps_of_ranks(50, 4, 3, 7, 10)]
    assert one == three


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = (tuple(step[0]) for step in _steps_of_ranks(64, 64, 1, 0, 2))
    (other,) = (tuple(step[0]) for step in _steps_of_ranks(64, 64, 1, 1, 1))
    assert len({first, second, other}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 6, 0, 2, 0, 1), "batch size 6 is larger than a rank's share of 5 samples"),
        ((10, 2, 2, 2, 0, 1), "rank 2 of 2"),
        ((10, 0, 0, 2, 0, 1), "batch size 0"),
        ((10, 2, 0, 2, -1, 1), "seed -1"),
    ],
)
def test_impossible_batches_are_refused_at_the_call(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        datasets.batches(*arguments)


# --- models, loss, accuracy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters", "weighted_layers"), [("digits", 93_562, 10), ("cifar10", 269_722, 20)])
def test_a_model_has_the_published_size(name: str, parameters: int, weighted_layers: int) -> None:
    model = datasets.get(name).model(0)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.ndim > 1 for p in model.parameters()) == weighted_layers


@pytest.mark.parametrize("name", datasets.names())
def test_a_model_follows_from_its_seed_and_leaves_global_randomness_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (datasets.get(name).model(seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    weights = [key for key in first if first[key].ndim > 1]
    assert not any(torch.equal(first[key], other[key]) for key in weights)


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


class _Constant(torch.nn.Module):
    """Always the logits of one class; in training, of another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.full((len(x),), 2 if self.training else 1), 3).float()


def test_accuracy_is_the_share_of_right_answers_in_evaluation_mode() -> None:
    workload, model = datasets.get("digits"), _Constant()
    y = torch.tensor([1, 2, 1, 0, 1, 1, 2])
    assert workload.accuracy(model, torch.zeros(7, 1), y, batch_size=3) == pytest.approx(4 / 7)
    assert model.training
    with pytest.raises(GradlabError, match="accuracy of no samples"):
        workload.accuracy(model, torch.zeros(0, 1), y[:0])


def test_the_loss_is_the_mean_negative_log_likelihood() -> None:
    logits, y = torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([0, 1])
    oracle = np.mean([np.log(1 + np.exp(1.0)), np.log(1 + np.exp(3.0))])
    assert datasets.get("digits").loss(logits, y).item() == pytest.approx(oracle, rel=1e-6)


# --- digits -----------------------------------------------------------------------------------------------------


def test_digits_are_all_of_scikit_learn_in_a_fixed_normalised_split() -> None:
    from sklearn.datasets import load_digits

    data = datasets.get("digits").load()
    assert data.train_x.shape == (1437, 1, 8, 8)
    assert data.test_x.shape == (360, 1, 8, 8)
    assert data.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train_x.std().item() == pytest.approx(1, abs=1e-5)
    pixels, classes = load_digits(return_X_y=True)
    x, y = torch.cat([data.train_x, data.test_x]).reshape(-1, 64), torch.cat([data.train_y, data.test_y])
    restored = ((x - x.min()) / (x.max() - x.min()) * 16).round().to(torch.int64)
    rows = sorted([*map(int, row), int(label)] for row, label in zip(restored, y, strict=True))
    assert rows == sorted([*map(int, row), int(label)] for row, label in zip(pixels, classes, strict=True))
    assert torch.equal(data.test_x, datasets.get("digits").load().test_x)


def test_a_limit_keeps_the_first_samples_unchanged() -> None:
    workload = datasets.get("digits")
    whole, part = workload.load(), workload.load(train_limit=10, test_limit=5000)
    assert torch.equal(part.train_x, whole.train_x[:10])
    assert torch.equal(part.test_y, whole.test_y)
    with pytest.raises(GradlabError, match="test_limit is 0"):
        workload.load(test_limit=0)


def test_digits_refuse_a_path() -> None:
    with pytest.raises(GradlabError, match="digits is bundled"):
        datasets.get("digits").load("digits.npz")


def _train(workload: datasets.Workload, data: datasets.Data, recipe: datasets.Recipe, ranks: int) -> torch.nn.Module:
    """Data-parallel SGD in one process: each rank's mean gradient, averaged over the ranks."""
    model, size = workload.model(0), len(data.train_x)
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.learning_rate, recipe.momentum, weight_decay=recipe.weight_decay
    )
    orders = [datasets.batches(size, recipe.batch_size, rank, ranks, 0, recipe.steps) for rank in range(ranks)]
    generator = torch.Generator().manual_seed(0)
    for step, parts in enumerate(zip(*orders, strict=True)):
        optimizer.param_groups[0]["lr"] = datasets.learning_rate_at(recipe, step)
        optimizer.zero_grad()
        for indices in parts:
            x = workload.augment(data.train_x[indices], generator)
            (workload.loss(model(x), data.train_y[indices]) / ranks).backward()
        optimizer.step()
    return model


def test_digits_train_to_95_percent_on_two_ranks() -> None:
    workload = datasets.get("digits")
    data = workload.load()
    model = _train(workload, data, dataclasses.replace(workload.recipe, steps=200), ranks=2)
    assert workload.accuracy(model, data.test_x, data.test_y) >= 0.95


# --- CIFAR-10: augmentation -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", datasets.names())
def test_augmentation_follows_from_its_generator_alone(name: str) -> None:
    workload, x, before = datasets.get(name), _image_batch(8), torch.get_rng_state()
    first, again = (workload.augment(x, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)
    assert first.shape == x.shape
    assert torch.equal(torch.get_rng_state(), before)


# --- CIFAR-10: files of every published form ---------------------------------------------------------------------


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


# --- CIFAR-10: the cache ------------------------------------------------------------------------------------------


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

    assert _same(cached(path, read), _splits(0))
    assert not user_cache.exists()


@pytest.mark.parametrize("damage", ["truncated", "empty", "gone", "foreign", "labels"])
def test_a_damaged_cache_is_replaced(damage: str, tmp_path: Path, user_cache: Path) -> None:
    path = _npz(tmp_path / "a.npz", _splits())
    read_splits(str(path))
    file = _cached_file(user_cache, "y_train" if damage == "labels" else "x_train")
    if damage == "gone":
        file.unlink()
    elif damage == "labels":
        np.save(file, np.full(20, 10))
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
    assert sorted(names) == sorted(f"{key}.npy" for key in Splits._fields)


# --- CIFAR-10: bad input ------------------------------------------------------------------------------------------


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
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right, a traceback is not
    else:
        assert splits.x_train.shape == (20, 32, 32, 3)


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


# --- synthetic gradients ------------------------------------------------------------------------------------------

MODEL = synthetic.GradientModel(
    numel=40, eigenvalues=(9.0, 4.0, 1.0), noise_std=(0.5, 1.0, 0.25), shared=0.6, drift=0.02
)
STEPS = 4000


@st.composite
def gradient_models(draw: st.DrawFn) -> synthetic.GradientModel:
    eigenvalues = tuple(sorted(draw(st.lists(st.floats(0.1, 10), min_size=1, max_size=4)), reverse=True))
    return synthetic.GradientModel(
        numel=2 * len(eigenvalues) + draw(st.integers(0, 20)),
        eigenvalues=eigenvalues,
        noise_std=tuple(draw(st.lists(st.floats(0, 2), min_size=1, max_size=4))),
        shared=draw(st.floats(0, 1)),
        drift=draw(st.floats(0, 0.1)),
    )


def _covariance(model: synthetic.GradientModel, basis: np.ndarray, first: int, second: int) -> np.ndarray:
    """The docstring's covariance between two nodes at one step, written out."""
    signal = basis @ np.diag(model.eigenvalues) @ basis.T
    if first != second:
        return model.shared * signal
    return signal + model.noise_std[first] ** 2 * np.eye(model.numel)


def _z_scores(x: np.ndarray, y: np.ndarray, truth: np.ndarray, xx: np.ndarray, yy: np.ndarray) -> np.ndarray:
    """Errors of the empirical covariance (steps, numel)' (steps, numel) in its Gaussian standard errors."""
    error = x.T @ y / len(x) - truth
    return error / np.sqrt((np.outer(np.diag(xx), np.diag(yy)) + truth * truth.T) / len(x))


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 1), (0, 1), (2, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_empirical_covariance_is_the_stated_one(first: int, second: int, seed: int) -> None:
    model = dataclasses.replace(MODEL, drift=0.0)
    drawn = synthetic.draw(model, STEPS, np.random.default_rng(seed))
    x, y = drawn.values[:, first].astype(float), drawn.values[:, second].astype(float)
    truth, xx, yy = (
        _covariance(model, drawn.basis(0), *pair) for pair in ((first, second), (first,) * 2, (second,) * 2)
    )
    scores = _z_scores(x, y, truth, xx, yy)
    assert np.abs(scores).max() < 5.5  # 1600 correlated values: the largest of as many normal ones is about 3.5
    assert 0.7 < np.sqrt(np.mean(scores**2)) < 1.3


def test_nodes_at_different_steps_are_unrelated() -> None:
    model = dataclasses.replace(MODEL, drift=0.0)
    drawn = synthetic.draw(model, STEPS, np.random.default_rng(2))
    covariances = [_covariance(model, drawn.basis(0), node, node) for node in (0, 1)]
    x, y = drawn.values[:-1, 0].astype(float), drawn.values[1:, 1].astype(float)
    assert np.abs(_z_scores(x, y, np.zeros((40, 40)), *covariances)).max() < 5.5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_cosine_between_nodes_is_the_stated_one_under_drift(seed: int) -> None:
    values = synthetic.draw(MODEL, STEPS, np.random.default_rng(seed)).values.astype(float)
    products = np.einsum("tmi,tni->mn", values, values) / STEPS
    lengths = np.sqrt(np.diag(products))
    assert np.diag(products) == pytest.approx(synthetic.expected_energy(MODEL), rel=0.06)
    assert np.abs(products / np.outer(lengths, lengths) - synthetic.expected_cosine(MODEL)).max() < 0.03


@pytest.mark.parametrize("age", [0, 10, 40])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_basis_loses_with_age_what_is_stated(kept: int, age: int) -> None:
    drawn = synthetic.draw(MODEL, STEPS, np.random.default_rng(3))
    lost = total = 0.0
    for step in range(age, STEPS):
        gradient = drawn.values[step, 1].astype(float)
        energy, coefficients = gradient @ gradient, drawn.basis(step - age)[:, :kept].T @ gradient
        lost, total = lost + energy - coefficients @ coefficients, total + energy
    assert lost / total == pytest.approx(synthetic.expected_tail_energy(MODEL, kept, age, node=1), abs=0.015)


def test_the_mean_over_nodes_has_the_stated_spectrum() -> None:
    model = dataclasses.replace(MODEL, drift=0.0)
    mean = synthetic.draw(model, 4 * STEPS, np.random.default_rng(4)).values.astype(float).mean(axis=1)
    spectrum = np.linalg.eigvalsh(mean.T @ mean / len(mean))[::-1]
    expected = synthetic.expected_mean_spectrum(model)
    assert spectrum[:3] == pytest.approx(expected[:3], rel=0.06)
    assert spectrum[3:].mean() == pytest.approx(expected[3:].mean(), rel=0.02)


@settings(max_examples=40, deadline=None)
@given(model=gradient_models(), seed=st.integers(0, 2**32), step=st.integers(0, 30), age=st.integers(0, 15))
def test_the_directions_stay_orthonormal_and_turn_by_the_stated_angle(
    model: synthetic.GradientModel, seed: int, step: int, age: int
) -> None:
    drawn = synthetic.draw(model, 1, np.random.default_rng(seed))
    now, before = drawn.basis(step + age), drawn.basis(step)
    assert np.allclose(now.T @ now, np.eye(model.rank), atol=1e-10)
    turned = model.drift * age
    assert np.allclose(subspace_angles(now, before), min(turned, np.pi - turned), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(model=gradient_models(), seed=st.integers(0, 2**32), age=st.integers(0, 40), data=st.data())
def test_every_formula_follows_from_the_covariance(
    model: synthetic.GradientModel, seed: int, age: int, data: st.DataObject
) -> None:
    drawn = synthetic.draw(model, 1, np.random.default_rng(seed))
    node, other = (data.draw(st.integers(0, model.nodes - 1)) for _ in range(2))
    now, own = drawn.basis(age), _covariance(model, drawn.basis(age), node, node)
    kept = data.draw(st.integers(0, model.rank))
    stale = drawn.basis(0)[:, :kept]
    assert np.allclose(np.linalg.eigvalsh(own)[::-1], synthetic.expected_spectrum(model, node), atol=1e-9)
    assert synthetic.expected_energy(model)[node] == pytest.approx(np.trace(own))
    lost = 1 - np.trace(stale.T @ own @ stale) / np.trace(own)
    assert synthetic.expected_tail_energy(model, kept, age, node) == pytest.approx(lost, abs=1e-9)
    pairs = [[_covariance(model, now, m, n) for n in range(model.nodes)] for m in range(model.nodes)]
    cosine = np.trace(pairs[node][other]) / np.sqrt(np.trace(own) * np.trace(pairs[other][other]))
    assert synthetic.expected_cosine(model)[node, other] == pytest.approx(cosine)
    mean = np.mean(pairs, axis=(0, 1))
    assert np.allclose(np.linalg.eigvalsh(mean)[::-1], synthetic.expected_mean_spectrum(model), atol=1e-9)


def test_a_draw_follows_from_its_generator() -> None:
    first, again, other = (synthetic.draw(MODEL, 3, np.random.default_rng(seed)).values for seed in (0, 0, 1))
    assert first.dtype == np.float32
    assert first.shape == (3, 3, 40)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_named_spectra_fall_as_stated() -> None:
    assert synthetic.geometric_spectrum(3, 0.5, 4.0) == (4.0, 2.0, 1.0)
    assert synthetic.power_spectrum(3, 2.0, 36.0) == pytest.approx((36.0, 9.0, 4.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"numel": 5}, "numel 5: expected at least 2 x rank = 6"),
        ({"eigenvalues": ()}, "expected at least one, positive, falling"),
        ({"eigenvalues": (1.0, 2.0)}, "falling"),
        ({"eigenvalues": (1.0, 0.0)}, "positive"),
        ({"noise_std": ()}, "one value per node"),
        ({"noise_std": (-1.0,)}, "0 or more"),
        ({"shared": 1.1}, "shared 1.1"),
        ({"drift": float("nan")}, "drift nan"),
    ],
)
def test_settings_that_describe_no_model_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        dataclasses.replace(MODEL, **changes)  # type: ignore[arg-type]


def test_impossible_draws_and_ranks_are_refused() -> None:
    with pytest.raises(GradlabError, match="steps 0"):
        synthetic.draw(MODEL, 0, np.random.default_rng(0))
    with pytest.raises(GradlabError, match="4 directions kept: expected 0 to rank = 3"):
        synthetic.expected_tail_energy(MODEL, 4)
