"""LGC's two autoencoders on a trace: inputs, losses and errors of many iterations at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradlab.analysis.fit.lgc.selections import Selections
from gradlab.codec.settings import build_settings
from gradlab.codecs.lgc_ring import LgcRing
from gradlab.codecs.lgc_server import LgcServer, innovations_of
from gradlab.coding.positions import index_bytes
from gradlab.collectives import all_gather_wire_bytes, all_reduce_wire_bytes, broadcast_wire_bytes
from gradlab.learning.autoencoder import Architecture, Loss, ring_loss, server_loss
from gradlab.learning.selection import TRAINER, LearnedSettings, padded

_MEAN = Loss("mean")


@dataclass(frozen=True)
class Inputs:
    """Inputs of an autoencoder in T iterations from K ranks.

    vectors: (T, K, padded), values to code.
    innovations: (T, K, padded), values that a rank sends besides; None in a ring.
    senders: (T,), ranks that send the common code.
    """

    vectors: torch.Tensor
    innovations: torch.Tensor | None
    senders: torch.Tensor

    def __len__(self) -> int:
        return len(self.vectors)

    def at(self, indices: torch.Tensor) -> Inputs:
        """Take the iterations with these indices."""
        innovations = None if self.innovations is None else self.innovations[indices]
        return Inputs(self.vectors[indices], innovations, self.senders[indices])

    def divided(self, unit: float) -> Inputs:
        """Divide all values by one number."""
        innovations = None if self.innovations is None else self.innovations / unit
        return Inputs(self.vectors / unit, innovations, self.senders)


class Learner(ABC):
    """An autoencoder with its loss, error and bytes; weights are passed in."""

    architecture: Architecture

    def inputs(self, selections: Selections) -> Inputs:
        """Scale and pad selections as they are coded."""
        vectors = padded(selections.values / selections.scales, self.architecture)
        return Inputs(vectors, self._innovations(selections), selections.leaders)

    @abstractmethod
    def _innovations(self, selections: Selections) -> torch.Tensor | None: ...

    @abstractmethod
    def loss(self, weights: torch.Tensor, inputs: Inputs, generator: torch.Generator) -> torch.Tensor:
        """Evaluate the paper's loss, mean over iterations."""

    @abstractmethod
    def decoded(self, weights: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Encode and decode each rank's vector, (T, K, padded)."""

    @abstractmethod
    def error(self, weights: torch.Tensor, inputs: Inputs) -> float:
        """Measure the squared error of the tensor in the paper's loss, as a share of the error of sending zeros."""

    @abstractmethod
    def sizes(self, selections: Selections) -> tuple[float, float]:
        """Count bytes of an iteration without positions: payload, mean over ranks; and the bytes that rank 0 sends."""

    def averages(self, weights: torch.Tensor, selections: Selections) -> torch.Tensor:
        """Encode and decode each rank's values, (T, K, n), in the units they were selected in."""
        return self.decoded(weights, self.inputs(selections))[..., : selections.count] * selections.scales


class RingLearner(Learner):
    """Eqs. (8) to (11): codes are averaged, and decoded once."""

    def __init__(self, codec: LgcRing, numels: Sequence[int]) -> None:
        self.architecture = codec.architecture()
        self._codec, self._numels = codec, numels

    def _innovations(self, selections: Selections) -> None:
        return None

    def loss(self, weights: torch.Tensor, inputs: Inputs, generator: torch.Generator) -> torch.Tensor:
        return ring_loss(self.architecture, weights, inputs.vectors, _MEAN)

    def decoded(self, weights: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        codes = self.architecture.encode(weights, inputs.vectors).mean(1)
        return self.architecture.decode(weights, codes)[:, None].expand_as(inputs.vectors)

    def error(self, weights: torch.Tensor, inputs: Inputs) -> float:
        return _share(self.decoded(weights, inputs)[:, 0], inputs.vectors.mean(1))

    def sizes(self, selections: Selections) -> tuple[float, float]:
        size, ranks = 4 * self.architecture.code_numel(selections.count), selections.values.shape[1]
        numel = sum(self._numels)
        settings, count = self._codec.settings, selections.count
        order = index_bytes(self._codec.coding, count, numel) - index_bytes(settings.index_coding, count, numel)
        from_leader = max(0, order) + _scale_bytes(settings, self._numels)
        wire = all_reduce_wire_bytes(size, ranks) + broadcast_wire_bytes(int(from_leader), 0, 0, ranks)
        return size + from_leader / ranks, wire


class ServerLearner(Learner):
    """Eqs. (2) to (7): one rank's code, a decoder and an innovation for each."""

    def __init__(self, codec: LgcServer, numels: Sequence[int], world_size: int) -> None:
        self.architecture = codec.architecture(world_size)
        self._codec, self._numels = codec, numels
        self._counts, self._loss = codec.counts(numels), Loss("mean", codec.settings.similarity)
        self._kept, self._coding = codec.innovation_counts(self._counts, numels), codec.settings.index_coding

    def _innovations(self, selections: Selections) -> torch.Tensor:
        innovations = innovations_of(selections.values, self._counts, self._kept)
        return padded(innovations / selections.scales, self.architecture)

    def loss(self, weights: torch.Tensor, inputs: Inputs, generator: torch.Generator) -> torch.Tensor:
        assert inputs.innovations is not None
        ranks = inputs.vectors.shape[1]
        common = torch.randint(ranks, (len(inputs),), generator=generator)
        return server_loss(self.architecture, weights, inputs.vectors, inputs.innovations, common, self._loss)

    def decoded(self, weights: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        assert inputs.innovations is not None
        sent = inputs.vectors[torch.arange(len(inputs)), inputs.senders]
        codes = self.architecture.encode(weights, sent)
        ranks = range(inputs.vectors.shape[1])
        return torch.stack(
            [self.architecture.decode(weights, codes, rank, inputs.innovations[:, rank]) for rank in ranks], 1
        )

    def error(self, weights: torch.Tensor, inputs: Inputs) -> float:
        return _share(self.decoded(weights, inputs), inputs.vectors)

    def sizes(self, selections: Selections) -> tuple[float, float]:
        ranks, count = selections.values.shape[1], sum(self._kept)
        code = 4 * self.architecture.code_numel(selections.count)
        scales = _scale_bytes(self._codec.settings, self._numels)
        own = 4 * count + index_bytes(self._coding, count, selections.count) + (0 if selections.shared else scales)
        from_leader = scales if selections.shared else 0
        broadcast = broadcast_wire_bytes(code, TRAINER, 0, ranks) + broadcast_wire_bytes(from_leader, 0, 0, ranks)
        wire = broadcast + all_gather_wire_bytes(int(own), ranks)
        return (code + from_leader) / ranks + own, wire


def _scale_bytes(settings: LearnedSettings, numels: Sequence[int]) -> int:
    return 4 * len(numels) * (settings.normalise == "layer")


def learner_of(pattern: str, settings: dict[str, object], numels: Sequence[int], world_size: int) -> Learner:
    """Build the learner of a pattern."""
    if pattern == "ring":
        return RingLearner(LgcRing(build_settings(LgcRing, settings)), numels)
    return ServerLearner(LgcServer(build_settings(LgcServer, settings)), numels, world_size)


def in_units(architecture: Architecture, weights: torch.Tensor, unit: float) -> torch.Tensor:
    """Rescale weights to vectors that are `unit` times as large: f'(x) = unit f(x / unit)."""
    named = {name: value.clone() for name, value in architecture.separated(weights).items()}
    named["encoder.conv1.weight"] /= unit
    for decoder in range(architecture.decoders):
        named[f"decoder{decoder}.conv.bias"] *= unit
        # The innovation, the last channel, is of that size already.
        last = named[f"decoder{decoder}.conv.weight"]
        (last[:, :-1] if architecture.innovation else last).mul_(unit)
    return architecture.joined(named)


def code_spread(learner: Learner, weights: torch.Tensor, selections: Selections) -> float:
    """Measure how much codes of consecutive iterations differ, relative to their norm; near 0 all codes are equal."""
    codes = learner.architecture.encode(weights, learner.inputs(selections).vectors).double()
    return float((codes[1:] - codes[:-1]).square().sum() / codes.square().sum().clamp_min(1e-300)) ** 0.5


def _share(decoded: torch.Tensor, true: torch.Tensor) -> float:
    return float((decoded - true).square().sum() / true.square().sum().clamp_min(1e-300))
