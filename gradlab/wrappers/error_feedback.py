"""Error feedback: add the residual to the gradient before compression; the compression error is the next residual.

Seide et al., "1-bit SGD", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019, Algorithm 1.
Low-pass form: Chen et al., "ScaleCom", NeurIPS 2020, eq. (5) and Algorithm 1. Step-size ratio: Zheng, Huang, Kwok,
"Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019, Algorithm 2, line 5.
A residual that is the momentum: Peng, Quesnelle, Kingma, "DeMo: Decoupled momentum optimization", 2024, Algorithm 1.
Resets, and the residual in 8 bits: Xie, Lin, Toh, Zhou, "LoCo", IEEE TPAMI 2025, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from gradlab.codec import Batch, Codec, Context, Exchanged, Tensors, Traits, concatenate, separate
from gradlab.codec.batch import Sums, consecutive
from gradlab.codec.blockwise import PiecewiseCompressor
from gradlab.codec.contraction import contraction_setting, exchange_contracting
from gradlab.codec.exchanged import run_codec
from gradlab.codec.kept import Entry
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import (
    DEALT,
    MEASURED,
    Effects,
    Wrapper,
    buffer_setting,
    entries,
    in_own_memory,
    innermost,
    load_buffers,
    scales,
    step_size_setting,
    store_buffers,
    wrappers_of,
)
from gradlab.collectives import Coroutine
from gradlab.errors import GradlabError

_WORTH_A_CALL = 2**14  # elements of a layer from which a sum of its own takes less than a copy beside others


def keep_setting() -> Any:
    """Make the settings field that says which part of the input a residual keeps."""
    return setting(
        "difference",
        choices=("difference", "unselected"),
        help='"difference": the compression error, compressor input less decoded contribution; or "unselected": the '
        "input where nothing was sent, for codecs that select elements and send these with an error (LGC's "
        "accumulation, which drops that error)",
    )


class ErrorFeedback(Wrapper):
    """x = gradient + residual; new residual = x - C(x). Law: C(x) + new residual == gradient + old residual.

    x is the compressor's input, C(x) this rank's decoded contribution (`own`), x - C(x) the compression error.

    With step size eta_t, the parameters less eta_t * residual follow SGD's recurrence, with gradients taken at the
    parameters. Under a changing step size the residual is therefore multiplied by eta_(t-1) / eta_t (Zheng et al.,
    Lemma 1). That holds for plain SGD. An optimizer with momentum or a preconditioner of its own has no such law.

    With that ratio, a layer's residual is held while its step size is zero, in the unit of the last step size that was
    not zero. Dense iterations send the whole residual along, so that none is left.

    >>> codec = wrappers.get("error_feedback")(codecs.make("topk", density=0.25))
    >>> codec
    ErrorFeedback(TopK(density=0.25))
    >>> codec.apply(torch.tensor([0.1, -3.0, 0.2, 0.0])).decoded.tolist()
    [0.0, -3.0, 0.0, 0.0]
    """

    name = "error_feedback"
    entries: ClassVar[Mapping[str, Entry]] = {"residual": DEALT, "zeta": MEASURED}
    effects = Effects(keeps_residual=True)

    @dataclass(frozen=True)
    class Settings:
        decay: float = setting(
            0.0,
            least=0,
            below=1,
            unit="share",
            symbol="1 - beta",
            help="of the old residual in the new one (ScaleCom): decay * residual + (1 - decay) * compression error; "
            "0: the usual error feedback",
        )
        step_size_ratio: bool | None = step_size_setting(None, "the residual")
        buffer: str = buffer_setting("the residual is", host=True)
        carried: float = setting(
            1.0,
            above=0,
            most=1,
            unit="share",
            symbol="beta",
            help="of the residual that is added to the next gradient (DeMo); below 1 the residual fades, and is a "
            "momentum: m = beta m + g, less what is sent",
        )
        reset_steps: int = setting(
            0,
            least=0,
            unit="iterations",
            symbol="T_c",
            help="of compression between two resets of the residual to zero (LoCo); 0: no resets",
        )
        keep: str = keep_setting()
        contraction: str = contraction_setting()

    def __init__(self, codec: Codec, settings: ErrorFeedback.Settings | None = None) -> None:
        super().__init__(codec, settings)
        refuse_keep(self)

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, frees_gradients=True)

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if context.dense:
            return (yield from self._dense(grads, state, context))
        residual = self._residual(grads, state, context)
        inputs = self._inputs(grads, residual, context)
        if len(residual) < len(grads):  # a gradient is the compressor's input, and its memory is still read
            context = replace(context, memory=context.memory.keeping(spare=False))
        elif self.settings.keep == "unselected":
            context = replace(context, memory=context.memory.keeping())
        done, errors, measured = yield from exchange_contracting(self, inputs, state, context)
        kept_back = unselected(inputs, done.own) if self.settings.keep == "unselected" else errors
        still = context.training.frozen(grads, self.settings.step_size_ratio)
        steps = self.settings.reset_steps
        dropped = steps > 0 and (context.iteration - context.training.start + 1) % steps == 0
        new = {} if dropped else self._low_passed(without(kept_back, still), residual)
        kept = held_residuals(grads, state, still) | store_buffers(new, "residual", self.settings.buffer, context)
        state = {**done.state, **kept, **measured}
        return replace(done, state=state, compressor_input=inputs, compression_error=errors)

    def _inputs(self, grads: Batch, residual: Tensors, context: Context) -> Batch:
        """Return sums of gradients and residuals; where kernels add them while they compress, none is computed here."""
        codec = innermost(self.codec)
        plain = all(one.effects.server_residual for one in wrappers_of(self.codec)) and not scales(self, grads.table)
        if not (plain and isinstance(codec, PiecewiseCompressor) and context.memory.overwrites):
            return grads.like(add(grads, residual, context))
        tensors = *grads.values(), *residual.values()
        if len(residual) < len(grads) or not all(map(codec.by_kernels, tensors)):
            return grads.like(add(grads, residual, context))
        vector = grads.vector
        return Sums(grads, vector, concatenate({name: residual[name] for name in grads}), context.memory.like(vector))

    def _dense(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        inputs = grads.like(add(grads, self._residual(grads, state, context), context))
        done = yield from run_codec(self.codec, inputs, self.inner_state(state), context)
        still = context.training.frozen(grads, self.settings.step_size_ratio)
        kept = {**done.state, **held_residuals(grads, state, still)}
        return replace(done, state=kept, compressor_input=inputs)

    def _residual(self, grads: Tensors, state: Tensors, context: Context) -> Tensors:
        residuals: Tensors = {}
        kept, factor = load_buffers(state, grads, "residual", self.settings.buffer, context), self.settings.carried
        if not context.training.scales_residuals(self.settings.step_size_ratio):
            return kept if factor == 1.0 else {name: value * factor for name, value in kept.items()}
        still = context.training.frozen(grads, self.settings.step_size_ratio)
        for name, residual in without(kept, still).items():
            ratio = factor * context.training.residual_ratio(name, self.settings.step_size_ratio)
            residuals[name] = residual if ratio == 1.0 else residual * ratio
        return residuals

    def _low_passed(self, errors: Tensors, residual: Tensors) -> Tensors:
        decay = self.settings.decay
        return errors if decay == 0.0 else {name: _low_pass(e, residual.get(name), decay) for name, e in errors.items()}


def _low_pass(error: torch.Tensor, before: torch.Tensor | None, decay: float) -> torch.Tensor:
    return (1 - decay) * error + (0.0 if before is None else decay * before)


def add(grads: Tensors, residual: Tensors, context: Context) -> Tensors:
    """Add residuals to gradients, by layer; a layer without a residual keeps its gradient."""
    if len(grads) > 1 and residual.keys() == grads.keys() and same_dtype((*grads.values(), *residual.values())):
        # Sums of all layers, which then lie one after another.
        total = context.memory.workspace.empty(
            (sum(grad.numel() for grad in grads.values()),), next(iter(grads.values()))
        )
        if total.numel() >= _WORTH_A_CALL * len(grads) and total.device.type == "cpu":
            sums = separate(total, grads)
            return {name: torch.add(grad, residual[name], out=sums[name]) for name, grad in grads.items()}
        kept, vector = concatenate({name: residual[name] for name in grads}), consecutive(list(grads.values()))
        if vector is None:
            vector = torch.cat([grad.reshape(-1) for grad in grads.values()], out=total)
        return separate(torch.add(vector, kept, out=total), grads)
    return {
        name: torch.add(grad, residual[name], out=context.memory.like(grad)) if name in residual else grad
        for name, grad in grads.items()
    }


def held_residuals(grads: Tensors, state: Tensors, still: frozenset[str]) -> Tensors:
    """Return the unchanged residuals of layers whose parameters do not move in this iteration."""
    held: Tensors = {}
    for name in grads if still else ():
        if name in still:
            held |= {key: in_own_memory(value) for key, value in entries(state, name, "residual").items()}
    return held


def without(tensors: Tensors, still: frozenset[str]) -> Tensors:
    """Return the tensors of layers that do move in this iteration."""
    return {name: tensor for name, tensor in tensors.items() if name not in still} if still else tensors


def same_dtype(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors have one dtype."""
    return len({tensor.dtype for tensor in tensors}) == 1


def refuse_keep(wrapper: Wrapper) -> None:
    """Refuse keep = "unselected" around a codec that sends every element: no residual would be kept."""
    method = innermost(wrapper.codec)
    if wrapper.settings.keep == "unselected" and not method.traits.selects:
        raise GradlabError(
            f"{wrapper.name}: keep = unselected around {method.name}, which sends every element: no residual would be "
            "kept; it is for sparsifications"
        )


def unselected(inputs: Tensors, own: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the compressor inputs where nothing was sent, zero elsewhere, by layer."""
    return {name: value.masked_fill(own[name] != 0, 0.0) for name, value in inputs.items()}
