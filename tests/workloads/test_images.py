"""The workloads of images: normalisation, augmentation, networks; pixels of no class; the networks learn."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from gradlab import datasets
from gradlab.datasets.images import (
    CIFAR_DEVIATION,
    CIFAR_MEAN,
    FASHION_DEVIATION,
    FASHION_MEAN,
    random_crop,
    random_flip,
)
from gradlab.datasets.pspnet import PyramidPooling
from gradlab.datasets.resnet import BasicBlock
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import lgc_plan
from gradlab.plan.lgc_recipe import GROUP

SHAPE = (24, 32)  # of CamVid's pictures here


def _npz(path: Path, arrays: dict[str, np.ndarray]) -> str:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


def _images(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {f"x_{split}": rng.integers(0, 256, (4, *shape), dtype=np.uint8) for split in ("train", "test")}
    return arrays | {f"y_{split}": rng.integers(0, 10, 4) for split in ("train", "test")}


def _streets() -> dict[str, np.ndarray]:
    """Bands of brightness, each of one class; the last row of every picture of none."""
    rng, arrays = np.random.default_rng(0), {}
    for split, count in (("train", 4), ("test", 2)):
        classes = rng.integers(0, 11, (count, 3, 4)).repeat(8, 1).repeat(8, 2).astype(np.uint8)
        arrays[f"x_{split}"] = (20 * classes[..., None] + rng.integers(0, 10, (count, *SHAPE, 3))).astype(np.uint8)
        classes[:, -1] = 11
        arrays[f"y_{split}"] = classes
    return arrays


# --- data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "mean", "deviation"),
    [
        ("cifar10", (32, 32, 3), CIFAR_MEAN, CIFAR_DEVIATION),
        ("fashion_mnist", (28, 28), FASHION_MEAN, FASHION_DEVIATION),
    ],
)
def test_images_are_normalised_by_colour_up_to_a_limit(
    name: str, shape: tuple[int, ...], mean: tuple[float, ...], deviation: tuple[float, ...], tmp_path: Path
) -> None:
    arrays = _images(shape)
    data = datasets.get(name).load(_npz(tmp_path / "a.npz", arrays), train_limit=3)
    oracle = (arrays["x_train"][:3].reshape(3, *shape[:2], -1) / 255 - mean) / deviation
    assert np.allclose(data.train_x.permute(0, 2, 3, 1).numpy(), oracle, atol=1e-5)
    assert data.train_x.dtype == torch.float32
    assert data.train_x.is_contiguous()
    assert torch.equal(data.train_y, torch.from_numpy(arrays["y_train"][:3]))
    assert data.test_x.shape == (4, len(mean), *shape[:2])
    with pytest.raises(GradlabError, match=f"workload {name} needs a path: an .npz with x_train"):
        datasets.get(name).load()


def test_unlabelled_pixels_have_no_class(tmp_path: Path) -> None:
    workload, arrays = datasets.get("camvid"), _streets()
    data = workload.load(_npz(tmp_path / "a.npz", arrays), train_limit=3)
    oracle = (arrays["x_train"][:3] / 255 - CIFAR_MEAN) / CIFAR_DEVIATION
    assert np.allclose(data.train_x.permute(0, 2, 3, 1).numpy(), oracle, atol=1e-5)
    assert data.train_y.shape == (3, *SHAPE)
    assert torch.equal(data.test_y[:, :-1], torch.from_numpy(arrays["y_test"][:, :-1].astype(np.int64)))
    assert bool((data.test_y[:, -1] == -100).all())
    for classes, message in ((11, "y_test: no pixel has a class, all are 11"), (12, "y_test runs from 12 to 12")):
        bad = _npz(tmp_path / "b.npz", {**arrays, "y_test": np.full((2, *SHAPE), classes)})
        with pytest.raises(GradlabError, match=message):
            workload.load(bad)
    with pytest.raises(GradlabError, match="where class 11 of a pixel stands for none"):
        workload.load()


def test_pixels_of_no_class_count_neither_in_loss_nor_in_accuracy() -> None:
    workload, generator = datasets.get("camvid"), torch.Generator().manual_seed(0)
    logits = torch.randn(2, *SHAPE, 11, generator=generator)
    classes = torch.randint(11, (2, *SHAPE), generator=generator)
    classes[:, :5] = -100
    counted = classes >= 0
    expected = functional.cross_entropy(logits[counted], classes[counted])
    assert float(workload.loss(logits, classes)) == pytest.approx(float(expected), rel=1e-6)

    class Constant(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return logits[: len(x)]

    share = (logits.argmax(-1) == classes)[counted].double().mean()
    assert workload.score(Constant(), torch.zeros(2, 1), classes, batch_size=2) == pytest.approx(float(share))


# --- augmentation -------------------------------------------------------------------------------------------------


def _image_batch(size: int) -> torch.Tensor:
    return torch.rand(size, 3, 32, 32, generator=torch.Generator().manual_seed(0)) + 0.1


def test_a_random_crop_is_a_window_of_the_padded_image_and_reaches_every_offset() -> None:
    x = _image_batch(300)
    y = random_crop(x, 1, torch.Generator().manual_seed(1))
    padded = functional.pad(x, (1,) * 4)
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


# --- networks -----------------------------------------------------------------------------------------------------


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


def test_the_pyramid_holds_means_of_ever_smaller_regions() -> None:
    pooling = PyramidPooling(4, (1, 2))
    with torch.no_grad():
        for convolution in pooling.reduced:
            convolution.weight.fill_(1.0)  # type: ignore[operator, union-attr]
            convolution.bias.zero_()  # type: ignore[operator, union-attr]
    x = torch.rand(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    pooled = pooling(x)
    assert torch.equal(pooled[:, :4], x)
    whole = x.mean((2, 3)).sum()
    torch.testing.assert_close(pooled[:, 4:6], whole.expand(1, 2, 6, 6))
    quarters = functional.avg_pool2d(x, 3).sum(1, keepdim=True)
    oracle = functional.interpolate(quarters, (6, 6), mode="bilinear").expand(1, 2, 6, 6)
    torch.testing.assert_close(pooled[:, 6:], oracle)


def test_lgc_finds_the_first_and_the_last_layer() -> None:
    model = datasets.get("camvid").model(0)
    names = {layer.name for layer in layers_of(model)}
    groups = {group.name: group for group in lgc_plan(model, density=0.01).groups}
    large = {name for name, p in model.named_parameters() if p.ndim > 1}
    assert set(groups[GROUP].layers) == (large & names) - {"stem.weight", "head.weight"}
    assert groups["head.weight"].codec == "clt_k"
    assert not any("stem.weight" in group.layers for group in groups.values() if group.codec != "dense")


def test_a_new_network_gives_every_class_about_the_same_chance() -> None:
    x = torch.randn(40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    workload = datasets.get("fashion_mnist")
    with torch.no_grad():
        logits = workload.model(0)(x)
    assert logits.shape == (40, 10)
    assert workload.loss(logits, torch.arange(40) % 10).item() == pytest.approx(math.log(10), abs=0.2)


def test_the_segmenting_network_labels_every_pixel_and_learns(tmp_path: Path) -> None:
    workload = datasets.get("camvid")
    data, model = workload.load(_npz(tmp_path / "a.npz", _streets())), workload.model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        output = model(data.train_x)
        assert output.shape == (4, *SHAPE, 11)
        loss = workload.loss(output, data.train_y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().item())
    assert losses[-1] < 0.6 * losses[0]
