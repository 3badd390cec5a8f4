"""Language modelling of the user's text, by bytes, by characters or by words, with a small transformer.

Every token is predicted from the tokens before it in its row of `context` tokens. See `transformer` for the model,
`vocabulary` for words, `characters` for characters, `text_files` for the files and the split. By bytes: Al-Rfou et al.,
"Character-Level Language Modeling with Deeper Self-Attention" (2019). By characters: Karpathy, nanoGPT. By words:
Merity et al. (2016), whose WikiText files are read as they are.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import nn

from gradlab.datasets.characters import build_alphabet, encode_characters
from gradlab.datasets.metric import BITS_PER_BYTE, NATS_PER_CHARACTER, PERPLEXITY
from gradlab.datasets.recipe import Recipe
from gradlab.datasets.text_files import EXPECTED, Text, decoded, every_window, read_texts, windows
from gradlab.datasets.transformer import TransformerSize, initialized
from gradlab.datasets.vocabulary import build_vocabulary, encode
from gradlab.datasets.workload import Data, Workload, limited
from gradlab.errors import GradlabError

_BYTES = 256
_RECIPE = Recipe(
    learning_rate=1e-3,
    momentum=0.9,
    weight_decay=0.1,
    batch_size=16,
    steps=2000,
    warmup_steps=50,
    optimizer="adamw",
    second_momentum=0.95,
)
_PAIRING = "no paper: a transformer small enough to learn text on two processors; AdamW as in Brown et al. 2020"


@final
class TextBytes(Workload):
    """Any file, byte by byte: 256 tokens; four layers of width 128, 842,496 parameters at a context of 128 bytes.

    context: tokens in a row, and positions of the model.
    """

    name = "text_bytes"
    description = "any text by bytes (a file or folder you give), transformer of 4 layers"
    pairing = _PAIRING
    recipe = _RECIPE
    metric = BITS_PER_BYTE
    needs_path = True
    interim_samples = 100

    def __init__(self, context: int = 128) -> None:
        self.size = TransformerSize(vocabulary=_BYTES, context=context)

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load rows of bytes, and each byte's successor; a limit keeps the first so many rows."""
        train, test = read_texts(_required(path, self.name))
        tokens = [np.frombuffer(text.content, np.uint8) for text in (train, test)]
        return _data(tokens, (train, test), self.size.context, train_limit, test_limit)

    def model(self, seed: int) -> nn.Module:
        return initialized(self.size, seed)

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return `x` unchanged: a changed byte is another text."""
        return x


@final
class TextChars(Workload):
    """nanoGPT's Shakespeare by characters, at its settings for CPUs: 65 tokens, four layers of width 128, no biases.

    The model has 804,096 parameters. nanoGPT's readme gives a validation loss of 1.88 after 2,000 iterations of one
    process with 12 rows; that is what N ranks with 12 / N rows each compute. As there, a training row begins anywhere
    in the text, the alphabet is that of the whole text, and the first 90 % are for training. Three things differ: rows
    are drawn without replacement, the warm-up reaches its peak one step sooner, and the loss is of the whole validation
    split in place of 20 random batches.

    A text with more characters than the vocabulary has one token for all its rarest ones.

    context: tokens in a row, and positions of the model.
    vocabulary: tokens of the model; a text may use fewer.
    width, layers, heads: of the model, as `TransformerSize` has them.
    """

    name = "text_chars"
    description = "text by characters (Tiny Shakespeare), nanoGPT's transformer of 4 layers and its AdamW"
    pairing = "Karpathy, nanoGPT: config/train_shakespeare_char.py with the readme's settings for CPUs"
    recipe = Recipe(
        learning_rate=1e-3,
        momentum=0.9,
        weight_decay=0.1,
        batch_size=12,
        steps=2000,
        warmup_steps=100,
        optimizer="adamw",
        second_momentum=0.99,
        end_factor=0.1,
        clip_norm=1.0,
        decays_vectors=False,
    )
    metric = NATS_PER_CHARACTER
    needs_path = True
    interim_samples = 240

    def __init__(
        self, context: int = 64, vocabulary: int = 65, width: int = 128, layers: int = 4, heads: int = 4
    ) -> None:
        self.size = TransformerSize(vocabulary, context, width, layers, heads, bias=False)

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load rows of characters, and each character's successor; a limit keeps the first so many rows.

        Training rows begin at every place of the text; test rows do not overlap.
        """
        texts = read_texts(_required(path, self.name), between_characters=True)
        train, test = (decoded(text) for text in texts)
        alphabet = build_alphabet(train + test, self.size.vocabulary)
        x, y = every_window(encode_characters(train, alphabet), self.size.context, texts[0].source)
        kept = limited(len(x), train_limit, "train")
        test_x, test_y = windows(encode_characters(test, alphabet), self.size.context, texts[1].source)
        tested = limited(len(test_x), test_limit, "test")
        return Data(x[:kept], y[:kept], test_x[:tested], test_y[:tested])

    def model(self, seed: int) -> nn.Module:
        return initialized(self.size, seed)

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return `x` unchanged: a changed character is another text."""
        return x


@final
class TextWords(Workload):
    """A UTF-8 text, word by word: four layers of width 128, 1,850,112 parameters at 8,192 tokens and a context of 64.

    Perplexities are comparable only between equal vocabularies, as <unk> counts as a word and is easy to predict.

    context: tokens in a row, and positions of the model.
    vocabulary: tokens of the model, <unk> and <eos> included; a short text may use fewer.
    """

    name = "text_words"
    description = "text by words (a file, or a folder as WikiText's), 8192 words, transformer of 4 layers"
    pairing = _PAIRING
    recipe = _RECIPE
    metric = PERPLEXITY
    needs_path = True
    interim_samples = 50

    def __init__(self, context: int = 64, vocabulary: int = 8192) -> None:
        self.size = TransformerSize(vocabulary=vocabulary, context=context)

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load rows of words, and each word's successor; a limit keeps the first so many rows.

        The vocabulary is that of the whole training text, so that a limit changes no token.
        """
        train, test = read_texts(_required(path, self.name), between_words=True)
        lines = [decoded(text) for text in (train, test)]
        vocabulary = build_vocabulary(lines[0], self.size.vocabulary)
        tokens = [encode(line, vocabulary) for line in lines]
        return _data(tokens, (train, test), self.size.context, train_limit, test_limit)

    def model(self, seed: int) -> nn.Module:
        return initialized(self.size, seed)

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return `x` unchanged: a changed word is another text."""
        return x


def _required(path: str | None, name: str) -> str:
    if path is None:
        raise GradlabError(f"workload {name} needs a path: {EXPECTED}")
    return path


def _data(
    tokens: list[np.ndarray], texts: tuple[Text, Text], context: int, train_limit: int | None, test_limit: int | None
) -> Data:
    parts: list[torch.Tensor] = []
    for row, text, limit, split in zip(tokens, texts, (train_limit, test_limit), ("train", "test"), strict=True):
        x, y = windows(row, context, text.source)
        kept = limited(len(x), limit, split)
        parts += [x[:kept], y[:kept]]
    return Data(*parts)
