"""Muon for matrices and AdamW for the rest: two optimizers of one model, as torch.optim.Muon wants it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def muon_and_adamw(parameters: Iterable[torch.nn.Parameter], lr: float = 0.01) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for one in parameters:
        (matrices if one.ndim == 2 else others).append(one)
    return [torch.optim.Muon(matrices, lr=lr, ns_steps=1), torch.optim.AdamW(others, lr=lr / 4)]
