"""Recordings of one rank with right checksums that claim far more than their bytes: each is a folder of files."""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h5py
import numpy as np

from gradlab.layout import Layer, canonical_json
from gradlab.trace.crc import crc32
from gradlab.trace.schema import (
    FORMAT,
    INDEX_FORMAT,
    STEP_DTYPE,
    Manifest,
    RankIndex,
    dataset_name,
    record_checksums,
)
from gradlab.trace.segment import header

Files = dict[str, bytes]
CHUNK = 2**20  # values


def bombs() -> Iterator[tuple[str, Callable[[], Files]]]:
    """Yield a name for each, and what makes it."""
    yield "1 GiB of zeros, deflated", lambda: recording([Layer("x", (2**28,))], deflated)
    yield "200 names of a data set", lambda: recording([Layer(f"x{number}", (2**20,)) for number in range(200)], named)
    yield "200 data sets in one place", lambda: in_one_place(200)
    yield "131072 ranks", lambda: {"manifest.json": document(FORMAT, Manifest(2**17, (Layer("x", (3,)),)).to_json())}
    yield (
        "a million objects",
        lambda: {"manifest.json": b"[" + b"{}," * 2**21 + b"1]"},
    )
    yield "a million brackets", lambda: {"manifest.json": b"[" * 2**20}


def document(kind: str, body: dict[str, Any]) -> bytes:
    """Write a sealed JSON document."""
    content = {"format": kind, "version": 1, **body}
    content["sha256"] = hashlib.sha256(canonical_json(content).encode()).hexdigest()
    return json.dumps(content).encode()


def recording(layers: Sequence[Layer], fill: Callable[[h5py.Group, Sequence[Layer]], None]) -> Files:
    """One step of zeros."""
    manifest = Manifest(1, tuple(layers))
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        file.attrs["gradlab"] = np.bytes_(header(manifest, 0, 0))
        fill(file.create_group("gradients"), layers)
        unused = np.zeros((1, -(-len(layers) // 8)), np.uint8)
        checksums = np.array([[crc_of_zeros(4 * layer.numel) for layer in layers]], "<u4")
        records = np.zeros(1, STEP_DTYPE)
        records["checksum"] = record_checksums(records, unused, checksums)
        for name, data in {"steps": records, "unused": unused, "checksums": checksums}.items():
            file.create_dataset(name, data=data)
        file.create_dataset("committed", data=np.ones(1, "<i8"))
    index = RankIndex(manifest.run, 0, ((0, 1),))
    return {
        "manifest.json": document(FORMAT, manifest.to_json()),
        "rank-00000/index.json": document(INDEX_FORMAT, index.to_json()),
        "rank-00000/000000.h5": held.getvalue(),
    }


def crc_of_zeros(nbytes: int) -> int:
    found, piece = 0, bytes(2**20)
    for at in range(0, nbytes, len(piece)):
        found = crc32(piece[: nbytes - at], found)
    return found


def deflated(group: h5py.Group, layers: Sequence[Layer]) -> None:
    for layer in layers:
        data = group.create_dataset(
            dataset_name(layer.name), (1, layer.numel), "<f4", chunks=(1, CHUNK), compression="gzip"
        )
        chunk = zlib.compress(bytes(4 * CHUNK), 9)
        for column in range(0, layer.numel, CHUNK):
            data.id.write_direct_chunk((0, column), chunk)


def named(group: h5py.Group, layers: Sequence[Layer]) -> None:
    first = dataset_name(layers[0].name)
    group.create_dataset(first, data=np.zeros((1, layers[0].numel), "<f4"))
    for layer in layers[1:]:
        group[dataset_name(layer.name)] = group[first]


def in_one_place(count: int) -> Files:
    """Contiguous data sets whose addresses are all the first one's."""
    numel, at = 2**20, 0

    def fill(group: h5py.Group, layers: Sequence[Layer]) -> None:
        nonlocal at
        first = group.create_dataset(dataset_name(layers[0].name), data=np.zeros((1, numel), "<f4"))
        at = first.id.get_offset()
        for layer in layers[1:]:
            group.create_dataset(dataset_name(layer.name), (1, numel), "<f4")  # without a place yet

    files = recording([Layer(f"x{number}", (numel,)) for number in range(count)], fill)
    nbytes = (4 * numel).to_bytes(8, "little")
    layout, placed = b"\x03\x01" + b"\xff" * 8 + nbytes, b"\x03\x01" + at.to_bytes(8, "little") + nbytes
    files["rank-00000/000000.h5"] = files["rank-00000/000000.h5"].replace(layout, placed)
    return files
