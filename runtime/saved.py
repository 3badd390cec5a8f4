"""Read what `torch.save` wrote, without believing what it claims."""

from __future__ import annotations

import zipfile
from typing import IO, Any

import torch

from gradlab.errors import GradlabError


def load_saved(file: IO[bytes], nbytes: int) -> Any:
    """Read plain values and tensors that `torch.save` wrote, on the CPU, from the file's start.

    `torch.save` writes a zip archive whose members are stored as they are. A compressed member may claim a thousand
    times its bytes, and members that lie in one place are read as often as they are named; such archives are refused.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise GradlabError(f"checkpoint: damaged, or not written by torch.save: {type(error).__name__}") from None
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if packed or sum(member.file_size for member in members) > nbytes:
        raise GradlabError("checkpoint: its members claim more bytes than the file has; torch.save writes none such")
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch names no set of errors for a damaged file
        raise GradlabError(f"checkpoint: damaged, or not written by torch.save: {type(error).__name__}") from None
