"""The camvid workload: pictures with a class for every pixel; pixels of no class; bad files; the network learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from gradlab import datasets
from gradlab.datasets.cifar10 import normalized
from gradlab.datasets.pspnet import PyramidPooling
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import lgc_plan
from gradlab.plan.lgc_recipe import GROUP

WORKLOAD = datasets.get("camvid")
SHAPE = (24, 32)


def _arrays(train: int = 4, test: int = 2) -> dict[str, np.ndarray]:
    """Bands of brightness, each of one class; the last row of every picture of none."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for split, count in (("train", train), ("test", test)):
        classes = rng.integers(0, 11, (count, 3, 4)).repeat(8, 1).repeat(8, 2).astype(np.uint8)
        arrays[f"x_{split}"] = (20 * classes[..., None] + rng.integers(0, 10, (count, *SHAPE, 3))).astype(np.uint8)
        classes[:, -1] = 11
        arrays[f"y_{split}"] = classes
    return arrays


def _npz(path: Path, **changes: object) -> str:
    arrays = {**_arrays(), **changes}
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})  # type: ignore[arg-type]
    return str(path)


def test_pictures_are_normalised_and_unlabelled_pixels_have_no_class(tmp_path: Path) -> None:
    data, arrays = WORKLOAD.load(_npz(tmp_path / "a.npz"), train_limit=3), _arrays()
    assert torch.equal(data.train_x, normalized(arrays["x_train"][:3]))
    assert data.train_y.shape == (3, *SHAPE)
    assert torch.equal(data.test_y[:, :-1], torch.from_numpy(arrays["y_test"][:, :-1].astype(np.int64)))
    assert bool((data.test_y[:, -1] == -100).all())


def test_pixels_of_no_class_count_neither_in_loss_nor_in_accuracy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, *SHAPE, 11, generator=generator)
    classes = torch.randint(11, (2, *SHAPE), generator=generator)
    classes[:, :5] = -100
    counted = classes >= 0
    expected = functional.cross_entropy(logits[counted], classes[counted])
    assert float(WORKLOAD.loss(logits, classes)) == pytest.approx(float(expected), rel=1e-6)

    class Constant(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return logits[: len(x)]

    share = (logits.argmax(-1) == classes)[counted].double().mean()
    assert WORKLOAD.score(Constant(), torch.zeros(2, 1), classes, batch_size=2) == pytest.approx(float(share))


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


def test_the_network_labels_every_pixel_and_learns(tmp_path: Path) -> None:
    data, model = WORKLOAD.load(_npz(tmp_path / "a.npz")), WORKLOAD.model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        output = model(data.train_x)
        assert output.shape == (4, *SHAPE, 11)
        loss = WORKLOAD.loss(output, data.train_y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().item())
    assert losses[-1] < 0.6 * losses[0]


def test_lgc_finds_the_first_and_the_last_layer() -> None:
    model = WORKLOAD.model(0)
    names = {layer.name for layer in layers_of(model)}
    groups = {group.name: group for group in lgc_plan(model, density=0.01).groups}
    large = {name for name, p in model.named_parameters() if p.ndim > 1}
    assert set(groups[GROUP].layers) == (large & names) - {"stem.weight", "head.weight"}
    assert groups["head.weight"].codec == "clt_k"
    assert not any("stem.weight" in group.layers for group in groups.values() if group.codec != "dense")


BAD: dict[str, tuple[dict[str, object], str]] = {
    "no key": ({"y_train": None}, "no array y_train; expected x_train, y_train, x_test, y_test"),
    "grey": ({"x_train": np.zeros((4, *SHAPE), np.uint8)}, "expected uint8 of shape (samples, height, width, 3)"),
    "a class per picture": ({"y_train": np.zeros(4, int)}, "y_train is int64 of shape (4,), expected integers of"),
    "other size": ({"x_test": np.zeros((2, 8, 8, 3), np.uint8)}, "x_test is uint8 of shape (2, 8, 8, 3), expected"),
    "huge": ({"x_train": np.zeros((1, 1, 4096, 3), np.uint8)}, "with sides of at most 2048"),
    "fewer": ({"y_test": np.zeros((1, *SHAPE), np.uint8)}, "2 test images but 1 labels"),
    "a thirteenth class": ({"y_test": np.full((2, *SHAPE), 12, np.uint8)}, "y_test runs from 12 to 12, expected 0 to"),
    "no class at all": ({"y_test": np.full((2, *SHAPE), 11, np.uint8)}, "y_test: no pixel has a class, all are 11"),
    "objects": ({"x_train": np.array([print] * 4)}, "x_train is object"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = BAD[case]
    path = _npz(tmp_path / "a.npz", **changes)
    with pytest.raises(GradlabError) as caught:
        WORKLOAD.load(path)
    assert str(caught.value).startswith(path)
    assert message in str(caught.value)


def test_pictures_smaller_than_the_network_can_read_are_refused(tmp_path: Path) -> None:
    small = {key: value[:, :8, :8] for key, value in _arrays().items()}
    with pytest.raises(GradlabError, match="pictures of 8 x 8, expected sides of at least 16"):
        WORKLOAD.load(_npz(tmp_path / "a.npz", **small))


def test_what_is_no_file_and_a_truncated_one_are_refused(tmp_path: Path) -> None:
    whole = Path(_npz(tmp_path / "a.npz"))
    whole.write_bytes(whole.read_bytes()[:-900])
    for path, message in (
        (None, "camvid needs a path: an .npz"),
        (tmp_path / "gone", "no such file"),
        (tmp_path, "not a regular file"),
        (whole, "damaged or truncated .npz"),
    ):
        with pytest.raises(GradlabError, match=message):
            WORKLOAD.load(None if path is None else str(path))
