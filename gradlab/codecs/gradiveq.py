"""GradiVeQ as an online method: sample, fit, compress, sample again; or with bases fitted on an earlier run.

Yu, Lin, et al., "GradiVeQ: Vector quantization for bandwidth-efficient gradient aggregation in distributed CNN
training", NeurIPS 2018. The default settings are the paper's. L_t = 100 iterations travel as 4-bit QSGD, and PCA is
fitted on them (section 4): d by eq. (6) with lambda = 0.01, one basis per layer (s = infinity). Then L_c = 400
iterations travel as U^T (g - mu) (eqs. 3 to 5).

The paper's g is a sum over nodes; here gradients and means are averages over ranks, so that nothing depends on the
number of ranks. The paper's warm-up (2500 iterations) is the plan's schedule. The paper's slices lie along a
convolution's filters; those of matrices, which it does not treat, lie along the axis where they lose least at the same
bytes (`slice_axis`).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gradlab.codec import (
    About,
    Batch,
    Bytes,
    Codec,
    Context,
    Deferred,
    Exchanged,
    Guarantees,
    PlanDefaults,
    Table,
    Tensors,
)
from gradlab.codec.kept import GONE, Kept
from gradlab.codec.measures import squared_norm
from gradlab.codec.routes import BOTH_WAYS_FROM, sent_by
from gradlab.codec.settings import require, setting
from gradlab.codecs.qsgd import QSGD
from gradlab.collectives import Broadcast, Coroutine, Gather, Mean, Request, Ring, together
from gradlab.collectives.ring import SummedRing
from gradlab.errors import GradlabError
from gradlab.kernels import usable
from gradlab.layout import Layer, filter_strides, flatten_alike, unflatten_alike
from gradlab.learning.alike_layers import SMALL, SlicedGradients
from gradlab.learning.slice_code import CodedSlices, SliceCode, SliceCoder, random_coordinates
from gradlab.learning.slice_pca import (
    SLICE_AXES,
    check_bases,
    default_slice_size,
    dimension,
    fitted_samples,
    fitted_slices,
    principal_axes,
    sample_slices,
    slice_view,
    stacked_axes,
)
from gradlab.roles import WEIGHTS

if TYPE_CHECKING:
    from gradlab.kernels.slices import SliceCodes

SAMPLING, COMPRESSING, DENSE = range(3)
PHASES = ("sampled", "compressed", "dense")
MONITORS = ("off", "absolute", "normalised")
_DIGEST_BYTES = 40  # of `_digest`: five numbers
_CLOCK = ("clock",)  # what other entries of a state need


@dataclass(frozen=True)
class _Done:
    """The exchange of L alike layers: vectors (L, numel) in GradiVeQ's order, and new states without layers' names."""

    mean: torch.Tensor
    own: Callable[[], torch.Tensor]
    states: Sequence[Tensors]


class _Opened(NamedTuple):
    """A layer as kernels exchange it: its state, complete, its clock, K, d fitted axes, and R coordinates, or None
    where all K elements are sent."""

    state: Tensors
    mode: int
    position: int
    size: int
    axes: int = 0
    drawn: int | None = None


class GradiVeQ(Codec):
    """Alternate per layer, by a clock that all ranks share: SAMPLING for L_t iterations, then COMPRESSING for L_c.

    State, per layer: "clock" (2,), the mode and the iterations spent in it.
    While compressing also "basis" (B, K, d), "width", the number of codes per slice, (), and with whitening "mean"
    (M, K). While sampling also, per iteration, "sample 17" (S, K), the S slices that bases are fitted on, and with
    whitening "sum" (M, K).

    Learned tensors are those of compression. A codec with learned tensors begins with compression, and keeps what it
    has learned out of its state.

    All state follows from averaged gradients, which every rank has. If machines that round differently come to
    different bases, rank 0's replace the others. Layers smaller than a slice, and elements that fill no slice, travel
    dense.

    A fixed basis never sends what it does not span, so error feedback cannot help. With `complement` a share of the d
    codes are coordinates of what the fitted axes leave, x - U U^T x, drawn anew in every iteration from the shared
    seed, and error feedback helps.

    >>> codec = codecs.make("gradiveq", slice_size=16, sample_bits=0)
    >>> codec.apply(torch.ones(8, 8))  # its first exchanges are samples
    Applied(256 bytes instead of 256, or 128 in 16 bits, relative error 0)
    """

    name = "gradiveq"
    about = About(
        "learned linear",
        "while compressing 4 * sum of slices * d + tail over layers; while sampling QSGD's or 4 * n",
        "Yu et al., NeurIPS 2018",
        candidates=tuple({"ratio": ratio} for ratio in (4.0, 8.0, 16.0, 32.0, 64.0)),
        defaults=PlanDefaults(roles=WEIGHTS, warmup_steps=2500, error_feedback=False),
        learns=True,
    )
    # Bases hold the gradients of all of them well, as measured (docs/gradiveq.md).

    @dataclass(frozen=True)
    class Settings:
        loss_threshold: float = setting(
            0.01, least=0, below=1, unit="share of variance", symbol="lambda", help="given up, eq. (6)"
        )
        slice_size: int | None = setting(
            None, least=1, unit="elements", symbol="K", help="of a slice; None: a multiple of F D near 2048"
        )
        reuse: int | None = setting(
            None, least=1, unit="slices", symbol="s", help="that share one basis; None: all slices of a layer"
        )
        pooled: int = setting(
            1,
            least=1,
            unit="slices",
            help="that a basis is fitted on, spread over those it serves; 1 (the paper's): the first",
        )
        ratio: float | None = setting(None, least=1, help="d = K / ratio in place of eq. (6)")
        sample_steps: int = setting(100, least=2, unit="iterations", symbol="L_t", help="of sampling")
        compressed_steps: int = setting(400, least=0, unit="iterations", symbol="L_c", help="of compression; 0: no end")
        sample_bits: int = setting(
            4, least=2, most=8, also=(0,), unit="bits", help="per value of QSGD while sampling; 0: uncompressed"
        )
        monitor: str = setting(
            "off",
            choices=MONITORS,
            help='loss ||g_n - decompressed||^2 that ranks watch: "absolute" (eq. 7), or "normalised" by ||g_n||^2',
        )
        monitor_threshold: float = setting(
            0.5, above=0, help="loss above which a rank votes to sample again, as a majority decides"
        )
        complement: float = setting(
            0.0,
            least=0,
            most=1,
            unit="share of d",
            help="of random coordinates of x - U U^T x, new in every iteration, also in place of axes that PCA lacks; "
            "1: no axes are fitted, which needs a ratio",
        )
        whitening: bool = setting(True, help="subtract the samples' mean, as eq. (3) does")
        refresh: str = setting(
            "sample",
            choices=("sample", "decoded"),
            help='after L_c iterations: "sample" again, or fit on the last L_t "decoded" means (needs a complement)',
        )
        ring: bool = setting(False, help="Algorithm 1 in place of one all-reduce of codes, and of QSGD's gather")
        slice_axis: str = setting(
            "auto",
            choices=SLICE_AXES,
            help='axis that slices lie along: "outputs" (filters, as the paper\'s), "inputs", or "auto": what loses '
            "less where a fit at a set K / d measures it, else the longer one of a matrix, an embedding's vectors, and "
            "outputs of other layers",
        )

        def __post_init__(self) -> None:
            def check(condition: bool, setting: str, expected: str) -> None:
                require(condition, "gradiveq", setting, getattr(self, setting), expected)

            check(self.complement != 1 or self.ratio is not None, "ratio", "a number where all axes are random")
            if self.refresh == "decoded":
                check(self.complement > 0, "complement", "above 0 where bases are fitted on what was decoded")
                check(self.compressed_steps >= self.sample_steps, "compressed_steps", "at least sample_steps then")

    def __init__(self, settings: GradiVeQ.Settings | None = None, learned: Mapping[str, torch.Tensor] | None = None):
        super().__init__(settings, learned)
        # By the first of layers that are coded together: what their last coordinates belong to, and the draw.
        self._last_coordinates: dict[str, tuple[tuple[object, ...], torch.Tensor]] = {}
        for key, basis in list(self.learned.items()):
            if key.endswith("/basis") and basis.ndim == 3:  # a basis that uses all its columns needs no width
                self.learned.setdefault(f"{key.removesuffix('/basis')}/width", torch.tensor(float(basis.shape[2])))

    def slice_size(self, layer: Layer) -> int:
        """Return K for a layer, in elements: as set, else by `default_slice_size`."""
        return self.settings.slice_size or default_slice_size(self.slice_view(layer))

    def slice_view(self, layer: Layer) -> Layer:
        """Describe a layer as slices see it, by the setting `slice_axis`."""
        return slice_view(layer, self.settings.slice_axis)

    def fitted_slices(self, slices: int) -> list[list[int]]:
        """List for each basis which of a layer's M slices it is fitted on."""
        return fitted_slices(slices, self.settings.reuse, self.settings.pooled)

    def phase(self, layer: Layer, state: Tensors) -> str:
        """Say what a layer's next exchange is under a state: "sampled", "compressed" or "dense"."""
        if layer.numel < self.slice_size(layer):
            return PHASES[DENSE]
        return PHASES[int(self._of(layer.name, _by_layer(state).get(layer.name, {}))["clock"][0])]

    # --- the exchange ---

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        states = _by_layer(state)
        if opened := self._opened_for_kernels(grads, states):
            return (yield from self._exchange_by_kernels(grads, opened, context))
        batches = [batch for alike in self._flattened(grads, context) for batch in self._opened(alike, states)]
        parts = yield from together([self._exchanged(batch, context) for batch in batches])
        return Exchanged(
            self._unflattened(batches, [done.mean for done in parts], grads, context),
            Deferred(grads, lambda: self._unflattened(batches, [done.own() for done in parts], grads, context)),
            self._kept(grads, dict(state for done in zip(batches, parts, strict=True) for state in _named(*done))),
        )

    def _of(self, name: str, layer_state: Tensors) -> Tensors:
        """Complete a layer's state: its learned tensors, if any, are what it begins with."""
        learned = self._learned_of(name)
        if "clock" in layer_state:
            return {**learned, **layer_state}
        return {"clock": _clock(self._first(learned), 0), **learned, **layer_state}

    def _first(self, learned: Tensors) -> int:
        """Return the mode that a layer with these learned tensors begins with."""
        unfitted = DENSE if self.learned else SAMPLING
        return COMPRESSING if learned or self.settings.complement == 1 else unfitted

    def _learned_of(self, name: str) -> Tensors:
        return self.cached("learned", lambda: _by_layer(self.learned), self.learned).get(name, {})

    def _kept(self, grads: Tensors, states: Mapping[str, Tensors]) -> Tensors:
        """Collect new states under their layers' names, without tensors that are still the learned ones."""
        return {
            f"{name}/{key}": value
            for name in grads
            if name in states
            for key, value in states[name].items()
            if value is not self.learned.get(f"{name}/{key}")
        }

    def _views_of(self, grads: Batch) -> list[tuple[Layer, int, tuple[str, ...]]]:
        """List each layer as slices see it, K where no basis says otherwise, and its names, several for layers of one
        dtype, on a CPU for small ones."""
        layers, dtypes = grads.table, tuple(grad.dtype for grad in grads.values())
        on_host = all(grad.is_cpu for grad in grads.values())

        def made() -> list[tuple[Layer, int, tuple[str, ...]]]:
            alike: dict[Any, list[Layer]] = {}
            for layer, dtype in zip(layers, dtypes, strict=True):
                view = self.slice_view(layer)
                alone = layer.name if layer.numel >= SMALL and on_host else ""
                alike.setdefault((view.shape, view.role, dtype, alone), []).append(layer)
            return [
                (self.slice_view(some[0]), self.slice_size(some[0]), tuple(one.name for one in some))
                for some in alike.values()
            ]

        return self.cached(("views", layers, dtypes, on_host), made)

    def _flattened(self, grads: Batch, context: Context) -> Iterator[SlicedGradients]:
        """Flatten gradients in GradiVeQ's order, those of alike layers together. States are yet to be looked at."""
        for view, size, names in self._views_of(grads):
            seen = [_shaped(grads[name], view.shape) for name in names]
            vectors = flatten_alike(seen, context.memory.workspace, view.role)
            yield SlicedGradients(names, view, vectors, size, [{}] * len(names), self._first({}), 0)

    def _unflattened(
        self, batches: Sequence[SlicedGradients], vectors: Sequence[torch.Tensor], grads: Tensors, context: Context
    ) -> Tensors:
        """Turn vectors of batches, in GradiVeQ's order, into tensors of the gradients' shapes, by layer name."""
        found: Tensors = {}
        for batch, of_batch in zip(batches, vectors, strict=True):
            shaped = unflatten_alike(of_batch, batch.view.shape, context.memory.workspace, batch.view.role)
            found |= zip(batch.names, shaped, strict=True)
        return {name: _shaped(found[name], grad.shape) for name, grad in grads.items()}

    def _opened(self, alike: SlicedGradients, states: Mapping[str, Tensors]) -> list[SlicedGradients]:
        """Read what the states of alike layers say, and put together those that are exchanged alike."""
        every, elements = range(len(alike.names)), alike.vectors.shape[1]
        if not self.learned and elements < alike.size:  # such layers have nothing to keep
            return [alike.some(every, states=[states.get(name, {}) for name in alike.names], mode=DENSE)]
        if self.settings.complement == 1 and not self.learned and states.keys().isdisjoint(alike.names):
            return [alike] if self._in_batches(COMPRESSING) else [alike.some([place]) for place in every]
        known = [self._of(name, states.get(name, {})) for name in alike.names]
        batches: dict[Any, list[int]] = {}
        for place, (name, state) in enumerate(zip(alike.names, known, strict=True)):
            mode, position = map(int, state["clock"].tolist())
            size = state["basis"].shape[1] if "basis" in state else alike.size
            mode = mode if elements >= size else DENSE
            which = self._exchanged_like(name, state) if self._in_batches(mode) else name
            batches.setdefault((size, mode, position, which), []).append(place)
        return [
            alike.some(places, size=size, states=[known[place] for place in places], mode=mode, position=position)
            for (size, mode, position, _), places in batches.items()
        ]

    def _exchanged_like(self, name: str, state: Tensors) -> object:
        """Return what is the same of layers that one code may serve, besides their shape and clock."""
        width = self._width_of(name, state["width"]) if "width" in state else 0
        return width, *[(what, state[what].shape) for what in ("basis", "mean") if what in state]

    def _in_batches(self, mode: int) -> bool:
        """Return whether alike layers in a mode are exchanged together: they take as many calls as one."""
        alone = self.settings.reuse is not None or self.settings.ring
        return mode == DENSE or (mode == COMPRESSING and not alone)

    def _exchanged(self, batch: SlicedGradients, context: Context) -> Coroutine[_Done]:
        """Exchange layers that are compressed alike, or one of any kind."""
        if batch.mode == DENSE:
            mean = yield Mean(batch.vectors.reshape(-1))
            return _Done(mean.view(batch.vectors.shape), lambda: batch.vectors, batch.states)
        if batch.mode == SAMPLING:
            return (yield from self._sample(batch, context))
        return (yield from self._compress(batch, context))

    # --- the exchange by kernels ---

    def _opened_for_kernels(self, grads: Batch, states: Mapping[str, Tensors]) -> list[_Opened]:
        """Read what the states of layers say, if kernels take all of them and none is sampled, else nothing."""
        settings, found = self.settings, list[_Opened]()
        plain = settings.reuse is None and not settings.ring and settings.monitor == "off"
        refitted = settings.refresh == "decoded" and settings.complement < 1
        if not plain or refitted or not all(map(usable, grads.values())):
            return []
        for layer in grads.table:
            state, size = states.get(layer.name, {}), self.slice_size(layer)
            if filter_strides(self.slice_view(layer)) is None or layer.numel >= 2**31:
                return []
            mode, position = COMPRESSING, 0
            if not self.learned and layer.numel < size:
                mode = DENSE
            elif state or self.learned or settings.complement < 1:
                state = self._of(layer.name, state)
                mode, position = map(int, state["clock"].tolist())
            _, size, axes = state["basis"].shape if "basis" in state else (1, size, 0)
            if mode == DENSE or layer.numel < size:
                found.append(_Opened(state, DENSE, position, max(1, layer.numel)))
                continue
            if mode == SAMPLING:
                return []
            width = self._width_of(layer.name, state["width"]) if "width" in state else self._width(size)
            found.append(_Opened(state, mode, position, size, axes, width - axes))
        return found

    def _exchange_by_kernels(self, grads: Batch, opened: Sequence[_Opened], context: Context) -> Coroutine[Exchanged]:
        """Exchange codes and what is sent as it is of all layers, as one vector."""
        vector = grads.vector
        code = self._kernels_of(grads.table, opened, vector.device)
        drawn = self._drawn(grads, opened, context)
        bases, means = (self._all_of(what, grads, opened) for what in ("basis", "mean"))
        known = (vector if bases is None else bases, vector if means is None else means, drawn)
        own = code.encode(vector, *known)
        mean = yield Mean(own)
        like = context.memory.like
        return Exchanged(
            context.once(lambda: grads.cut(code.decode(mean, *known, like(vector)))),
            Deferred(
                grads,
                lambda: grads.cut(code.decode(own, *known, like(vector))),
                lambda: grads.cut(code.decode(own, *known, like(vector), vector)),
            ),
            self._kept(grads, {name: self._moved_on(one) for name, one in zip(grads, opened, strict=True)}),
        )

    def _moved_on(self, layer: _Opened) -> Tensors:
        """Return a layer's state after an exchange by kernels."""
        if layer.mode == DENSE:
            return layer.state
        return {} if self.settings.complement == 1 else self._next(layer.state, layer.position)

    def _kernels_of(self, table: Table, opened: Sequence[_Opened], device: torch.device) -> SliceCodes:
        """Return the kernels' tables. Elements that fill no slice are a slice of their own, sent as it is."""

        def made() -> SliceCodes:
            from gradlab.kernels.slices import SliceCodes, Slices

            rows, start = list[Slices](), 0
            for layer, one in zip(table, opened, strict=True):
                order, (count, left) = filter_strides(self.slice_view(layer)) or (), divmod(layer.numel, one.size)
                whitened = "mean" in one.state and one.drawn is not None
                rows.append(Slices(start, 0, count, one.size, one.axes, one.drawn, order, whitened))
                rows.append(Slices(start, layer.numel - left, 1, left, 0, None, order))
                start += layer.numel
            return SliceCodes([row for row in rows if row.slices and row.size], device)

        forms = tuple((*one[3:], "mean" in one.state) for one in opened)
        return self.cached(("kernels", table, forms, device), made)

    def _all_of(self, what: str, grads: Batch, opened: Sequence[_Opened]) -> torch.Tensor | None:
        """Join the bases or the means of all layers that have them to a vector, again when one is another."""
        some = [one.state[what] for one in opened if what in one.state and one.drawn is not None]
        key = (f"all {what}", grads.table)
        return self.cached(key, lambda: torch.cat([one.reshape(-1) for one in some]).float(), *some) if some else None

    def _drawn(self, grads: Batch, opened: Sequence[_Opened], context: Context) -> torch.Tensor:
        """Draw the coordinates of all layers, one after another, int32."""
        device, names = next(iter(grads.values())).device, tuple(grads)
        alike: dict[tuple[int, int], list[str]] = {}
        for name, one in zip(names, opened, strict=True):
            if one.drawn:
                alike.setdefault((one.size, one.drawn), []).append(name)
        forms = tuple(one[3:] for one in opened)
        key = (context.seed, context.iteration, context.group, names, forms, device)
        last = self._last_coordinates.get(names[0])
        if last is None or last[0] != key:
            by_name = dict[str, torch.Tensor]()
            for (size, count), some in alike.items():
                by_name |= zip(some, random_coordinates(context.random.seeds(tuple(some)), 1, size, count), strict=True)
            parts = [by_name[name] for name in names if name in by_name]
            drawn = torch.cat([*parts, torch.zeros(1, dtype=torch.int64)]).int()
            last = self._last_coordinates[names[0]] = (key, drawn.to(device, non_blocking=True))
        return last[1]

    # --- sampling ---

    def _sample(self, layer: SlicedGradients, context: Context) -> Coroutine[_Done]:
        """Exchange an iteration whose mean is a sample, and fit the bases after the last one."""
        (name,), (layer_state,), position = layer.names, layer.states, layer.position
        mean, own = yield from self._quantized(name, layer.vectors[0], context)

        def done(state: Tensors) -> _Done:
            return _Done(mean.unsqueeze(0), lambda: own().unsqueeze(0), [state])

        slices = mean[: layer.count * layer.size].view(layer.count, layer.size)
        layer_state = self._with_sample(layer_state, position, slices, context)
        number = position + 1
        if number >= self.settings.sample_steps:
            return done((yield from self._fit(layer_state, number, layer.count)))
        return done(layer_state | {"clock": _clock(SAMPLING, number)})

    def _with_sample(self, layer_state: Tensors, number: int, slices: torch.Tensor, context: Context) -> Tensors:
        """Add a sample of averaged slices (M, K) to the state; `number` counts samples from 0."""
        chosen = [m for run in self.fitted_slices(len(slices)) for m in run]
        layer_state = layer_state | {f"sample {number}": slices[chosen]}
        if self.settings.whitening:
            total = context.memory.like(slices)
            layer_state["sum"] = torch.add(slices, layer_state["sum"], out=total) if number else total.copy_(slices)
        return layer_state

    def _quantized(
        self, name: str, vector: torch.Tensor, context: Context
    ) -> Coroutine[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        """Return the mean of the ranks' gradients under QSGD, and this rank's decoded contribution."""
        if self.settings.sample_bits == 0:
            mean = yield Mean(vector)
            return mean, lambda: vector
        quantizer = QSGD(self._sample_settings(context.world_size))
        done = yield from quantizer.exchange(
            Batch.of({name: vector}), {}, replace(context, group=f"{context.group}/{name}")
        )
        return done.mean[name], lambda: done.own[name]

    def _sample_settings(self, world_size: int) -> QSGD.Settings:
        """Return QSGD's for samples. Few ranks quantize them once, as bases are fitted to them."""
        form = "auto" if self.settings.ring else "gather" if world_size < BOTH_WAYS_FROM else "shards"
        return QSGD.Settings(self.settings.sample_bits or 8, ring=self.settings.ring, aggregation=form)

    def _fit(self, layer_state: Tensors, number: int, slices: int) -> Coroutine[Tensors]:
        """Fit bases to the samples. If ranks come to different ones, all take rank 0's."""
        learned = self.bases(*_samples(layer_state, number), slices)
        digests = yield Gather(_digest(learned))
        if any(not torch.equal(digest, digests[0]) for digest in digests):
            with sent_by(0):
                shape = _told_shape(digests[0], learned["basis"])
            learned["basis"] = yield Broadcast(_resized(learned["basis"], shape), root=0)
            learned["width"] = digests[0][4].float()
        return learned | {"clock": _clock(COMPRESSING, 0)}

    def _dimension(self, eigenvalues: Sequence[torch.Tensor], slice_size: int) -> int:
        """Choose d of all bases: K / ratio, or what eq. (6) says of the one that needs most."""
        if self.settings.ratio is not None:
            return self._width(slice_size)
        return max(dimension(values, self.settings.loss_threshold) for values in eigenvalues)

    def _width(self, slice_size: int) -> int:
        """Return d = K / ratio, at least 1."""
        return max(1, round(slice_size / (self.settings.ratio or 1)))

    def bases(self, samples: torch.Tensor, mean: torch.Tensor | None, slices: int) -> Tensors:
        """Fit one layer's bases to (T, S, K), averages of the slices in `fitted_slices`, less a mean (M, K) of all
        slices if there is one: "basis" (B, K, d), "width" (), and, with whitening, "mean" (M, K)."""
        parts = fitted_samples(samples, mean, self.fitted_slices(slices))
        values, axes = zip(*(principal_axes(part.flatten(0, 1)) for part in parts), strict=True)
        width, most = self._dimension(values, samples.shape[2]), max(1, *map(len, values))
        if self.settings.complement == 0:
            width = kept = min(width, most)
        else:
            kept = min(most, max(1, round(width * (1 - self.settings.complement))))
        learned = {"basis": stacked_axes(axes, kept), "width": torch.tensor(float(width))}
        return learned if mean is None else learned | {"mean": mean.float()}

    # --- compression ---

    def _compress(self, batch: SlicedGradients, context: Context) -> Coroutine[_Done]:
        """Exchange codes of layers that are compressed alike: slices of all, one basis after another."""
        slices, tail, states = batch.slices, batch.tail, batch.states
        if self.settings.complement == 1:
            states = [self._nothing_fitted(batch)] * len(batch.names)
        code = self._code_of(batch, states, context)
        means = [state["mean"].to(slices.dtype) for state in states if "mean" in state]
        mean = (means[0] if len(means) == 1 else torch.cat(means)) if means else None
        coded = CodedSlices(slices, code, mean, context.memory.workspace)
        request, decoded, own = self._asked(coded, batch.names[0], context)
        requests = [request]
        if tail.numel():
            requests.append(Mean(tail))
        if self.settings.monitor != "off":
            requests.append(Mean(self._votes(batch, slices, own())))
        summed, *others = yield tuple(requests)
        average = context.once(lambda: decoded(summed))
        outvoted = [vote > 0.5 for vote in others[-1].tolist()] if self.settings.monitor != "off" else []
        new: Sequence[Tensors] = [{}] * len(states)
        if self.settings.complement < 1:  # else nothing is fitted, and nothing kept
            rows = zip(states, batch.of_each(average), outvoted or [False] * len(states), strict=True)
            new = yield from together([self._after(*row, batch.position, context) for row in rows])
        ended = others[0] if tail.numel() else tail
        return _Done(batch.joined(average, ended), lambda: batch.joined(own(), tail), new)

    def _asked(
        self, coded: CodedSlices, name: str, context: Context
    ) -> tuple[Request, Callable[[Any], torch.Tensor], Callable[[], torch.Tensor]]:
        """Return the request for the mean of codes, at once or in a ring's segments, and what decodes its answer and
        this rank's own codes; `name` is that of the first layer."""
        if not self.settings.ring:
            codes = coded.encode()
            return Mean(codes), coded.decode, lambda: coded.decode(codes)
        turn = zlib.crc32(name.encode())  # the same on all ranks, another one for each layer
        coder = SliceCoder(coded, context.world_size, turn)
        ring = Ring(SummedRing(coder.bounds, coder.encode, coder.receive, 1, coded.slices.dtype))
        return ring, lambda _: coder.decoded(), coder.own

    def _nothing_fitted(self, batch: SlicedGradients) -> Tensors:
        """Return bases without axes, which coordinates complete: they need no state."""
        like = batch.vectors

        def made() -> Tensors:
            bases = len(fitted_slices(batch.count, self.settings.reuse))
            width = torch.tensor(float(self._width(batch.size)))
            return {"basis": like.new_zeros(bases, batch.size, 0), "width": width}

        # The same tensors in every iteration, so that what follows from them is known.
        return self.cached((batch.count, batch.size, like.dtype, like.device), made)

    def _code_of(self, batch: SlicedGradients, states: Sequence[Tensors], context: Context) -> SliceCode:
        """Return the code of layers that are compressed alike in this iteration: fitted axes, and what is drawn."""
        basis, names = states[0]["basis"], batch.names
        missing = self._width_of(names[0], states[0]["width"]) - basis.shape[2]
        bases = self._joined([state["basis"].to(batch.vectors.dtype) for state in states], names)
        reuse = self.settings.reuse if len(names) == 1 else batch.count
        return SliceCode(bases, reuse, self._coordinates(names, basis, missing, context) if missing else None)

    def _joined(self, bases: Sequence[torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
        """Join the bases (B, K, d) of alike layers, again when one is another."""
        if len(bases) == 1:
            return bases[0]
        if not bases[0].numel():
            return bases[0].expand(len(bases), -1, -1)
        return self.cached(("bases", names), lambda: torch.cat(list(bases)), *bases)

    def _width_of(self, name: str, width: torch.Tensor) -> int:
        """Return a layer's d. A GPU is waited for once, not in every iteration."""
        return self.cached(("width", name), lambda: int(width), width)

    def _coordinates(self, names: tuple[str, ...], basis: torch.Tensor, count: int, context: Context) -> torch.Tensor:
        """Draw `count` coordinates for each basis of alike layers, (L B, count), where one layer's are (B, K, d)."""
        bases, size, _ = basis.shape
        key = (context.seed, context.iteration, context.group, names, bases, size, count, basis.device)
        last = self._last_coordinates.get(names[0])
        if last is None or last[0] != key:  # ranks that are played in one process share them, too
            drawn = random_coordinates(context.random.seeds(names), bases, size, count)
            # The host goes on: memory that is not pinned is read before the call returns.
            last = self._last_coordinates[names[0]] = (key, drawn.to(basis.device, non_blocking=True))
        return last[1]

    def _votes(self, batch: SlicedGradients, slices: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        """Return for each layer 1 if this rank's loss, eq. (7), is above the threshold, else 0: shape (layers,)."""
        losses = [squared_norm(left) for left in batch.of_each(slices - decoded)]
        units = [1.0] * len(losses)
        if self.settings.monitor == "normalised":
            units = [squared_norm(of_layer) for of_layer in batch.of_each(slices)]
        above = [bool(loss > self.settings.monitor_threshold * one) for loss, one in zip(losses, units, strict=True)]
        return decoded.new_tensor(above, dtype=decoded.dtype)

    def _after(
        self, layer_state: Tensors, average: torch.Tensor, outvoted: bool, position: int, context: Context
    ) -> Coroutine[Tensors]:
        """Return the state after a compressed iteration. average: the decoded mean, (M, K)."""
        left = self._left(position)
        if self.settings.refresh == "decoded" and left < self.settings.sample_steps and not outvoted:
            layer_state = self._with_sample(layer_state, self.settings.sample_steps - 1 - left, average, context)
            if left == 0:
                return (yield from self._fit(layer_state, self.settings.sample_steps, len(average)))
        return self._next(layer_state, position, outvoted)

    def _left(self, position: int) -> int:
        """Return the compressed iterations after one; negative for no end."""
        return self.settings.compressed_steps - position - 1

    def _next(self, layer_state: Tensors, position: int, outvoted: bool = False) -> Tensors:
        """Return the state after a compressed iteration that fits nothing."""
        if outvoted or (self._left(position) == 0 and self.settings.refresh == "sample"):
            return {"clock": _clock(SAMPLING, 0)}
        return layer_state | {"clock": _clock(COMPRESSING, position + 1)}

    # --- fitting before the run, forecasts, checks ---

    def fit(self, layers: Sequence[Layer], samples: Mapping[str, torch.Tensor]) -> GradiVeQ:
        """Fit bases to averaged gradients (T, *layer.shape) of each layer; the new codec begins with compression.
        Layers smaller than a slice get no basis."""
        learned: Tensors = {}
        for layer in layers:
            slices = sample_slices(samples, layer, self.slice_size(layer), self.settings.slice_axis)
            if slices.shape[1] and self.settings.complement < 1:
                chosen = [m for run in self.fitted_slices(slices.shape[1]) for m in run]
                mean = slices.double().mean(0).to(slices.dtype) if self.settings.whitening else None
                bases = self.bases(slices[:, chosen], mean, slices.shape[1])
                learned |= {f"{layer.name}/{key}": value for key, value in bases.items()}
        return GradiVeQ(self.settings, learned)

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        return Guarantees(linear=True)  # while it compresses

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        if state is None:
            parts = [self._over_a_cycle(layer, world_size) for layer in layers]
        else:
            states = _by_layer(state)
            held = [(layer, self._of(layer.name, states.get(layer.name, {}))) for layer in layers]
            parts = [self._bytes(*one, world_size) for one in held]
        return Bytes(sum(part.payload for part in parts), sum(part.sent for part in parts))

    def _over_a_cycle(self, layer: Layer, world_size: int) -> Bytes:
        """Average a layer's bytes over a cycle. Without bases and with unknown d it counts as sampled."""
        start, refitted = self._of(layer.name, {}), self.settings.refresh == "decoded"
        mode, first = int(start["clock"][0]), self._bytes(layer, start, world_size)
        sampled, compressed = self.settings.sample_steps, self.settings.compressed_steps
        if mode == DENSE or (mode == COMPRESSING and (refitted or self.settings.complement == 1 or not compressed)):
            return first  # to the end of the run
        sampling = self._bytes(layer, {"clock": _clock(SAMPLING, 0)}, world_size)
        if mode == SAMPLING and self.settings.ratio is None:
            return sampling
        then = start if mode == COMPRESSING else {"clock": _clock(COMPRESSING, 0)}
        compressing = self._bytes(layer, then, world_size)
        share = compressed / (sampled + compressed) if compressed else 1.0
        both = ((compressing.payload, sampling.payload), (compressing.sent, sampling.sent))
        return Bytes(*(share * one + (1 - share) * other for one, other in both))

    def _bytes(self, layer: Layer, layer_state: Tensors, world_size: int) -> Bytes:
        """Forecast one exchange of a layer under its state."""
        settings, size = self.settings, self.slice_size(layer)
        size = layer_state["basis"].shape[1] if "basis" in layer_state else size
        whole, tail = divmod(layer.numel, size)
        mode, position = map(int, layer_state["clock"].tolist())
        if mode == DENSE or not whole:
            return Bytes.of_means(4 * layer.numel, world_size)
        if mode == COMPRESSING:
            fits = settings.refresh == "decoded" and position + 1 == settings.compressed_steps
            codes = whole * int(layer_state.get("width", self._width(size)))
            votes = settings.monitor != "off"
            return Bytes.of_means(4 * (codes + tail + votes) + _DIGEST_BYTES * fits, world_size)
        fit = Bytes.of_means(_DIGEST_BYTES * (position + 1 >= settings.sample_steps), world_size)
        sampled = Bytes.of_means(4 * layer.numel, world_size)
        if settings.sample_bits:
            sampled = QSGD(self._sample_settings(world_size)).forecast([layer], world_size)
        return Bytes(sampled.payload + fit.payload, sampled.sent + fit.sent)

    def check(self, layers: Sequence[Layer]) -> None:
        keys, whitening = ("basis", "mean", "width"), self.settings.whitening
        if unknown := sorted(set(self.learned) - {f"{layer.name}/{key}" for layer in layers for key in keys}):
            raise GradlabError(f"codec gradiveq: learned tensors {unknown} belong to no layer of the group")
        for layer in layers:
            layer_state = self._learned_of(layer.name)
            basis, mean = layer_state.get("basis"), layer_state.get("mean")
            check_bases(layer, basis, mean, self.settings.reuse, whitening)
            if layer_state:
                self._check_width(layer.name, layer_state["basis"], layer_state["width"])

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        return {f"{layer.name}/{what}": one for layer in layers for what, one in self._kept_of(layer).items()}

    def _kept_of(self, layer: Layer) -> dict[str, Kept]:
        learned = self._learned_of(layer.name)
        size = learned["basis"].shape[1] if "basis" in learned else self.slice_size(layer)
        slices = self.slice_view(layer).numel // size
        fitted = self.fitted_slices(slices)
        fits = self.settings.complement != 1 and slices and (not learned or self.settings.compressed_steps)
        lasting = None if fits else GONE
        sample, of_all = (Kept((count, size), needs=_CLOCK, lasting=GONE) for count in (sum(map(len, fitted)), slices))

        def needs(clock: torch.Tensor) -> Iterator[str]:
            mode, position = map(int, clock.tolist())
            if mode == SAMPLING and position > 0:
                yield from (f"sample {number}" for number in range(position))
                yield from ["sum"] * self.settings.whitening
            elif mode == COMPRESSING and self.settings.complement != 1:
                fit = ("basis", "width", *["mean"] * self.settings.whitening)
                yield from (what for what in fit if what not in learned)

        return {
            "clock": Kept((2,), least=0.0, most=(len(PHASES) - 1.0, 2.0**31), needs=needs),
            "basis": Kept((len(fitted), size, (0, size)), needs=_CLOCK, lasting=lasting),
            "width": Kept((), least=0.0, most=float(size), needs=_CLOCK, lasting=lasting),
            "mean": replace(of_all, lasting=lasting if self.settings.whitening else GONE),
            "sum": of_all,
            **{f"sample {number}": sample for number in range(self.settings.sample_steps)},
        }

    def _check_width(self, name: str, basis: torch.Tensor, width: torch.Tensor) -> None:
        """Refuse a number of codes that is not the basis's, or with a complement not between the basis's and K."""
        least = basis.shape[2]
        most = least if self.settings.complement == 0 else basis.shape[1]
        number = width.double()
        whole = (number >= least) & (number <= most) & (number == number.round())
        if width.ndim or width.dtype == torch.bool or not bool(whole.all()):
            raise GradlabError(
                f"codec gradiveq: layer {name}: width is {width.tolist()}, expected one whole number from {least} to "
                f"{most}"
            )


def _named(batch: SlicedGradients, done: _Done) -> Iterator[tuple[str, Tensors]]:
    """Return new states with their layers' names."""
    return zip(batch.names, done.states, strict=True)


def _by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Sort tensors called "layer/key" by their layers."""
    found: dict[str, Tensors] = {}
    for name, value in tensors.items():
        layer, _, key = name.rpartition("/")
        found.setdefault(layer, {})[key] = value
    return found


def _shaped(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return tensor if tensor.shape == shape else tensor.reshape(tuple(shape))


def _samples(layer_state: Tensors, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the samples so far, (T, S, K), and the mean of all slices (M, K), or None without a sum."""
    # If the last one is not finite, neither is this iteration, and what comes of it is thrown away.
    samples = torch.stack([layer_state[f"sample {n}"] for n in range(number)]).nan_to_num(0, 0, 0)
    return samples, (layer_state["sum"] / number).nan_to_num(0, 0, 0) if "sum" in layer_state else None


def _clock(mode: int, position: int) -> torch.Tensor:
    return torch.tensor([mode, position], dtype=torch.float32)


def _digest(learned: Tensors) -> torch.Tensor:
    """Describe bases in int64: the basis's shape, a hash of the basis, and the width."""
    content = learned["basis"].numpy(force=True).tobytes()
    number = int.from_bytes(hashlib.sha256(content).digest()[:7], "little")
    return torch.tensor([*learned["basis"].shape, number, int(learned["width"])], device=learned["basis"].device)


def _told_shape(digest: torch.Tensor, basis: torch.Tensor) -> list[int]:
    """Return the shape of a rank's bases from their digest; refuse what bases of these slices cannot be."""
    bases, size, axes, _, width = digest.tolist()
    fits = [bases, size] == list(basis.shape[:2]) and 0 <= axes <= size and 1 <= width <= size
    if not fits:
        raise GradlabError(f"gradiveq: bases {[bases, size, axes]} of width {width}, expected {list(basis.shape)}")
    return [bases, size, axes]


def _resized(basis: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of rank 0's shape to receive into; on rank 0 the basis itself."""
    return basis if list(basis.shape) == list(shape) else basis.new_zeros(tuple(shape))
