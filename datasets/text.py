"""Language modelling of the user's text, by bytes, by characters or by words, with a small transformer.

Every token is predicted from the tokens before it in its row of `context` tokens. See `transformer` for the model,
`tokens` for characters and words, `text_files` for the files and the split. By bytes: Al-Rfou et al.,
"Character-Level Language Modeling with Deeper Self-Attention" (2019). By characters: Karpathy, nanoGPT. By words:
Merity et al. (2016), whose WikiText files are read as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import final

import numpy as np
from torch import nn

from gradlab.datasets.metric import BITS_PER_BYTE, NATS_PER_CHARACTER, PERPLEXITY
from gradlab.datasets.recipe import Recipe
from gradlab.datasets.text_files import EXPECTED, Cut, Text, decoded, every_window, read_texts, windows
from gradlab.datasets.tokens import build_alphabet, build_vocabulary, encode_characters, encode_words
from gradlab.datasets.transformer import TransformerSize, initialized
from gradlab.datasets.workload import Data, Workload, limited

_BYTES = 256


class _Text(Workload):
    """A text as rows of tokens, and a transformer small enough to learn it on two processors.

    AdamW as in Brown et al., "Language Models are Few-Shot Learners" (2020); size and recipe are our own.
    """

    recipe = Recipe(
        learning_rate=1e-3,
        momentum=0.9,
        weight_decay=0.1,
        batch_size=16,
        steps=2000,
        warmup_steps=50,
        optimizer="adamw",
        second_momentum=0.95,
    )
    needs_path = True
    size: TransformerSize
    cut: Cut  # where a single file may be split into training and test
    overlapping = False  # whether training rows begin at every token, or follow each other

    @final
    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load rows of tokens, and each token's successor; a limit keeps the first so many rows."""
        train, test = read_texts(self.required(path, EXPECTED), self.cut)
        train_tokens, test_tokens = self.encode(train, test)
        x, y = (every_window if self.overlapping else windows)(train_tokens, self.size.context, train.source)
        kept = limited(len(x), train_limit, "train")
        test_x, test_y = windows(test_tokens, self.size.context, test.source)
        tested = limited(len(test_x), test_limit, "test")
        return Data(x[:kept], y[:kept], test_x[:tested], test_y[:tested])

    @abstractmethod
    def encode(self, train: Text, test: Text) -> tuple[np.ndarray, np.ndarray]:
        """Turn both texts into token numbers, integers (tokens,)."""

    @final
    def model(self, seed: int) -> nn.Module:
        return initialized(self.size, seed)


@final
class TextBytes(_Text):
    """Any file, byte by byte: 256 tokens; four layers of width 128, 842,496 parameters at a context of 128 bytes.

    context: tokens in a row, and positions of the model.
    """

    name = "text_bytes"
    metric = BITS_PER_BYTE
    interim_samples = 100
    cut = "bytes"

    def __init__(self, context: int = 128) -> None:
        self.size = TransformerSize(vocabulary=_BYTES, context=context)

    def encode(self, train: Text, test: Text) -> tuple[np.ndarray, np.ndarray]:
        return np.frombuffer(train.content, np.uint8), np.frombuffer(test.content, np.uint8)


@final
class TextChars(_Text):
    """nanoGPT's Shakespeare by characters, at its settings for CPUs: 65 tokens, four layers of width 128, no biases.

    The model has 804,096 parameters. nanoGPT's readme gives a validation loss of 1.88 after 2,000 iterations of one
    process with 12 rows; that is what N ranks with 12 / N rows each compute. As there, a training row begins anywhere
    in the text, the alphabet is that of the whole text, and the first 90 % are for training. Three things differ: rows
    are drawn without replacement, the warm-up reaches its peak one step sooner, and the loss is of the whole validation
    split in place of 20 random batches. Rows of the test split do not overlap.

    A text with more characters than the vocabulary has one token for all its rarest ones.

    context: tokens in a row, and positions of the model.
    vocabulary: tokens of the model; a text may use fewer.
    width, layers, heads: sizes of the model, as in `TransformerSize`.
    """

    name = "text_chars"
    recipe = replace(
        _Text.recipe,
        batch_size=12,
        warmup_steps=100,
        second_momentum=0.99,
        end_factor=0.1,
        clip_norm=1.0,
        decays_vectors=False,
    )
    metric = NATS_PER_CHARACTER
    interim_samples = 240
    cut = "characters"
    overlapping = True

    def __init__(
        self, context: int = 64, vocabulary: int = 65, width: int = 128, layers: int = 4, heads: int = 4
    ) -> None:
        self.size = TransformerSize(vocabulary, context, width, layers, heads, bias=False)

    def encode(self, train: Text, test: Text) -> tuple[np.ndarray, np.ndarray]:
        first, second = decoded(train), decoded(test)
        alphabet = build_alphabet(first + second, self.size.vocabulary)
        return encode_characters(first, alphabet), encode_characters(second, alphabet)


@final
class TextWords(_Text):
    """A UTF-8 text, word by word: four layers of width 128, 1,850,112 parameters at 8,192 tokens and a context of 64.

    Perplexities are comparable only between equal vocabularies, as <unk> counts as a word and is easy to predict. The
    vocabulary is that of the whole training text, so that a limit changes no token.

    context: tokens in a row, and positions of the model.
    vocabulary: tokens of the model, <unk> and <eos> included; a short text may use fewer.
    """

    name = "text_words"
    metric = PERPLEXITY
    interim_samples = 50
    cut = "words"

    def __init__(self, context: int = 64, vocabulary: int = 8192) -> None:
        self.size = TransformerSize(vocabulary=vocabulary, context=context)

    def encode(self, train: Text, test: Text) -> tuple[np.ndarray, np.ndarray]:
        first, second = decoded(train), decoded(test)
        vocabulary = build_vocabulary(first, self.size.vocabulary)
        return encode_words(first, vocabulary), encode_words(second, vocabulary)
