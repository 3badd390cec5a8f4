"""An artifact: a plan with its learned tensors in one safetensors file.

The file's single metadata key `gradlab` holds canonical JSON (one key keeps the file's hash stable): format and
minimum reader version, the plan, its provenance, a sha256 per tensor and one of the header itself, because
safetensors notices a truncated file but not a flipped bit. Nothing in the file is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.layout import canonical_json
from gradlab.learning.slice_pca import slice_view
from gradlab.plan import Group, Plan
from gradlab.plan.plan import hash_tensor
from gradlab.printable import can_be_written
from gradlab.roles import FIRST_ROLES
from gradlab.version import VERSION

# 2: groups have wrappers, where format 1 had error_feedback alone. 3: a plan may be chosen anew while training. 4:
# layers may have roles that transformers brought, such as experts, whose codecs see other matrices; slices of
# GradiVeQ need not lie along a matrix's outputs. 5: metrics of plans that are chosen anew are l2 and squared-l2, where
# format 3 had plain and squared; such a plan may follow Accordion.
FORMAT = 5
_FIRST_WITH_SLICE_AXES = 4
# The oldest reader that understands what this version writes: of a plan that stays, of one with new roles or such
# slices, and of one that is chosen anew.
MINIMUM_READER, MINIMUM_READER_OF_ROLES, MINIMUM_READER_OF_REFRESH = 2, 4, 5
_LARGEST_HEADER = 64 * 2**20
_ROWS = torch.contiguous_format


@dataclass(frozen=True)
class Artifact:
    """A plan and its provenance.

    plan: with its learned tensors.
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
            "minimum_reader": _minimum_reader(self.plan),
            "written_by": f"gradlab {VERSION}",
            "plan": self.plan.to_json(),
            "origin": self.provenance,
            "sha256": self.plan.tensor_hashes(),
        }
        # Copies, because groups may share a tensor and safetensors refuses shared memory.
        copies = {key: t.detach().cpu().clone(memory_format=_ROWS) for key, t in self.plan.tensors().items()}
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
            GradlabError: if the file is missing, truncated, foreign, written by a newer version, or has a flipped bit.
        """
        path = Path(path)
        header, tensors = _read(path)
        _check_version(path, header)
        _check_seal(path, header)
        hashes = header.get("sha256")
        if not isinstance(hashes, dict) or set(hashes) != set(tensors):
            raise GradlabError(f"{path}: the tensors in the file are not those its header lists")
        for key, tensor in tensors.items():
            if hash_tensor(tensor) != hashes[key]:
                raise GradlabError(f"{path}: tensor {key} is damaged (its sha256 differs from the header's)")
        provenance = header.get("origin")
        try:
            plan = _with_slice_axes(Plan.from_json(header.get("plan"), tensors), header["format"])
            return cls(plan, provenance if isinstance(provenance, dict) else {})
        except GradlabError as error:
            raise GradlabError(f"{path}: {error}") from None


def _minimum_reader(plan: Plan) -> int:
    if plan.refresh is not None:
        return MINIMUM_READER_OF_REFRESH
    if any(layer.role not in FIRST_ROLES for layer in plan.layers) or any(
        _has_slice_axis(plan, group) for group in plan.groups
    ):
        return MINIMUM_READER_OF_ROLES
    return MINIMUM_READER


def _has_slice_axis(plan: Plan, group: Group) -> bool:
    return group.codec == "gradiveq" and ("slice_axis" in group.settings or _is_turned(plan, group))


def _is_turned(plan: Plan, group: Group) -> bool:
    """Whether slices of one of the group's layers lie along its inputs unless a setting says otherwise."""
    return any(slice_view(layer) != layer for layer in plan.members(group))


def _with_slice_axes(plan: Plan, version: int) -> Plan:
    """The plan with the axis that GradiVeQ's slices always lay along before it was a setting."""
    if version >= _FIRST_WITH_SLICE_AXES:
        return plan
    return replace(plan, groups=tuple(_along_outputs(plan, group) for group in plan.groups))


def _along_outputs(plan: Plan, group: Group) -> Group:
    if group.codec != "gradiveq" or "slice_axis" in group.settings or not _is_turned(plan, group):
        return group
    return replace(group, settings={**group.settings, "slice_axis": "outputs"})


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


def _check_version(path: Path, header: dict[str, Any]) -> None:
    needed, version = header.get("minimum_reader"), header.get("format")
    if type(needed) is not int or type(version) is not int:
        raise GradlabError(f"{path}: the header names no format version")
    if needed > FORMAT:
        raise GradlabError(
            f"{path} was written by a newer gradlab (format {version}); this one reads up to format {FORMAT}: upgrade"
        )
