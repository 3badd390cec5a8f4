"""A small language model: a decoder-only transformer, normalised before each branch.

Vaswani et al., "Attention Is All You Need" (2017), eq. 1, with the causal mask of section 3.2.3; Radford et al.,
"Language Models are Unsupervised Multitask Learners" (GPT-2, 2019), section 2.3: normalisation at the input of each
branch and once at the end, learned positions, initialisation. The output layer is the token embedding itself (Press
and Wolf, "Using the Output Embedding to Improve Language Models", 2017), as in GPT-2. That halves the parameters of the
vocabulary, and makes every row of their gradient dense. There is no dropout: gradients follow from data and parameters
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from gradlab.errors import GradlabError

_DEVIATION = 0.02  # of initial weights (GPT-2)


@dataclass(frozen=True)
class TransformerSize:
    """Sizes of the model, which are refused below 1, or if the heads cannot share the width."""

    vocabulary: int  # tokens
    context: int  # positions, in tokens
    width: int = 128  # elements of a token's vector
    layers: int = 4  # blocks
    heads: int = 4  # of attention; each has width / heads elements
    bias: bool = True  # of linear layers and normalisations

    def __post_init__(self) -> None:
        for setting in ("vocabulary", "context", "width", "layers", "heads"):
            if getattr(self, setting) < 1:
                raise GradlabError(f"transformer: {setting} is {getattr(self, setting)}, expected at least 1")
        if self.width % self.heads:
            raise GradlabError(f"transformer: width {self.width} cannot be shared by {self.heads} heads")


class SelfAttention(nn.Module):
    """Causal attention over heads: (batch, length, width) -> the same. Position t sees positions up to t."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=size.bias)
        self.out = nn.Linear(size.width, size.width, bias=size.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): (batch, length, width) -> the same."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width, bias=size.bias)
        self.attention = SelfAttention(size)
        self.norm2 = nn.LayerNorm(size.width, bias=size.bias)
        self.hidden = nn.Linear(size.width, 4 * size.width, bias=size.bias)
        self.out = nn.Linear(4 * size.width, size.width, bias=size.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.out(functional.gelu(self.hidden(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens (batch, length), length <= context -> logits of each next token (batch, length, vocabulary)."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width, bias=size.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.size.context:
            raise GradlabError(f"{length} tokens in a row: this transformer has {self.size.context} positions")
        places = torch.arange(length, device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return functional.linear(x, self.tokens.weight)


def initialized(size: TransformerSize, seed: int) -> Transformer:
    """Build a transformer on the CPU whose values follow from the seed alone.

    Weights are normal with deviation 0.02, divided by sqrt(2 layers) where a branch ends (GPT-2, section 2.3).
    """
    # Layers draw their default values from the global generator: those draws are undone, then overwritten.
    with torch.random.fork_rng(devices=[]):
        network = Transformer(size)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            returns = name.endswith("out.weight")
            deviation = _DEVIATION * (2 * size.layers) ** -0.5 if returns else _DEVIATION
            nn.init.normal_(parameter, std=deviation, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return network
