"""Metrics of a trained model: a figure with a name, a direction and a form, from the logits on the test split.

Perplexity, bits per byte and nats per character are one quantity, the mean negative log likelihood H in nats of a
token: exp(H), H / ln 2 where a token is a byte, and H where a token is a character (Jelinek et al., "Perplexity - a
measure of the difficulty of speech recognition tasks", 1977; Graves, "Generating Sequences With Recurrent Neural
Networks", 2013, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from gradlab.metric import Metric

_LARGEST_EXPONENT = 700.0  # beyond it exp leaves the range of a float


@dataclass(frozen=True)
class LogitMetric(Metric):
    """A metric that is a function of a mean over predictions: of_mean(total(logits, classes) / predictions).

    total: logits (predictions, classes) and true classes (predictions,) -> the sum, a scalar.
    of_mean: the mean -> the metric.
    """

    total: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    of_mean: Callable[[float], float]


def _right(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(1) == classes).sum()


def _nats(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, classes, reduction="none").double().sum()


def _exponential(nats: float) -> float:
    return math.inf if nats > _LARGEST_EXPONENT else math.exp(nats)


IGNORED = -100  # torch's value: a prediction of this class is left out
ACCURACY = LogitMetric("accuracy", "higher", "percent", _right, float)
PIXEL_ACCURACY = LogitMetric("pixel accuracy", "higher", "percent", _right, float)
PERPLEXITY = LogitMetric("perplexity", "lower", "number", _nats, _exponential)
NATS_PER_CHARACTER = LogitMetric("nats per character", "lower", "number", _nats, float)
BITS_PER_BYTE = LogitMetric("bits per byte", "lower", "number", _nats, lambda nats: nats / math.log(2))
