"""An artifact: a plan with its learned tensors in one safetensors file.

The file's single metadata key `gradlab` holds canonical JSON (one key keeps the file's hash stable): the format's
number, the plan, its provenance, a sha256 per tensor and one of the header itself, because safetensors notices a
truncated file but not a flipped bit. Nothing in the file is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.layout import canonical_json
from gradlab.plan import Plan
from gradlab.plan.plan import hash_tensor, learned_tensors
from gradlab.printable import can_be_written
from gradlab.version import VERSION

FORMAT = 1
_LARGEST_HEADER = 64 * 2**20
_ROWS = torch.contiguous_format


@dataclass(frozen=True)
class Artifact:
    """A plan and its provenance.

    plan: plan with its learned tensors.
    provenance: the plan's provenance, plain JSON: method, trace hash, steps fitted on, held-out error by age, expected
        bytes.

    >>> plan = Plan.uniform(torch.nn.Linear(32, 16), "powersgd", rank=2)
    >>> path = Artifact(plan, {"method": "a first try"}).save("plan.safetensors")
    >>> Artifact.load(path).plan == plan, Artifact.load(path).provenance
    (True, {'method': 'a first try'})
    """

    plan: Plan
    provenance: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the file whole or not at all: under a temporary name, synchronised, then renamed.

        Args:
            path: the file.
            overwrite: whether to replace a file that is there.

        Returns:
            The path.

        Raises:
            GradlabError: if the file exists and overwrite is false, cannot be written, or the provenance is not JSON.
        """
        from safetensors.torch import save  # not above: whoever trains a plan made in place needs torch alone

        path = Path(path)
        if os.path.lexists(path) and not overwrite:
            raise GradlabError(f"{path} exists already: choose another name or ask to overwrite it")
        header = {
            "format": FORMAT,
            "written_by": f"gradlab {VERSION}",
            "plan": self.plan.to_json(),
            "origin": self.provenance,
            "sha256": {key: hash_tensor(tensor) for key, tensor in learned_tensors(self.plan).items()},
        }
        # Copies, because groups may share a tensor and safetensors refuses shared memory.
        copies = {key: t.detach().cpu().clone(memory_format=_ROWS) for key, t in learned_tensors(self.plan).items()}
        _write(path, save(copies, metadata={"gradlab": _seal(header)}))
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Artifact:
        """Read and verify a file.

        Args:
            path: the file.

        Returns:
            The plan with its provenance.

        Raises:
            GradlabError: if the file is missing, truncated, foreign, of another format, or has a flipped bit.
        """
        path = Path(path)
        header, tensors = _read(path)
        _check_format(path, header)
        _check_seal(path, header)
        hashes = header.get("sha256")
        if not isinstance(hashes, dict) or set(hashes) != set(tensors):
            raise GradlabError(f"{path}: the tensors in the file are not those its header lists")
        for key, tensor in tensors.items():
            if hash_tensor(tensor) != hashes[key]:
                raise GradlabError(f"{path}: tensor {key} is damaged (its sha256 differs from the header's)")
        provenance = header.get("origin")
        try:
            plan = Plan.from_json(header.get("plan"), tensors)
            return cls(plan, provenance if isinstance(provenance, dict) else {})
        except GradlabError as error:
            raise GradlabError(f"{path}: {error}") from None


def _seal(header: dict[str, Any]) -> str:
    """Write the header as canonical JSON with its own sha256 in it."""
    try:
        plain = json.loads(canonical_json(header))
    except (TypeError, ValueError, RecursionError) as error:
        raise GradlabError(f"artifact: the provenance is not plain JSON ({error})") from None
    return canonical_json(plain | {"header_sha256": _hash_header(plain)})


def _hash_header(header: dict[str, Any]) -> str:
    rest = {key: value for key, value in header.items() if key != "header_sha256"}
    return hashlib.sha256(canonical_json(rest).encode()).hexdigest()


def _check_seal(path: Path, header: dict[str, Any]) -> None:
    # Writing the header out nests deeper than anything done with it later, so that too deep a header ends here.
    try:
        sound = header.get("header_sha256") == _hash_header(header)
    except (ValueError, RecursionError):
        sound = False
    if not sound:
        raise GradlabError(f"{path}: the gradlab header is damaged (its sha256 differs)")


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise GradlabError(f"cannot write {path}: {reason}") from None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    if not os.path.isfile(path):
        raise GradlabError(f"no artifact at {path}")
    try:
        # safetensors takes names of UTF-8 alone.
        with (
            open(path, "rb") as opened,
            safe_open(str(path) if can_be_written(str(path)) else f"/dev/fd/{opened.fileno()}", "pt") as file,
        ):
            text = (file.metadata() or {}).get("gradlab")
            tensors = {key: file.get_tensor(key) for key in file.keys()} if text else {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise GradlabError(f"{path} is not a whole safetensors file ({error})") from None
    if text is None:
        raise GradlabError(f"{path} is a safetensors file, but not a gradlab artifact")
    if len(text) > _LARGEST_HEADER:
        raise GradlabError(f"{path}: header of {len(text)} bytes, more than any plan needs")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise GradlabError(f"{path}: the gradlab header is not JSON") from None
    if not isinstance(header, dict):
        raise GradlabError(f"{path}: the gradlab header is not a JSON object")
    return header, tensors


def _check_format(path: Path, header: dict[str, Any]) -> None:
    number = header.get("format")
    if type(number) is not int:
        raise GradlabError(f"{path}: the header names no format")
    if number != FORMAT:
        raise GradlabError(f"{path}: an artifact of format {number}, expected format {FORMAT}: upgrade gradlab")
