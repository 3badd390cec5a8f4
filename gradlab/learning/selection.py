"""The parts that LGC's two codecs share: the selection of values, the autoencoder's training, and a run's phases.

Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned gradient compression for distributed deep learning", IEEE TNNLS 2021,
sections V and VI-A. First, gradients travel dense (the plan's schedule). Second, selected values travel as they are,
and one rank trains the autoencoder on them. Third, codes travel.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gradlab.codec import Bytes, Codec, Context, PlanDefaults, Tensors, Traits
from gradlab.codec.kept import FLOATS, GONE, Entry, Kept, for_any
from gradlab.codec.routes import most_bytes, sent_by
from gradlab.codec.settings import setting
from gradlab.codec.sparsifier import coding_setting, count_of, density_setting, largest, with_non_finite
from gradlab.coding.positions import code_size, decode, encode, random_encoded, varies
from gradlab.collectives import Broadcast, Coroutine, ring_sends
from gradlab.errors import GradlabError
from gradlab.kernels import usable
from gradlab.layout import Layer
from gradlab.learning.autoencoder import OPTIMIZERS, RESOLUTIONS, Architecture, gradient_of, optimized

if TYPE_CHECKING:
    from gradlab.kernels.selection import Places

TRAINER = 0  # the rank that trains, and whose code all ranks decode at a server
TRAINING, COMPRESSING, SELECTING = range(3)
ORDERS = ("position", "value")
_JUDGED = 10  # the last tenth of training decides; an iteration's error is measured before learning from it
_COLLAPSED = 0.05  # relative difference of codes below which they hold next to no information
_OPTIMIZER = "optimizer "  # prefix of the optimizer's entries in the state
_FLOAT = (torch.float32,)
_MOST_WEIGHT = 1e4  # trained ones are near 1; values far above make codes of them that are not finite
_OPTIMIZER_KEYS = tuple(f"{_OPTIMIZER}{key}" for keys in OPTIMIZERS.values() for key in keys)
GROUP_STATE = frozenset({"clock", "autoencoder", "error", "coded", "codes", *_OPTIMIZER_KEYS})
#: What LGC's codecs share in tables and plans.
DEFAULTS = PlanDefaults(warmup_steps=200, group_bytes=0)
_LOST = 1e30  # stands for NaN and infinity, so that a checkpoint can be read again


@dataclass(frozen=True)
class LearnedSettings:
    """Settings that LGC's two codecs share."""

    density: float = density_setting(0.001, "selected in each layer, the paper's alpha / 100")
    resolution: str = setting(
        "deconv1", choices=RESOLUTIONS, help="reading of the paper's tables, see `gradlab.learning.autoencoder`"
    )
    loss: str = setting("sum", choices=("sum", "mean"), help="form of squares that is trained on")
    optimizer: str = setting("sgd", choices=OPTIMIZERS, help='trains the autoencoder; "sgd" is the paper\'s')
    learning_rate: float = setting(1e-3, above=0, below=1e6, help="step size of the autoencoder's training")
    training_steps: int = setting(
        300, least=1, unit="iterations", help="of the second phase, with nothing learned before"
    )
    fine_tune_steps: int = setting(
        0, least=0, unit="iterations", help="that fine-tune what was fitted on a trace; 0: codes travel at once"
    )
    most_error: float = setting(
        0.9,
        above=0,
        help="largest error of the decoded average on selections not learned from yet, relative to sending zeros; "
        "above it values travel as they are to the end",
    )
    normalise: str = setting(
        "none",
        choices=("none", "layer"),
        help='"layer": values are divided by the root mean square of what is selected in each layer, which travels too',
    )
    index_coding: str = coding_setting("smallest")


@dataclass(frozen=True)
class Selection:
    """The elements that a rank selects of a group of layers.

    positions: (count,), int64, in the concatenated layers.
    values: (count,), this rank's values at these positions.
    scale: (count,) or 1.0; values are divided by it before they are coded.
    """

    positions: torch.Tensor
    values: torch.Tensor
    scale: torch.Tensor | float = 1.0


@dataclass(frozen=True)
class Task:
    """One iteration that the autoencoder learns from.

    loss: returns the loss of weights (numel,).
    missed: returns the squared error of weights (numel,), and the squared error of sending zeros.
    coded: one of the vectors to be coded, (padded,).
    """

    loss: Callable[[torch.Tensor], torch.Tensor]
    missed: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    coded: torch.Tensor


class LearnedSelection(Codec):
    """The phases, the training and the state of LGC's codecs. Subclasses define what travels.

    The state is kept under the first layer's name. "clock" (2,) holds the mode and the iterations spent in it.
    "autoencoder" (numel,) holds all weights. During training, the state also holds the optimizer's tensors and the
    error so far. On ranks that do not train, these and the weights are empty.
    """

    settings: Any
    entries: ClassVar[Mapping[str, Entry]] = dict.fromkeys(GROUP_STATE, Entry(of_group=True))

    @abstractmethod
    def architecture(self, world_size: int) -> Architecture:
        """Return the architecture of the autoencoder for `world_size` ranks."""

    @property
    def shared(self) -> bool:
        """Whether all ranks take one rank's positions."""
        return True

    def leader(self, context: Context) -> int:
        """Return the rank whose positions all ranks take in this iteration, if `shared`."""
        return int(torch.randint(context.world_size, (), generator=context.random.shared("leader")))

    @property
    def compares_codes(self) -> bool:
        """Whether the loss draws the codes of ranks together, which may make all codes the same."""
        return False

    @cached_property
    def traits(self) -> Traits:
        varying = varies(self.settings.index_coding)
        return replace(super().traits, selects=True, varying=varying)

    # --- state ---

    def _entries(self, state: Tensors, prefix: str) -> Tensors:
        """Return the group's state without the prefix; at first, a state made from the learned tensors."""
        held = {key.removeprefix(f"{prefix}/"): value for key, value in state.items() if key.startswith(f"{prefix}/")}
        if "clock" in held:
            return held
        if "autoencoder" not in self.learned:
            return {"clock": _clock(TRAINING, 0)}
        mode = TRAINING if self.settings.fine_tune_steps else self._lasting_mode
        weights = {} if mode == SELECTING else {"autoencoder": self.learned["autoencoder"]}
        return {"clock": _clock(mode, 0), **weights}

    def _first_entries(self, state: Tensors, prefix: str, context: Context) -> Tensors:
        """Return `_entries`; warn in the first iteration if the fitted autoencoder is not used."""
        entries = self._entries(state, prefix)
        if f"{prefix}/clock" not in state and int(entries["clock"][0]) == SELECTING:
            self._warn_useless(context, float(self.learned["error"]))
        return entries

    @property
    def _lasting_mode(self) -> int:
        """The mode of most iterations: COMPRESSING, or SELECTING if the autoencoder fitted on a trace is useless."""
        fitted = "error" in self.learned and not self.settings.fine_tune_steps
        useless = fitted and not float(self.learned["error"]) <= self.settings.most_error
        return SELECTING if useless else COMPRESSING

    @property
    def _steps(self) -> int:
        return self.settings.fine_tune_steps if "autoencoder" in self.learned else self.settings.training_steps

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        beside = rank != TRAINER  # such ranks keep empty tensors while the trainer learns
        weights = Kept((self.architecture(world_size).numel,), _FLOAT, or_empty=beside)
        two = Kept((2,), (torch.float64,), or_empty=beside)
        numel = sum(layer.numel for layer in layers)
        of_optimizer = {"count": Kept((), _FLOAT, or_empty=beside, least=0.0)}
        trains = "autoencoder" not in self.learned or bool(self.settings.fine_tune_steps)
        clock = Kept((2,), _FLOAT, least=(0.0, 0.0), most=(2.0, 2.0**31), needs=_beside_clock)
        found = {
            "clock": replace(clock, running=(COMPRESSING, 0) if trains else None),
            "error": two,
            "codes": two,
            "coded": Kept(((0, self.architecture(world_size).padded(numel)),), _FLOAT),  # any density
            **{_OPTIMIZER + key: of_optimizer.get(key, weights) for key in self._optimizer_keys},
        }
        found = {what: replace(one, lasting=None if what == "clock" and numel else GONE) for what, one in found.items()}
        found["autoencoder"] = replace(weights, running=0.0 if trains else None, lasting=None if numel else GONE)
        return {key: one for what, kept in found.items() for key, one in for_any(layers, what, kept).items()}

    # --- selection ---

    def counts(self, sizes: Iterable[int]) -> list[int]:
        """Return the number of elements selected in each layer; `sizes`: numel of each layer."""
        return [count_of(self.settings.density, numel) if numel else 0 for numel in sizes]

    def select(self, vector: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Select each layer's largest magnitudes: ascending positions in the concatenated layers (numel,), int64
        (count,)."""
        return self.largest_of_each(vector, tuple(sizes), tuple(self.counts(sizes)))

    def largest_of_each(self, vector: torch.Tensor, sizes: tuple[int, ...], counts: tuple[int, ...]) -> torch.Tensor:
        """Return the ascending positions, int64, of so many of the largest magnitudes of each part of a vector."""
        if usable(vector) and any(counts):
            from gradlab.kernels.selection import largest_of_each

            places, starts = self.cached((sizes, counts, vector.device), lambda: _places(sizes, counts, vector.device))
            octets = largest_of_each(vector, places, len(starts), 4 * len(starts))[1]
            return octets.view(torch.int32) + starts
        return largest_of_parts(vector, sizes, counts)

    @abstractmethod
    def selected(self, vectors: torch.Tensor, sizes: Sequence[int], context: Context) -> Selection:
        """Select from (K, numel), for all K ranks at once in the offline fit: (K, count) positions, values and
        scales."""

    def _choice(self, vector: torch.Tensor, sizes: Sequence[int], order: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one rank's ordered positions, and the scales (layers,) that each layer's values are divided by."""
        positions, scales = self.select(vector, sizes), vector.new_ones(len(sizes), dtype=torch.float32)
        if self.settings.normalise == "layer":
            scales = root_mean_squares(vector[positions], self.counts(sizes))
        return in_order(positions, vector[positions] / scales[layer_of(positions, sizes)], order), scales

    def _selected_alike(
        self, vectors: torch.Tensor, sizes: Sequence[int], leader: int, order: str = "position"
    ) -> Selection:
        """Select as `selected`, with the leader's positions and scales on all ranks."""
        positions, scales = self._choice(vectors[leader], sizes, order)
        shape = (len(vectors), len(positions))
        scale = scales[layer_of(positions, sizes)]
        return Selection(positions.expand(shape), vectors[:, positions], scale.expand(shape))

    def _leaders_selection(
        self, vector: torch.Tensor, sizes: Sequence[int], leader: int, order: str, coding: str, context: Context
    ) -> Coroutine[Selection]:
        """Select this rank's values at the leader's positions, with the leader's root mean squares if normalised."""
        positions, scales = vector.new_zeros(0, dtype=torch.int64), vector.new_ones(len(sizes), dtype=torch.float32)
        if context.rank == leader:
            positions, scales = self._choice(vector, sizes, order)
        positions = yield from self._broadcast_positions(
            positions, sum(self.counts(sizes)), vector.numel(), coding, context, leader
        )
        values = with_non_finite(vector[positions], vector)
        if self.settings.normalise == "none":
            return Selection(positions, values)
        scales = yield Broadcast(scales, leader)
        return Selection(positions, values, scales[layer_of(positions, sizes)])

    def _broadcast_positions(
        self, positions: torch.Tensor, count: int, numel: int, coding: str, context: Context, root: int
    ) -> Coroutine[torch.Tensor]:
        """Send the root's positions to all ranks; other ranks' `positions` are ignored."""
        device = positions.device
        # Other ranks' bytes are ignored. For a forecast, one rank runs alone, and random positions will do.
        encoded = encode(positions, numel, coding) if context.rank == root else random_encoded(coding, count, numel)
        encoded = encoded.to(device)
        if varies(coding):
            size = yield Broadcast(torch.tensor([len(encoded)], dtype=torch.int64, device=device), root)
            with sent_by(root):
                if not 0 <= (length := int(size)) <= most_bytes(numel):
                    raise GradlabError(f"{length} bytes of positions, expected 0 to {most_bytes(numel)}")
            if len(encoded) != length:
                encoded = torch.zeros(length, dtype=torch.uint8, device=device)
        received = yield Broadcast(encoded, root)
        with sent_by(root):
            return decode(received, count, numel, coding)

    # --- the second phase ---

    def _trained(self, entries: Tensors, task: Task, like: torch.Tensor, context: Context) -> Coroutine[Tensors]:
        """Return the state after one more iteration of training. like: a tensor on the weights' device."""
        architecture, position = self.architecture(context.world_size), int(entries["clock"][1]) + 1
        if context.rank == TRAINER:
            kept = self._after_step(entries, task, position, like, context)
        else:
            names = ("autoencoder", "error", "coded", "codes", *(_OPTIMIZER + key for key in self._optimizer_keys))
            kept = {name: like.new_zeros(0, dtype=torch.float32) for name in names}
        if position < self._steps:
            return {"clock": _clock(TRAINING, position), **kept}
        missed, energy = kept["error"] if context.rank == TRAINER else like.new_zeros(2)
        judged = yield Broadcast((missed / energy if energy else missed + 1).float().reshape(1), TRAINER)
        if not float(judged) <= self.settings.most_error:
            self._warn_useless(context, float(judged))
            return {"clock": _clock(SELECTING, 0)}
        if self.compares_codes and context.rank == TRAINER:
            self._warn_if_collapsed(context, kept["codes"])
        weights = kept["autoencoder"] if context.rank == TRAINER else like.new_zeros(architecture.numel).float()
        weights = yield Broadcast(weights, TRAINER)
        return {"clock": _clock(COMPRESSING, 0), "autoencoder": weights}

    @property
    def _optimizer_keys(self) -> tuple[str, ...]:
        return OPTIMIZERS[self.settings.optimizer]

    def _after_step(self, entries: Tensors, task: Task, position: int, like: torch.Tensor, context: Context) -> Tensors:
        """Return the training rank's weights, optimizer state and error after one step; always finite."""
        architecture, weights = self.architecture(context.world_size), entries.get("autoencoder")
        if weights is None:
            generator = context.random.shared("autoencoder", every_iteration=False)
            weights = architecture.initial(generator).to(like.device)
        error = entries.get("error", weights.new_zeros(2, dtype=torch.float64))
        codes = entries.get("codes", weights.new_zeros(2, dtype=torch.float64))
        coded, before = weights.new_zeros(0), entries.get("coded", weights.new_zeros(0))
        if position > self._steps - max(1, self._steps // _JUDGED):
            error = error + torch.stack([value.double() for value in task.missed(weights)])
            coded = task.coded
            if self.compares_codes and before.numel():
                pair = architecture.encode(weights, torch.stack([before, coded]))
                codes = codes + difference(*pair.double())
        _, gradient = gradient_of(task.loss, weights)
        optimizer = {key: entries[_OPTIMIZER + key] for key in self._optimizer_keys if _OPTIMIZER + key in entries}
        weights, optimizer = optimized(
            self.settings.optimizer, self.settings.learning_rate, weights, gradient, optimizer
        )
        lost = torch.tensor([_LOST, 0.0], dtype=torch.float64, device=error.device)
        sound = bool(weights.isfinite().all() and error.isfinite().all())
        if not sound or torch.equal(entries.get("error", error), lost):
            error = lost  # to the end
        kept = {"autoencoder": weights, "error": error, "coded": coded, "codes": codes}
        kept |= {_OPTIMIZER + key: value for key, value in optimizer.items()}
        return {key: value.nan_to_num(_LOST, _LOST, -_LOST) for key, value in kept.items()}

    def _warn_useless(self, context: Context, error: float) -> None:
        if context.rank == TRAINER:
            warnings.warn(
                f"gradlab: {context.group}: the autoencoder's error on selections not learned from yet is {error:.3g} "
                f"of that of sending zeros, above most_error = {self.settings.most_error:g}: selected values go on "
                "as they are, to the end",
                stacklevel=2,
            )

    def _warn_if_collapsed(self, context: Context, codes: torch.Tensor) -> None:
        """Warn if codes of different iterations hardly differ. codes: sums of `difference`, (2,)."""
        if not float(codes[1]):
            return
        spread = float(codes[0] / codes[1]) ** 0.5
        if not spread >= _COLLAPSED:
            warnings.warn(
                f"gradlab: {context.group}: codes of different iterations differ by {spread:.1g} of their size: they "
                "say next to nothing; a smaller similarity loss may help",
                stacklevel=2,
            )

    # --- forecasts and checks ---

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        mode, position = self._lasting_mode, 0
        if state is not None:
            mode, position = map(int, self._entries(state, layers[0].name)["clock"].tolist())
        count, _ = self._selected(layers)
        if not count:
            return Bytes(0.0, 0.0)
        codes = 4 * self.architecture(world_size).code_numel(count) / (1 if self.averages_codes else world_size)
        codes = codes if mode == COMPRESSING else 0.0
        values = codes + self._innovation_bytes(layers) if mode == COMPRESSING else 4.0 * count
        scales = 4 * len(layers) * (self.settings.normalise == "layer") / (world_size if self.shared else 1)
        last = mode == TRAINING and position + 1 == self._steps
        learned = last * 4 * (self.architecture(world_size).numel + 1) / world_size
        positions = self._position_bytes(layers, world_size, mode)
        rest = values + scales + learned
        sent = (ring_sends(world_size) if self.averages_codes else world_size - 1) * rest + (world_size - 1) * positions
        return Bytes(rest + positions, sent, positions, codes)

    @property
    def averages_codes(self) -> bool:
        """Whether all ranks' codes are averaged, along a ring. If not, one rank sends its own."""
        return False

    def _innovation_bytes(self, layers: Sequence[Layer]) -> int:
        """Forecast the bytes of values that travel uncompressed in the third phase."""
        return 0

    @abstractmethod
    def _position_bytes(self, layers: Sequence[Layer], world_size: int, mode: int) -> float:
        """Forecast the bytes of positions in one exchange. mode: its phase."""

    def _selected(self, layers: Sequence[Layer]) -> tuple[int, int]:
        """Return the number of selected elements of a group, and of all its elements."""
        sizes = [layer.numel for layer in layers]
        return sum(self.counts(sizes)), sum(sizes)

    def check(self, layers: Sequence[Layer]) -> None:
        if unknown := sorted(set(self.learned) - {"autoencoder", "error"}):
            raise GradlabError(f"codec {self.name}: learned tensors {unknown}, expected autoencoder and error")
        if "error" in self.learned:
            error = self.learned["error"]
            sound = error.numel() == 1 and error.dtype in FLOATS and 0 <= float(error) < math.inf
            if not sound or "autoencoder" not in self.learned:
                raise GradlabError(f"codec {self.name}: error: expected one finite number from 0 on, of an autoencoder")
        if "autoencoder" in self.learned:
            weights = self.learned["autoencoder"]
            if weights.dim() != 1 or weights.dtype != torch.float32 or not bool((weights.abs() <= _MOST_WEIGHT).all()):
                raise GradlabError(
                    f"codec {self.name}: autoencoder: expected one vector of float32 weights, of magnitudes up to "
                    f"{_MOST_WEIGHT:g}"
                )
            self.trained_ranks(weights)

    @abstractmethod
    def trained_ranks(self, weights: torch.Tensor) -> int | None:
        """Return the world size that weights (numel,) were trained for; None for any. No weights of another number
        fit."""

    def check_ranks(self, weights: torch.Tensor | None, world_size: int) -> None:
        """Refuse weights that were trained for another world size."""
        trained = self.trained_ranks(weights) if weights is not None and weights.numel() else None
        if trained is not None and trained != world_size:
            raise GradlabError(
                f"codec {self.name}: its decoders were trained for {trained} ranks, one each, and this run has "
                f"{world_size}: fit again, or start with nothing learned"
            )


def largest_of_parts(vector: torch.Tensor, sizes: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Return the ascending positions (sum of counts,), int64, of each part's largest magnitudes in a vector."""
    positions, start = [], 0
    for part, count in zip(vector.split(list(sizes)), counts, strict=True):
        positions.append(largest(part, count) + start)
        start += len(part)
    return torch.cat(positions)


def _places(sizes: Sequence[int], counts: Sequence[int], device: torch.device) -> tuple[Places, torch.Tensor]:
    """Return what kernels read of layers, for positions of four bytes, and where each position's layer starts."""
    from gradlab.kernels.selection import places_of

    starts, before = (accumulate(some, initial=0) for some in (sizes, counts))
    rows = [
        (start, size, count, first, 0, first, sum(counts), *code_size("raw", size), 0)
        for start, size, count, first in zip(starts, sizes, counts, before, strict=False)
    ]
    of_each = torch.tensor([row[0] for row in rows]).repeat_interleave(torch.tensor(counts))
    return places_of([row for row in rows if row[2]], device), of_each.to(device)


def _clock(mode: int, position: int) -> torch.Tensor:
    return torch.tensor([mode, position], dtype=torch.float32)


def _beside_clock(clock: torch.Tensor) -> tuple[str, ...]:
    return ("autoencoder",) if int(clock[0]) == COMPRESSING else ()


def padded(values: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """Pad vectors (..., count) with zeros to a length that the autoencoder takes, in float32."""
    count = values.shape[-1]
    return torch.nn.functional.pad(values.float(), (0, architecture.padded(count) - count))


def root_mean_squares(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Compute the root mean square of each layer's `counts` of values (count,): float32 (layers,); 1 for zeros or no
    values."""
    parts = values.double().split(list(counts))  # squares may leave single precision
    scales = torch.stack([part.square().mean().sqrt() if len(part) else part.new_ones(()) for part in parts]).float()
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def layer_of(positions: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return the index of the layer in which each position (count,) lies: (count,). sizes: numel of each layer."""
    return torch.bucketize(positions, torch.tensor(sizes, device=positions.device).cumsum(0), right=True)


def in_order(positions: torch.Tensor, values: torch.Tensor, order: str) -> torch.Tensor:
    """Order positions (count,) as one of `ORDERS`: as they are, or by value (count,), largest first."""
    return positions if order == "position" else positions[values.argsort(descending=True, stable=True)]


def prefixed(prefix: str, state: Mapping[str, torch.Tensor]) -> Tensors:
    """Put a layer's name before the names of state entries."""
    return {f"{prefix}/{key}": value for key, value in state.items()}


def difference(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute the squared difference of two codes, and the sum of their squares: (2,)."""
    return torch.stack([(one - other).square().sum(), one.square().sum() + other.square().sum()])
