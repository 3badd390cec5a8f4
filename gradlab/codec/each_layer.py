"""Choose and code positions layer by layer in a group of layers, in a few calls for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradlab.codec.sparsifier import largest
from gradlab.coding.positions import chosen, code_size, decode_all, encode, index_bytes, varies

if TYPE_CHECKING:
    from gradlab.kernels.selection import Places

Choose = Callable[[torch.Tensor, int], torch.Tensor]
_TOGETHER = 2**16  # elements of a layer up to which layers of one size are stacked


@dataclass(frozen=True)
class Alike:
    """Layers of one size, of which as many elements are sent.

    starts: first elements of the layers in the group's vector, (m, 1).
    size, count: elements of a layer, and those sent of it.
    coding: coding of their positions, whose size is known.
    """

    starts: torch.Tensor
    size: int
    count: int
    coding: str

    @property
    def positions(self) -> int:
        """Number of elements that are sent, of all layers together."""
        return len(self.starts) * self.count

    @property
    def numel(self) -> int:
        """Return the number that positions are coded below: those of a bit map count through all the layers."""
        return self.size * (len(self.starts) if self.coding == "bitmap" else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all their positions, encoded."""
        return index_bytes(self.coding, self.positions, self.numel)


class EachLayer:
    """The places of a fixed number of elements of each layer of a group, ascending in each.

    Layers of one size lie together in the order of values and codes, so that they take one call. A position is coded
    within its layer. A coding whose size depends on the positions is of all of them together.

    count: elements sent in all.
    nbytes: bytes of their encoded positions; an estimate if the coding's size depends on them.
    """

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], coding: str) -> None:
        self.numel, self.count, self._coding = sum(sizes), sum(counts), coding
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        of_size: dict[tuple[int, int], list[int]] = {}
        for start, size, count in zip(starts, sizes, counts, strict=False):
            if count:
                of_size.setdefault((size, count), []).append(start)
        self._joint = varies(coding)
        self._classes = [
            Alike(torch.tensor(found).view(-1, 1), size, count, chosen(coding, count, size))
            for (size, count), found in of_size.items()
        ]
        of_all = index_bytes(coding, self.count, self.numel) if self._joint else 0
        self.nbytes = of_all if self._joint else sum(one.nbytes for one in self._classes)
        self._moved: dict[torch.device, list[torch.Tensor]] = {}
        self._places: dict[torch.device, Places] = {}

    def select(self, vector: torch.Tensor, choose: Choose = largest) -> torch.Tensor:
        """Find positions (count,), int64, in the order of coding; `choose` returns those in one large layer from its
        values and the count. The largest magnitudes of small layers are taken."""
        found = [torch.empty(0, dtype=torch.int64, device=vector.device)]
        for one, starts in zip(self._classes, self._starts(vector.device), strict=True):
            layers = [vector[start : start + one.size] for start in one.starts.view(-1).tolist()]
            if one.size > _TOGETHER or len(layers) == 1:
                places = torch.stack([choose(layer, one.count) for layer in layers])
            else:
                places = torch.stack(layers).abs_().topk(one.count, 1, sorted=False).indices.sort(1).values
            found.append(places.add_(starts).view(-1))
        positions = torch.cat(found)
        return positions.sort().values if self._joint else positions

    def encode(self, positions: torch.Tensor) -> torch.Tensor:
        """Encode positions in the order of coding: (bytes,), uint8."""
        if self._joint:
            return encode(positions, self.numel, self._coding)
        parts, first = [torch.empty(0, dtype=torch.uint8, device=positions.device)], 0
        for one, starts in zip(self._classes, self._starts(positions.device), strict=True):
            within = positions[first : first + one.positions].view(-1, one.count) - self._zero(one, starts)
            parts.append(encode(within.view(-1), one.numel, one.coding))
            first += one.positions
        return torch.cat(parts)

    def decode(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Decode several ranks' messages that `encode` returned: positions (count,), int64, of each."""
        if self._joint:
            return decode_all(messages, self.count, self.numel, self._coding)
        parts = [[torch.empty(0, dtype=torch.int64, device=message.device)] for message in messages]
        first = 0
        for one, starts in zip(self._classes, self._starts(messages[0].device), strict=True):
            of_class = [message[first : first + one.nbytes] for message in messages]
            for part, within in zip(parts, decode_all(of_class, one.positions, one.numel, one.coding), strict=True):
                part.append((within.view(-1, one.count) + self._zero(one, starts)).view(-1))
            first += one.nbytes
        return [torch.cat(part) for part in parts]

    def places(self, device: torch.device) -> Places:
        """Return what kernels read of the layers and the coding, whose size is known."""
        if device not in self._places:
            from gradlab.kernels.selection import places_of

            rows: list[tuple[int, ...]] = []
            values = octets = 0
            for one in self._classes:
                bitmap = one.coding == "bitmap"
                coding = (one.positions, *code_size(one.coding, one.size), int(bitmap))
                for at, start in enumerate(one.starts.view(-1).tolist()):
                    base = at * (one.size if bitmap else one.count)
                    rows.append((start, one.size, one.count, values + at * one.count, octets, base, *coding))
                values += one.positions
                octets += one.nbytes
            self._places[device] = places_of(rows, device)
        return self._places[device]

    @staticmethod
    def _zero(one: Alike, starts: torch.Tensor) -> torch.Tensor:
        """The positions in the group's vector that are coded as 0, (m, 1)."""
        if one.coding != "bitmap":
            return starts
        return starts - torch.arange(len(starts), device=starts.device).view(-1, 1) * one.size

    def _starts(self, device: torch.device) -> list[torch.Tensor]:
        if device not in self._moved:
            self._moved[device] = [one.starts.to(device) for one in self._classes]
        return self._moved[device]
