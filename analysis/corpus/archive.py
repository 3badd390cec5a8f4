"""Pack a corpus into one file, the same bytes for the same files, and unpack one that anybody may have written."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path, PurePosixPath

from gradlab.analysis.corpus.manifest import MOST_BYTES, MOST_FILES, check_name, read_corpus
from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.tar_archive import open_tar

TOP = "gradlab-corpus"  # the folder in the archive
_EXPECTED = "a packed corpus"


def pack(folder: Path, target: Path) -> str:
    """Write a corpus's files into one archive, gzip-compressed if that is smaller; return its name, bytes and sha256.
    Members are sorted, and have neither times nor owners, so that the same files give the same bytes.
    """
    plain = _tar(folder, read_corpus(folder).files)
    packed = _gzipped(plain)
    smaller = len(packed) < len(plain)
    path = target if smaller else target.with_name(target.name.removesuffix(".gz"))
    data = packed if smaller else plain
    write_whole(path, data)
    return f"{path}: {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}"


def _tar(folder: Path, names: tuple[str, ...]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in names:
            content = (folder / name).read_bytes()
            member = tarfile.TarInfo(f"{TOP}/{name}")
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return written.getvalue()


def _gzipped(data: bytes) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as stream:
        stream.write(data)
    return packed.getvalue()


def unpack(archive: Path, folder: Path) -> Path:
    """Write the files of a packed corpus into a folder, and nothing anywhere else; return the corpus's folder.
    Refused are damage, more than 512 MiB or 4096 members, and whatever is no plain file of a corpus.
    """
    corpus = folder / TOP
    with open_tar(archive, MOST_BYTES, _EXPECTED) as members:
        for number, member in enumerate(members):
            if number >= MOST_FILES:
                raise GradlabError(f"{archive}: holds more than {MOST_FILES} members, not {_EXPECTED}")
            if not member.isdir():
                _write(corpus, _name_of(member, archive), members, member, archive)
    return corpus


def _name_of(member: tarfile.TarInfo, archive: Path) -> str:
    """The member's name in the corpus, without the folder in the archive."""
    top, *rest = PurePosixPath(member.name).parts or ("",)
    name = "/".join(rest) if top == TOP else member.name
    if not member.isreg():
        raise GradlabError(f"{archive}: {member.name[:80]!r} is a link or a device, expected plain files alone")
    return check_name(name, archive)


def _write(corpus: Path, name: str, members: tarfile.TarFile, member: tarfile.TarInfo, archive: Path) -> None:
    content = members.extractfile(member)
    path = corpus / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            while content is not None and (piece := content.read(2**20)):
                file.write(piece)
    except FileExistsError:
        raise GradlabError(f"{archive}: holds {name[:80]!r} twice, not {_EXPECTED}") from None
