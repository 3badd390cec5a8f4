"""Tasks of many kinds, small enough for a thousand trainings on a CPU: what `pilots.py` tries plans on.

A task is a function of a seed that returns a `Training`. Data are made up from the seed, or read from a folder of
public sets (`--data`): Fashion-MNIST, CIFAR-10 and CamVid as NPZ files, Tiny Shakespeare and WikiText-2 as text.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, ...]


@dataclass
class Training:
    """A model with what trains it.

    draw: makes a rank's batch with a generator; loss: of a model and a batch; rate: factor on the learning rate, by the
    share of training that is over; clip: norm of the gradient, 0 for none.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    rate: Callable[[float], float] = lambda over: 1.0
    clip: float = 0.0


@dataclass(frozen=True)
class Task:
    """make: of a seed and the data's folder; ranks; steps of a whole training."""

    make: Callable[[int, Path], Training]
    ranks: int = 2
    steps: int = 240


def cosine(over: float) -> float:
    """Warm up over a twentieth, then fall to a twentieth."""
    return min(1.0, over * 20) * (0.05 + 0.475 * (1 + math.cos(math.pi * over)))


def stairs(over: float) -> float:
    """A tenth from 60 % on, a hundredth from 85 % on."""
    return 1.0 if over < 0.6 else 0.1 if over < 0.85 else 0.01


@functools.cache
def _images(data: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The first 10,000 training images (images, channels, height, width), between -1 and 1, with their classes."""
    with np.load(data / f"{name}.npz", allow_pickle=False) as file:
        images, classes = file["x_train"][:10_000], file["y_train"][:10_000]
    found = torch.from_numpy(images.astype(np.float32) / 127.5 - 1)
    found = found.unsqueeze(1) if found.ndim == 3 else found.permute(0, 3, 1, 2).contiguous()
    return found, torch.from_numpy(classes.astype(np.int64))


@functools.cache
def _halved(data: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    images, classes = _images(data, name)
    return functional.avg_pool2d(images, 2), classes


@functools.cache
def _characters(data: Path) -> tuple[torch.Tensor, int]:
    text = np.frombuffer((data / "tinyshakespeare.txt").read_bytes(), dtype=np.uint8)
    known, codes = np.unique(text, return_inverse=True)
    return torch.from_numpy(codes.astype(np.int64)), len(known)


def _drawn(images: torch.Tensor, classes: torch.Tensor, size: int, generator: torch.Generator) -> Batch:
    chosen = torch.randint(len(images), (size,), generator=generator)
    return images[chosen], classes[chosen]


def _windows(text: torch.Tensor, size: int, length: int, generator: torch.Generator) -> Batch:
    starts = torch.randint(len(text) - length - 1, (size, 1), generator=generator)
    found = text[starts + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]


def _classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


class ViT(nn.Module):
    """Patches of 7 x 7, two layers of width 64."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 64, 7, 7)
        self.places = nn.Parameter(0.02 * torch.randn(16, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Score classes."""
        return self.head(self.layers(self.patches(images).flatten(2).mT + self.places).mean(1))


def vit(seed: int, data: Path) -> Training:
    """Fashion-MNIST, AdamW."""
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    return Training(
        model, optimizer, functools.partial(_drawn, *_images(data, "fashion_mnist"), 16), _classified, cosine
    )


class UNet(nn.Module):
    """Two levels, with a connection across."""

    def __init__(self, channels: int, width: int, times: bool = False) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(channels + times, width, 3, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out1 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.out2 = nn.Conv2d(width, channels, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of the same size."""
        first = functional.silu(self.down1(images))
        second = functional.silu(self.middle(functional.silu(self.down2(first))))
        return self.out2(functional.silu(self.out1(torch.cat([first, self.up(second)], 1))))


def _noisy(images: torch.Tensor, size: int, generator: torch.Generator) -> Batch:
    chosen = images[torch.randint(len(images), (size,), generator=generator)]
    return chosen + 0.3 * torch.randn(chosen.shape, generator=generator), chosen


def unet(seed: int, data: Path) -> Training:
    """Take noise off images of CIFAR-10, Adam."""
    model = UNet(3, 16)
    draw = functools.partial(_noisy, _halved(data, "cifar10")[0], 8)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return Training(model, optimizer, draw, lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]))


def _diffused(images: torch.Tensor, size: int, generator: torch.Generator) -> Batch:
    chosen = images[torch.randint(len(images), (size,), generator=generator)]
    level = torch.rand(size, 1, 1, 1, generator=generator)
    noise = torch.randn(chosen.shape, generator=generator)
    mixed = torch.cos(level * math.pi / 2) * chosen + torch.sin(level * math.pi / 2) * noise
    return torch.cat([mixed, level.expand(-1, 1, *chosen.shape[2:])], 1), noise


def diffusion(seed: int, data: Path) -> Training:
    """Predict the noise of diffused Fashion-MNIST images, AdamW."""
    model = UNet(1, 32, times=True)
    draw = functools.partial(_diffused, _halved(data, "fashion_mnist")[0], 4)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    loss = lambda model, batch: functional.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    return Training(model, optimizer, draw, loss, cosine)


class Recurrent(nn.Module):
    """An LSTM of one layer on characters."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(letters, 48), nn.LSTM(48, 96, batch_first=True)
        self.head = nn.Linear(96, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Score the next characters."""
        return self.head(self.lstm(self.embedding(text))[0])


def lstm(seed: int, data: Path) -> Training:
    """Characters of Shakespeare, SGD with momentum and clipping."""
    text, letters = _characters(data)
    model = Recurrent(letters)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    return Training(model, optimizer, functools.partial(_windows, text, 8, 32), _classified, cosine, clip=0.5)


class GPT(nn.Module):
    """Two causal layers of width 64 on characters."""

    def __init__(self, letters: int, length: int = 32) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(letters, 64), nn.Embedding(length, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
        self.head = nn.Linear(64, letters, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Score the next characters."""
        places = self.places(torch.arange(text.shape[1]))
        return self.head(self.layers(self.embedding(text) + places, self.mask, is_causal=True))


def gpt(seed: int, data: Path) -> Training:
    """Characters of Shakespeare, AdamW with clipping and dropout."""
    text, letters = _characters(data)
    model = GPT(letters)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return Training(model, optimizer, functools.partial(_windows, text, 4, 32), _classified, cosine, clip=1.0)


def _mlp(*widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def tabular(seed: int, data: Path) -> Training:
    """A regression on 40 columns of which a network that is not trained makes the target; Nesterov's momentum."""
    teacher, columns = _mlp(40, 64, 64, 1), torch.randn(40)
    model = _mlp(40, 128, 128, 1)

    def draw(generator: torch.Generator) -> Batch:
        rows = torch.randn(32, 40, generator=generator) * columns
        with torch.no_grad():
            return rows, 10 * teacher(rows) + 0.1 * torch.randn(32, 1, generator=generator)

    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True)
    return Training(model, optimizer, draw, lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]), stairs)


class Recommender(nn.Module):
    """Embeddings of users and items, and a network on their products."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(500, 32), nn.Embedding(300, 32)
        self.head = _mlp(32, 64, 1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Score pairs."""
        return self.head(self.users(pairs[:, 0]) * self.items(pairs[:, 1])).squeeze(1)


def recommender(seed: int, data: Path) -> Training:
    """Clicks of 500 users on 300 items, few of which have most of them; Adam."""
    tastes, kinds = torch.randn(500, 8), torch.randn(300, 8)
    model = Recommender()

    def draw(generator: torch.Generator) -> Batch:
        uniform = torch.rand(128, 2, generator=generator)
        pairs = (uniform**3 * torch.tensor([500, 300])).long()
        liking = (tastes[pairs[:, 0]] * kinds[pairs[:, 1]]).sum(1)
        return pairs, (liking + torch.randn(128, generator=generator) > 0).float()

    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    loss = lambda model, batch: functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])  # noqa: E731
    return Training(model, optimizer, draw, loss)


def contrastive(seed: int, data: Path) -> Training:
    """Two noisy views of Fashion-MNIST images find each other among 32; AdamW."""
    images = _halved(data, "fashion_mnist")[0].flatten(1)
    model = _mlp(196, 128, 128, 32)

    def draw(generator: torch.Generator) -> Batch:
        chosen = images[torch.randint(len(images), (32,), generator=generator)]
        views = (chosen + 0.5 * torch.randn(2, *chosen.shape, generator=generator)).unbind()
        return tuple(view * (torch.rand(view.shape, generator=generator) > 0.3) for view in views)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        first, second = (functional.normalize(model(view), dim=1) for view in batch)
        return functional.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))

    return Training(model, torch.optim.AdamW(model.parameters(), 1e-3), draw, loss, cosine)


class Adapted(nn.Module):
    """A linear layer that stays, and a change of rank 8 that is trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(8, layer.in_features) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply both."""
        return self.layer(values) + values @ self.down.T @ self.up.T


def lora(seed: int, data: Path) -> Training:
    """A network for five of Fashion-MNIST's classes is adapted to the others by changes of rank 8; AdamW."""
    images, classes = _halved(data, "fashion_mnist")
    images, old = images.flatten(1), classes < 5
    model = _mlp(196, 256, 256, 5)
    before, generator = torch.optim.AdamW(model.parameters(), 1e-3), torch.Generator().manual_seed(seed)
    for _ in range(200):
        before.zero_grad()
        _classified(model, _drawn(images[old], classes[old], 64, generator)).backward()
        before.step()
    for at in (0, 2, 4):
        model[at] = Adapted(model[at])  # type: ignore[arg-type]
    draw = functools.partial(_drawn, images[~old], classes[~old] - 5, 16)
    trained = [one for one in model.parameters() if one.requires_grad]
    return Training(model, torch.optim.AdamW(trained, 2e-3), draw, _classified, cosine)


class Residual(nn.Module):
    """Convolutions with group norms, added to what came in."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, stride, 1), nn.Conv2d(after, after, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of `after` channels."""
        inner = functional.relu(self.norm1(self.first(images)))
        return functional.relu(self.norm2(self.second(inner)) + self.short(images))


def resnet(seed: int, data: Path) -> Training:
    """CIFAR-10 in 16 x 16, batch norm, SGD with momentum and stairs."""
    blocks = [Residual(3, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    return Training(model, optimizer, functools.partial(_drawn, *_halved(data, "cifar10"), 8), _classified, stairs)


def images(seed: int, data: Path) -> Training:
    """Fashion-MNIST, an MLP, plain SGD with momentum at a constant rate."""
    pictures, classes = _halved(data, "fashion_mnist")
    model = _mlp(196, 128, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return Training(model, optimizer, functools.partial(_drawn, pictures.flatten(1), classes, 16), _classified)


class ChannelsLast(nn.Module):
    """Moves classes behind an image's places."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        """Return (images, height, width, classes)."""
        return scores.movedim(1, -1)


def segmentation(seed: int, data: Path) -> Training:
    """CamVid's road scenes in 45 x 60, group norm, SGD with momentum."""
    with np.load(data / "camvid_small.npz", allow_pickle=False) as file:
        pictures = torch.from_numpy(file["x_train"][:, ::4, ::4].astype(np.float32) / 127.5 - 1).movedim(-1, 1)
        classes = torch.from_numpy(file["y_train"][:, ::4, ::4].astype(np.int64))
    parts: list[nn.Module] = []
    for before, after, wide in ((3, 24, 1), (24, 48, 2), (48, 48, 4), (48, 24, 1)):
        convolution = nn.Conv2d(before, after, 3, padding=wide, dilation=wide)
        parts += [convolution, nn.GroupNorm(4, after), nn.ReLU()]
    model = nn.Sequential(*parts, nn.Conv2d(24, 12, 1), ChannelsLast())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    return Training(model, optimizer, functools.partial(_drawn, pictures, classes, 2), _classified, cosine)


def vgg(seed: int, data: Path) -> Training:
    """CIFAR-10 in 16 x 16, convolutions without any norm, RMSprop with stairs."""
    widths = (3, 24, 48, 64)
    parts: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        parts += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*parts, nn.Flatten(), _mlp(256, 128, 10))
    optimizer = torch.optim.RMSprop(model.parameters(), 5e-4)
    return Training(model, optimizer, functools.partial(_drawn, *_halved(data, "cifar10"), 16), _classified, stairs)


class Words(nn.Module):
    """A GRU of one layer on words."""

    def __init__(self, known: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(known, 48), nn.GRU(48, 96, batch_first=True)
        self.head = nn.Linear(96, known)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Score the next words."""
        return self.head(self.gru(self.embedding(text))[0])


def words(seed: int, data: Path) -> Training:
    """WikiText-2's thousand most frequent words, NAdam at a constant rate."""
    text = (data / "wikitext2" / "train.txt").read_text("utf-8").split()[:100_000]
    known = {word: code for code, (word, _) in enumerate(Counter(text).most_common(1000), 1)}
    codes = torch.tensor([known.get(word, 0) for word in text])
    model = Words(1001)
    draw = functools.partial(_windows, codes, 8, 24)
    return Training(model, torch.optim.NAdam(model.parameters(), 2e-3), draw, _classified)


TASKS: dict[str, Task] = {
    "tabular": Task(tabular, steps=300),
    "LoRA": Task(lora, steps=480),
    "LSTM": Task(lstm),
    "U-Net": Task(unet),
    "recommender": Task(recommender, steps=300),
    "contrastive": Task(contrastive),
    "ViT": Task(vit, steps=200),
    "MLP": Task(images, steps=300),
    "diffusion": Task(diffusion, steps=200),
    "GPT": Task(gpt, steps=200),
    "ResNet": Task(resnet, steps=200),
}
#: No law of gradlab's was fitted or chosen on these: promise.py alone has them.
UNSEEN: dict[str, Task] = {
    "segmentation": Task(segmentation, steps=200),
    "VGG": Task(vgg, steps=300),
    "words": Task(words, steps=200),
}


def made(name: str, seed: int, data: Path) -> tuple[Task, Training]:
    """Make a task's training, from its seed alone."""
    torch.manual_seed(1000 + seed)
    task = (TASKS | UNSEEN)[name]
    return task, task.make(seed, data)


def parameters_of(training: Training) -> dict[str, Any]:
    """Trained parameters by name."""
    return {name: one for name, one in training.model.named_parameters() if one.requires_grad}
