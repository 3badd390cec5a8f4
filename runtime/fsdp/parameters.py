"""FSDP2's all-gathers by a plan: ranks send their shards of parameters quantized, and all decode the same values.

Wang et al., "ZeRO++: Extremely efficient collective communication for giant model training", 2023, section 3.1 (qwZ:
parameters in blocks of 8 bits). Differences of parameters: Jia et al., "SDP4Bit: Toward 4-bit communication
quantization in sharded data parallelism for LLM training", NeurIPS 2024, section 3.1; its rotation is for gradients.
The optimizer's shards stay exact; forward and backward passes of a step compute with the decoded values.

As differences, ranks send what changed since they all decoded the same, and hold that: errors do not add up, as what
was lost is in the next difference. It takes memory for the whole parameters, and spares the all-gather in backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradlab.codec import Compressor, Table, seeded_generator
from gradlab.codec.abilities import average_into, for_layers
from gradlab.codec.wrapper import innermost, wrappers_of
from gradlab.codecs.block_scaled import FORMATS
from gradlab.ddp.sharded_units import Unit, all_gather_of, set_all_gather
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Group, Plan
from gradlab.plan.shards import shard_plan
from gradlab.runtime import checkpoint
from gradlab.runtime.checks import given_plan
from gradlab.runtime.network.faults import CommunicationError
from gradlab.wrappers.hadamard import draw_signs, rotate, rotate_back

_ALIGNED = 16  # bytes of which a message has a multiple, so that a view of any type may begin where one does
Form = tuple[torch.dtype, int]


def parameter_plan(layers: Sequence[Layer], parameters: Any, caller: str) -> Plan:
    """Return the plan of a model's all-gathers.

    Args:
        layers: the model's whole layers.
        parameters: a format of `block_scaled`, such as "int8", for all matrices but embeddings; or a plan, or the path
            of an artifact, whose layers without a codec travel as they are.
        caller: the name in errors.

    Raises:
        GradlabError: for a codec that leaves values out, needs other ranks, or sends as many bytes as values say.
    """
    if isinstance(parameters, str) and parameters in FORMATS and not os.path.exists(parameters):
        return Plan.uniform(layers, "block_scaled", dtype=parameters, exchanges="parameters")
    plan = given_plan(parameters, caller)
    for group in plan.groups:
        codec = plan.build(group)
        inner, around = innermost(codec), [one.name for one in wrappers_of(codec)]
        traits = inner.traits
        if not isinstance(inner, Compressor) or traits.selects or traits.varying or traits.own_exchange:
            raise GradlabError(
                f"{caller}: parameters: {inner.name} ({group.name}) does not send every value in as many bytes, which "
                f"a copy of parameters needs; block_scaled and qsgd do, or a format: {', '.join(FORMATS)}"
            )
        if any(name not in ("ef21", "hadamard") for name in around):
            raise GradlabError(
                f"{caller}: parameters: {' around '.join(around)} ({group.name}) is for gradients; a plan of "
                'parameters takes ef21 and hadamard: Plan.uniform(..., exchanges="parameters") makes one'
            )
    return plan


@dataclass(frozen=True)
class Part:
    """One group's part of a unit's message.

    codec: compressor of the group's vector, padded shards one after another.
    places: where these lie in the unit's flat shard.
    signs: the rotation's, (block,); None: there is none.
    differences: whether differences to what all ranks hold are sent.
    """

    codec: Compressor
    places: tuple[slice, ...]
    signs: torch.Tensor | None
    differences: bool

    def compress(
        self, flat: torch.Tensor, held: torch.Tensor | None, generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        """Compress the group's elements of a flat shard (elements,) to a payload. held: what all ranks hold of it."""
        vector = torch.cat([flat[place] for place in self.places]).float()
        if self.differences and held is not None:
            vector -= torch.cat([held[place] for place in self.places])
        return self.codec.compress(vector if self.signs is None else rotate(vector, self.signs), generator)

    def decode(self, payload: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write what a payload stands for into a flat shard (elements,), or add it if it is a difference."""
        sizes = [_size(place) for place in self.places]
        vector = torch.empty(sum(sizes), device=out.device)
        average_into(self.codec, vector, [payload], 1.0)
        values = vector if self.signs is None else rotate_back(vector, self.signs)
        for place, piece in zip(self.places, values.split(sizes), strict=True):
            out[place].copy_(piece + out[place] if self.differences else piece)


class UnitMessage:
    """A rank's message of one unit's parameters: payloads of groups, and the rest as it is.

    numel: elements of the unit's flat shard.
    """

    def __init__(self, plan: Plan, unit: Unit) -> None:
        places, start = dict[str, slice](), 0
        self._exact: list[slice] = []
        grouped = {name for group in plan.groups for name in group.layers}
        for shard, size in unit.gathered():
            place = slice(start, start + size)
            if shard is not None and shard.layer.name in grouped:
                places[shard.layer.name] = place
            elif size:
                self._exact.append(place)
            start += size
        self.numel = start
        self.parts = [
            _part(plan, group, [places[name] for name in group.layers])
            for group in plan.groups
            if group.layers[0] in places
        ]
        self._payloads = [_form(part, self.numel, unit.device) for part in self.parts]

    def forecast(self, dtype: torch.dtype) -> int:
        """Return a message's bytes, by the codecs' own forecasts. dtype: of the flat shard."""
        payloads = sum(part.codec.compressed_bytes(sum(map(_size, part.places))) for part in self.parts)
        return _aligned(payloads + dtype.itemsize * sum(map(_size, self._exact)))

    @property
    def differences(self) -> bool:
        """Whether a part is sent as differences, for which ranks hold the whole unit."""
        return any(part.differences for part in self.parts)

    def encode(self, flat: torch.Tensor, held: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
        """Make the message of a flat shard (elements,): (bytes,), uint8, the same number on all ranks.

        held: what all ranks hold of it, (elements,), if there are differences.
        """
        tensors = [flat[place] for place in self._exact]
        for part in self.parts:
            tensors += part.compress(flat, held, generator)
        message = flat.new_zeros(_aligned(sum(one.nbytes for one in tensors)), dtype=torch.uint8)
        for tensor, place in zip(tensors, self._places(flat.dtype), strict=True):
            message[place].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        return message

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Write what a message stands for over a flat shard (elements,)."""
        forms = self._forms(out.dtype)
        tensors = [message[place].view(dtype) for (dtype, _), place in zip(forms, self._places(out.dtype), strict=True)]
        for place in self._exact:
            out[place].copy_(tensors.pop(0))
        for part, payload in zip(self.parts, self._payloads, strict=True):
            part.decode(tensors[: len(payload)], out)
            tensors = tensors[len(payload) :]

    def _forms(self, dtype: torch.dtype) -> list[Form]:
        """Return type and elements of each tensor of a message: the exact parameters, then payloads."""
        return [*((dtype, _size(place)) for place in self._exact), *(form for one in self._payloads for form in one)]

    def _places(self, dtype: torch.dtype) -> list[slice]:
        """Return where each tensor's bytes lie in a message: those of wider types first, so that each is aligned."""
        forms, places, start = self._forms(dtype), dict[int, slice](), 0
        for at in sorted(range(len(forms)), key=lambda at: -forms[at][0].itemsize):
            size = forms[at][0].itemsize * forms[at][1]
            places[at], start = slice(start, start + size), start + size
        return [places[at] for at in range(len(forms))]


class ParameterGathers:
    """The all-gathers of one model's units, compressed while their modules train.

    plan: plan of whole layers.
    held: by unit what all ranks hold of all, (ranks, elements), where differences are sent.
    last: bytes of the last step's all-gathers on this rank: contributed, sent, and contributed as forecast.
    """

    def __init__(self, plan: Plan, units: Sequence[Unit], iteration: Callable[[], int]) -> None:
        shapes = {shard.layer.name: shard.padded_shape for unit in units for shard in unit.shards}
        unit_of = {shard.layer.name: unit.name for unit in units for shard in unit.shards}
        self.plan, self._iteration = plan, iteration
        cut = shard_plan(plan, shapes, unit_of)
        self.messages = {unit.name: UnitMessage(cut, unit) for unit in units}
        self.last, self._counts = (0, 0, 0), (0, 0, 0)
        self.held: dict[str, torch.Tensor] = {}
        self._gathered: dict[str, tuple[int, ...]] = {}  # the moment of which each unit's `held` is
        self.closed = False

    def attach(self, units: Sequence[Unit]) -> list[tuple[Unit, Any]]:
        """Set the units' all-gathers, and return each unit with its own."""
        pairs = [(unit, UnitAllGather(self, unit, all_gather_of(unit))) for unit in units]
        for unit, gather in pairs:
            set_all_gather(unit, gather)
        return pairs

    def gather(
        self, unit: Unit, output: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup, native: Any
    ) -> None:
        """Gather a unit's flat shards (elements,) of all ranks into `output` (ranks * elements,), compressed.

        native: gathers messages.
        """
        message, ranks, rank = self.messages[unit.name], group.size(), group.rank()
        if message.differences and unit.name not in self.held:
            native(output, flat, group)  # the first values, as they are
            self._hold(unit, output.view(ranks, -1).clone())
            self._count(flat.nbytes, flat.nbytes, ranks)
            return
        held, out = self.held.get(unit.name), output.view(ranks, -1)
        if held is not None and self._gathered.get(unit.name) == self._moment(unit):
            out.copy_(held)  # nothing changed since the forward pass
            return
        key = ("parameters", self.plan.seed, self._iteration(), unit.name, rank)
        sent = message.encode(flat, None if held is None else held[rank], seeded_generator(*key))
        received = sent.new_empty(ranks, len(sent))
        native(received.view(-1), sent, group)
        for row, into in zip(received, out if held is None else held, strict=True):
            message.decode(row, into)
        if held is not None:
            self._hold(unit, held)
            out.copy_(held)
        self._count(len(sent), message.forecast(flat.dtype), ranks)

    def _hold(self, unit: Unit, held: torch.Tensor) -> None:
        self.held[unit.name], self._gathered[unit.name] = held, self._moment(unit)

    def _moment(self, unit: Unit) -> tuple[int, ...]:
        """Return what tells, alike on all ranks, whether parameters may have changed: by steps, or by other writes."""
        return self._iteration(), *(shard.values()._version for shard in unit.shards)

    def _count(self, nbytes: int, expected: int, ranks: int) -> None:
        payload, wire, forecast = self._counts
        self._counts = payload + nbytes, wire + (ranks - 1) * nbytes, forecast + expected

    def close(self) -> None:
        """Gather exactly from now on."""
        self.closed, self.held = True, {}

    def end(self) -> None:
        """End a step."""
        self.last, self._counts = self._counts, (0, 0, 0)

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Collect what all ranks hold of this rank's shards, by unit."""
        return checkpoint.sealed({"held": {unit: held[rank].clone() for unit, held in self.held.items()}})

    def resumption(self, state: Any) -> Mapping[str, torch.Tensor]:
        """Return what all ranks held of this rank's shards by a `state_dict`, by unit. None: nobody holds anything.

        Raises:
            GradlabError: for what is damaged, or of units or sizes of another model.
        """
        found: Mapping[str, torch.Tensor] = {}
        if state is not None:
            checkpoint.require(state, {})
            found = state["held"]
        for unit, own in found.items():
            message = self.messages.get(unit)
            if message is None or not message.differences or own.shape != (message.numel,):
                raise GradlabError(
                    f"checkpoint: parameters: {unit or 'the model itself'} has {tuple(own.shape)} values that ranks "
                    "hold, and this run's plan of parameters holds others"
                )
        return found

    def resume(self, held: Mapping[str, torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
        """Continue from every rank's `resumption`; all ranks of the group together."""
        self.held, self._gathered = {}, {}
        for unit, own in held.items():
            rows = torch.empty(group.size(), own.numel(), dtype=own.dtype, device=device)
            dist.all_gather(list(rows.unbind()), own.detach().to(device).contiguous(), group=group)
            self.held[unit] = rows

    def report(self) -> dict[str, Any]:
        """Say what the last step's all-gathers took on this rank, in bytes."""
        return dict(zip(("payload_bytes", "wire_bytes", "forecast_payload_bytes"), self.last, strict=True))


class UnitAllGather:
    """FSDP's stand-in for a unit's all-gather. Evaluation, and what is gathered in another layout, stay exact."""

    def __init__(self, gathers: ParameterGathers, unit: Unit, native: Any) -> None:
        self._gathers, self._unit, self._native = gathers, unit, native

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give FSDP memory for input and output."""
        return self._native.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather."""
        whole = input_tensor.numel() == self._gathers.messages[self._unit.name].numel
        compressed = whole and self._unit.module.training and input_tensor.dtype.is_floating_point
        if self._gathers.closed or not compressed:
            return self._native(output_tensor, input_tensor, group, async_op)
        self._gathers.gather(self._unit, output_tensor, input_tensor, group, self._exchanged)
        return None

    def _exchanged(self, output: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Gather a message, natively; an error of the collective names the unit."""
        try:
            self._native(output, flat, group)
        except RuntimeError as error:
            what = f"the all-gather of {self._unit.title}'s parameters"
            raise CommunicationError(f"{what} waited for a rank that is gone or stuck: {error}") from None


def _part(plan: Plan, group: Group, places: Sequence[slice]) -> Part:
    codec, signs = plan.build(group), None
    inner, around = innermost(codec), {one.name: one for one in wrappers_of(codec)}
    assert isinstance(inner, Compressor)
    if (rotation := around.get("hadamard")) is not None:
        signs = draw_signs(rotation.settings.block, seeded_generator("parameters", plan.seed, group.name)).float()
    return Part(for_layers(inner, Table.of(plan.members(group))), tuple(places), signs, "ef21" in around)


def _form(part: Part, numel: int, device: torch.device) -> list[Form]:
    payload = part.compress(torch.zeros(numel, device=device), None, seeded_generator("form"))
    return [(one.dtype, one.numel()) for one in payload]


def _size(place: slice) -> int:
    return place.stop - place.start


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNED
