"""BERT's task on any text, byte by byte: predict the bytes that are hidden from a row.

Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of deep bidirectional transformers for language understanding"
(NAACL 2019), section 3.1 and appendix A.1: 15 % of the tokens are chosen. 80 % of these become the token MASK, 10 % a
random token, and 10 % stay. Rows are masked once, before training, and there are several copies of each row with other
masks, as in their appendix A.2. Bytes stand in for word pieces, so that no vocabulary has to be made or shipped. The
model is the BertForMaskedLM of transformers, with random weights and without dropout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import numpy as np
import torch
from torch import nn

from gradlab.datasets import Data, Workload
from gradlab.datasets.metric import IGNORED, PERPLEXITY
from gradlab.datasets.text import TextBytes
from gradlab.datasets.text_files import EXPECTED, read_texts, windows
from gradlab.datasets.workload import limited
from gradlab.errors import GradlabError

BYTES, MASK = 256, 256  # bytes are the tokens 0 to 255, and MASK is the next one
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1
COPIES = 2  # of each training row, with other masks


def masked(tokens: torch.Tensor, generator: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Hide bytes of rows.

    Args:
        tokens: int64 (rows, context), each a byte.
        generator: random numbers of the choice.

    Returns:
        Two int64 tensors (rows, context): the rows with hidden bytes, and the bytes to predict. Bytes that are not to
        be predicted are -100, which the loss leaves out.
    """
    shape = tuple(tokens.shape)
    chosen = torch.from_numpy(generator.random(shape) < CHOSEN)
    fate = torch.from_numpy(generator.random(shape))
    noise = torch.from_numpy(generator.integers(0, BYTES, shape))
    shown = torch.where(chosen & (fate < MASKED), torch.tensor(MASK), tokens)
    shown = torch.where(chosen & (fate >= 1 - RANDOM), noise, shown)
    return shown, torch.where(chosen, tokens, torch.tensor(IGNORED))


class MaskedLanguageModel(nn.Module):
    """Tokens (batch, context) -> logits of each token (batch, context, 257), by transformers' BertForMaskedLM."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        try:
            from transformers import BertConfig, BertForMaskedLM
        except ImportError:
            raise GradlabError(
                "workload masked_bytes needs transformers: pip install 'gradlab[transformers]'"
            ) from None
        self.language_model = BertForMaskedLM(
            BertConfig(
                vocab_size=BYTES + 1,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=4 * width,
                max_position_embeddings=context,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.language_model(input_ids=tokens).logits


@final
class MaskedBytes(Workload):
    """Any text by bytes, 15 % of them to be predicted from those around them; a small BERT.

    width: elements of a token's vector.
    layers: blocks.
    heads: number of attention heads.
    context: tokens in a row.
    """

    name = "masked_bytes"
    recipe = replace(
        TextBytes.recipe,
        learning_rate=2e-3,
        weight_decay=0.01,
        batch_size=8,
        steps=600,
        warmup_steps=100,
        clip_norm=1.0,
        decays_vectors=False,
    )
    metric = PERPLEXITY
    needs_path = True

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 3, context: int = 64) -> None:
        self.width, self.layers, self.heads, self.context = width, layers, heads, context

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load rows of bytes with some of them hidden, and what is hidden; a limit keeps the first so many rows."""
        train, test = read_texts(self.required(path, EXPECTED))
        generator = np.random.default_rng(0)
        parts = []
        for text, copies, limit, split in ((train, COPIES, train_limit, "train"), (test, 1, test_limit, "test")):
            rows, _ = windows(np.frombuffer(text.content, np.uint8), self.context, text.source)
            rows = rows[: limited(len(rows), limit, split)]
            parts += masked(rows.repeat(copies, 1), generator)
        return Data(*parts)

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return MaskedLanguageModel(self.width, self.layers, self.heads, self.context)
