"""The parts of a trace: their names, types and checksums, and the two JSON files that describe them.

    manifest.json            what the trace is: run, world size, layers, dtype, metadata; written once, by rank 0.
                             samples says of which layers the trace holds only blocks, and which
    rank-00000/index.json    what rank 0 recorded: its segments with their steps; its presence says "closed"
    rank-00000/000000.h5     a closed segment; while it is being recorded it is called 000000.h5.part

Every file has one writer only, so ranks never wait for each other. A segment holds, in rows of one step each,

    gradients/<layer>   (steps, numel)   in chunks of at most 16 steps and 1 MiB, row-major flattening
    steps               (steps,)         `STEP_DTYPE`: iteration index, loss, learning rate, loss scale, ...
    unused              (steps, ceil(layers / 8))  packed bits: layers that had no gradient on this rank
    checksums           (steps, layers)  CRC-32 of each layer's stored row
    committed           (1,)             rows that are complete; written after everything else
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradlab.errors import GradlabError, NewerFormat
from gradlab.files import write_whole
from gradlab.jsonable import read_json
from gradlab.layout import Layer, canonical_json
from gradlab.trace.crc import crc32
from gradlab.trace.sample import LayerSample

FORMAT = "gradlab-trace"
INDEX_FORMAT = "gradlab-trace-rank"
VERSION = 1  # of manifests, indices and segments
MANIFEST = "manifest.json"
INDEX = "index.json"
LOCK = "recording.lock"  # held with flock while a rank records
PART = ".part"  # suffix of a segment that is still open, or that a killed run left open

CHUNK_STEPS = 16  # most rows of a chunk: a whole block of steps goes to disk in one write
CHUNK_COLUMNS = 16384  # most columns of a chunk of so many rows: 1 MiB of float32
BLOCK_BYTES = 2**26  # bytes of a block of steps, unless one step is larger
VALUES_AT_ONCE = 2**24  # most values of one layer that are read at a time
STORED_DTYPE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
STEP_DTYPE: np.dtype[Any] = np.dtype(
    [
        ("index", "<i8"),  # iteration: synchronised backward passes since the recorder was attached, from 0
        ("loss", "<f8"),  # NaN where it was not annotated
        ("learning_rate", "<f8"),  # of the first parameter group; NaN without an optimizer
        ("loss_scale", "<f8"),  # recorded gradient divided by the true one
        ("accumulation", "<i8"),  # forward passes since the last synchronised backward pass
        ("non_finite", "<i8"),  # elements of the recorded gradients that are infinite or NaN
        ("optimizer_step", "<i8"),  # optimizer steps before this iteration, from 0; -1: not known
        ("seconds", "<f8"),  # since the averages of the iteration before; NaN where nothing was timed
        ("waited", "<f8"),  # of these: for averages, after the last gradient was there, or for a processor before
        ("exchanged", "<f8"),  # since the averaging of the first bucket began
        ("recording", "<f8"),  # spent by the recorder
        ("averaged_bytes", "<i8"),
        ("checksum", "<u4"),  # CRC-32 of the fields above, the unused bits and the layers' checksums
    ]
)

TIMES = ("seconds", "waited", "exchanged", "recording", "averaged_bytes")
NOT_TIMED = (math.nan,) * 4 + (0,)
# As recorders wrote it that did not time steps.
UNTIMED_STEP_DTYPE: np.dtype[Any] = np.dtype([field for field in STEP_DTYPE.descr if field[0] not in TIMES])

_MAX_JSON_BYTES = 64 * 2**20
_MAX_NUMEL = 2**40
_MAX_JSON_VALUES = 2**20
_MAX_WORLD_SIZE = 2**17


def rank_folder(rank: int) -> str:
    """Return the name of one rank's folder inside the trace's folder."""
    return f"rank-{rank:05d}"


def segment_name(number: int) -> str:
    """Return the file name of a closed segment; `PART` follows it while the segment is open."""
    return f"{number:06d}.h5"


def dataset_name(layer_name: str) -> str:
    """Escape a layer's name as one HDF5 link, where "/" would open a group and "." is the group itself."""
    escaped = layer_name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return "%2E" if escaped == "." else escaped


def block_steps(row_bytes: int, most_steps: int | None = None) -> int:
    """Return the number of steps that are kept in memory and written together, a chunk's rows: at most 16, fewer where
    these exceed `BLOCK_BYTES`, or so that the last block is nearly full."""
    rows = max(1, min(CHUNK_STEPS, BLOCK_BYTES // max(1, row_bytes)))
    if most_steps is None:
        return rows
    heights = range(min(rows, most_steps), -(-rows // 2) - 1, -1) or [min(rows, most_steps)]
    return min(heights, key=lambda height: -(-most_steps // height) * height)  # the first one, the largest, of equals


def rows_at_once(numel: int) -> int:
    """Return the number of a layer's rows to read at a time: at most 16, and about 64 MiB of float32."""
    return max(1, min(CHUNK_STEPS, VALUES_AT_ONCE // max(1, numel)))


def chunk_shape(numel: int, rows: int = CHUNK_STEPS) -> tuple[int, int]:
    """Return a layer's chunk, (rows, columns): equal widths, so that the last chunk pads little."""
    pieces = max(1, -(-numel // (CHUNK_COLUMNS * CHUNK_STEPS // rows)))
    return rows, -(-numel // pieces)


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """Compute the CRC-32 of each stored row: (steps, numel) -> uint32 (steps,)."""
    rows = np.ascontiguousarray(rows)
    return np.array([crc32(row.view(np.uint8)) if row.size else 0 for row in rows], dtype=np.uint32)


def record_checksums(records: np.ndarray, unused: np.ndarray, checksums: np.ndarray) -> np.ndarray:
    """Compute the CRC-32, uint32 (steps,), of everything that a step stores beside its gradients.

    records: `STEP_DTYPE` (steps,), whose own checksums are left out.
    unused: packed bits, uint8 (steps, ceil(layers / 8)).
    checksums: checksum of each layer's row, uint32 (steps, layers).
    """
    sums = np.empty(len(records), dtype=np.uint32)
    for row, (record, bits, layer_sums) in enumerate(zip(records, unused, checksums, strict=True)):
        fields = record.tobytes()[:-4]
        sums[row] = crc32(layer_sums.tobytes(), crc32(bits.tobytes(), crc32(fields)))
    return sums


@dataclass(frozen=True)
class Manifest:
    """Describes a trace.

    layers: layers as the trace holds them.
    metadata: a JSON object from the recorder.
    run: unique to one recording.
    samples: layers that the trace holds in blocks only, by name.
    model: the model's layers, in order, if not all of them were recorded.
    """

    world_size: int
    layers: tuple[Layer, ...]
    dtype: str = "float32"
    metadata: dict[str, Any] = field(default_factory=dict)
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    samples: Mapping[str, LayerSample] = field(default_factory=dict)
    model: tuple[Layer, ...] = ()

    @property
    def model_layers(self) -> tuple[Layer, ...]:
        """The layers as the model has them, with those that were not recorded."""
        return self.model or self.recorded

    @property
    def recorded(self) -> tuple[Layer, ...]:
        """The recorded layers as the model has them."""
        return tuple(self.samples[layer.name].layer if layer.name in self.samples else layer for layer in self.layers)

    @property
    def row_bytes(self) -> int:
        """Bytes of one step's gradients on one rank, as stored."""
        return sum(layer.numel for layer in self.layers) * STORED_DTYPE[self.dtype].itemsize

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's fields as JSON values; `from_json` reads them back."""
        return {
            "run": self.run,
            "world_size": self.world_size,
            "layers": [layer.to_json() for layer in self.layers],
            "dtype": self.dtype,
            "segments": "rank-{rank:05d}/{segment:06d}.h5",
            "metadata": self.metadata,
            "samples": {name: sample.to_json() for name, sample in self.samples.items()},
            **({"model": [layer.to_json() for layer in self.model]} if self.model else {}),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any], where: Path) -> Manifest:
        """Check and read the manifest's fields; `where` is the file that an error names."""
        run, size, dtype = value.get("run"), value.get("world_size"), value.get("dtype")
        if not isinstance(run, str) or not re.fullmatch(r"[0-9a-f]{32}", run):
            raise GradlabError(f"{where}: 'run' is {run!r}, expected 32 hexadecimal digits")
        if type(size) is not int or not 1 <= size <= _MAX_WORLD_SIZE:
            raise GradlabError(f"{where}: 'world_size' is {size!r}, expected a number of ranks from 1 on")
        if not isinstance(dtype, str) or dtype not in STORED_DTYPE:
            raise GradlabError(f"{where}: 'dtype' is {dtype!r}, expected one of {', '.join(STORED_DTYPE)}")
        metadata = value.get("metadata")
        if not isinstance(metadata, dict):
            raise GradlabError(f"{where}: 'metadata' is {metadata!r}, expected an object")
        layers = _checked_layers(value.get("layers"), where)
        samples = _checked_samples(value.get("samples"), layers, where)
        model = _checked_layers(value["model"], where, "model") if "model" in value else ()
        read = cls(size, layers, str(dtype), metadata, run, samples, model)
        if strangers := set(read.recorded) - set(read.model_layers):
            names = ", ".join(sorted(layer.name for layer in strangers))[:200]
            raise GradlabError(f"{where}: 'model' has no such layer as was recorded: {names}")
        return read


def _checked_layers(value: Any, where: Path, what: str = "layers") -> tuple[Layer, ...]:
    if not isinstance(value, list) or not value:
        raise GradlabError(f"{where}: {what!r} must be a list with at least one layer")
    layers = tuple(Layer.from_json(entry) for entry in value)
    for layer in layers:
        if layer.numel > _MAX_NUMEL:
            raise GradlabError(f"{where}: layer {layer.name!r} has an absurd shape {list(layer.shape)}")
    if len({layer.name for layer in layers}) < len(layers):
        raise GradlabError(f"{where}: {what!r} names a layer twice")
    return layers


def _checked_samples(value: Any, layers: tuple[Layer, ...], where: Path) -> dict[str, LayerSample]:
    by_name = {layer.name: layer for layer in layers}
    if not isinstance(value, dict) or not set(value) <= set(by_name):
        raise GradlabError(f"{where}: 'samples' must be an object by layer name, got {str(value)[:200]}")
    return {name: LayerSample.from_json(value[name], layer, where) for name, layer in by_name.items() if name in value}


@dataclass(frozen=True)
class RankIndex:
    """The recording of one rank: (segment number, committed steps) in order of time, the steps lost, and why."""

    run: str
    rank: int
    segments: tuple[tuple[int, int], ...]
    steps_lost: int = 0
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the index's fields as JSON values; `from_json` reads them back."""
        return {
            "run": self.run,
            "rank": self.rank,
            "segments": [{"number": number, "steps": steps} for number, steps in self.segments],
            "steps_lost": self.steps_lost,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any], where: Path) -> RankIndex:
        """Check and read the index's fields; `where` is the file that an error names."""
        try:
            segments = tuple((int(entry["number"]), int(entry["steps"])) for entry in value["segments"])
            reason = None if value["reason"] is None else str(value["reason"])
            return cls(str(value["run"]), int(value["rank"]), segments, int(value["steps_lost"]), reason)
        except (KeyError, TypeError, ValueError) as error:
            raise GradlabError(f"{where}: not an index of segments ({type(error).__name__}: {error})") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a trace's manifest into its folder, which must exist; raise OSError if that is impossible."""
    write_document(folder / MANIFEST, FORMAT, manifest.to_json())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the trace in `folder`; a missing, damaged, foreign or newer one is refused."""
    if not folder.is_dir():
        raise GradlabError(f"{folder}: no such folder; expected a trace recorded by gradlab")
    if not (folder / MANIFEST).is_file():
        raise GradlabError(f"{folder}: not a gradlab trace, there is no {MANIFEST} in it")
    return Manifest.from_json(read_document(folder / MANIFEST, FORMAT), folder / MANIFEST)


def write_index(folder: Path, index: RankIndex) -> None:
    """Write the index of one rank of the trace in `folder`, which marks the rank's recording as closed."""
    write_document(folder / rank_folder(index.rank) / INDEX, INDEX_FORMAT, index.to_json())


def read_index(folder: Path, rank: int) -> RankIndex | None:
    """Read the index of one rank; return None if the rank's recording was never closed."""
    path = folder / rank_folder(rank) / INDEX
    return RankIndex.from_json(read_document(path, INDEX_FORMAT), path) if path.is_file() else None


def write_document(path: Path, document_format: str, body: dict[str, Any]) -> None:
    """Write a JSON document with its own sha256, whole or not at all."""
    content = {"format": document_format, "version": VERSION, **body}
    content["sha256"] = hashlib.sha256(canonical_json(content).encode()).hexdigest()
    write_whole(path, json.dumps(content, indent=1, sort_keys=True, allow_nan=False).encode())


def read_document(path: Path, document_format: str) -> dict[str, Any]:
    """Read a JSON document of version 1 and check format, version and sha256, in this order."""
    try:
        content = read_json(path, f"a {document_format!r} document, whole", _MAX_JSON_BYTES, _MAX_JSON_VALUES)
    except OSError as error:
        raise GradlabError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(content, dict) or content.get("format") != document_format:
        raise GradlabError(f"{path}: not written by gradlab, expected a {document_format!r} document")
    version = content.get("version")
    if type(version) is int and version > VERSION:
        raise NewerFormat(f"{path}: written by a newer gradlab (version {version}, this one reads {VERSION}): upgrade")
    if type(version) is not int or version != VERSION:
        raise GradlabError(f"{path}: version is {version!r}, expected {VERSION}")
    _check_sha256(content, path)
    return content


def _check_sha256(content: dict[str, Any], path: Path) -> None:
    claimed = content.pop("sha256", None)
    try:
        actual = hashlib.sha256(canonical_json(content).encode()).hexdigest()
    except ValueError:
        actual = ""
    if claimed != actual:
        raise GradlabError(f"{path}: damaged, its content does not match its sha256")


def ranks_there(folder: Path) -> frozenset[int]:
    """Return the ranks that have a folder in the trace's folder, whatever its manifest says."""
    names = (entry.name for entry in folder.iterdir())
    return frozenset(int(match[1]) for name in names if (match := re.fullmatch(r"rank-(\d{5,9})", name)))


def segment_numbers(folder: Path, suffix: str = "") -> list[int]:
    """List the numbers of the segments in a rank's folder whose file names end in `.h5` + suffix, ascending."""
    names: Iterable[str] = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    pattern = re.compile(r"(\d{6,})\.h5" + re.escape(suffix))
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
