"""Every rank's state in a checkpoint: a file per rank, an entry of torch.distributed.checkpoint, and how both are read.

Frameworks save model and optimizer once, but every rank has residuals of its own. Each writes a file into the folder
that the framework makes, and reads it from there. So nothing crosses the network, and a checkpoint stays one folder.

    dcp.save({"model": model_state, "gradlab": state.stateful}, checkpoint_id=folder)
    dcp.load({"model": model_state, "gradlab": state.stateful}, checkpoint_id=folder)

That library takes tensors of one name on several ranks for copies, and keeps one. A residual is another one on every
rank, and a run that has yet to begin has none to load into. So a rank's state is one entry, under the rank's number.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.codec.wrapper import POLICIES
from gradlab.ddp.groups import Ranks
from gradlab.errors import GradlabError
from gradlab.files import Written, written_beside
from gradlab.runtime.checkpoint import same_ranks


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


class Keeps(Protocol):
    """An object with a state per rank."""

    def state_dict(self) -> dict[str, Any]:
        """Collect the rank's state."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from it."""


class Saves(Keeps, Protocol):
    """An `Exchange`, or `LocalSteps`."""

    identity: dict[str, Any]

    @property
    def iteration(self) -> int:
        """Number of the next step."""

    def load_state_dicts(self, states: Any, residuals: str) -> None:
        """Continue from those of more or fewer ranks."""


def check_policy(residuals: object) -> None:
    """Refuse a policy for residuals, in a checkpoint of another world size, that is neither None nor one's name."""
    if residuals not in (None, *POLICIES):
        raise GradlabError(f"residuals = {residuals!r}, expected None or one of {', '.join(POLICIES)}")


def go_on(state: Saves, residuals: str | None, read: Callable[[int], Any]) -> None:
    """Continue from the states that `read` gives by old rank. Another world size takes a policy for residuals, with
    which the states of all old ranks are read."""
    first = read(0) if residuals is not None else {}
    if residuals is not None and not same_ranks(first, state.identity):
        state.load_state_dicts([read(one) for one in range(int(first["world_size"]))], residuals)
        return
    saved, ranks = read(state.identity["rank"]), state.identity["world_size"]
    if saved.get("world_size") != ranks:
        came = f"checkpoint: world_size is {repr(saved.get('world_size'))[:80]}, this run has {ranks}"
        raise GradlabError(f"{came}; residuals= (split, sum or drop) says what becomes of the residuals")
    state.load_state_dict(saved)


class RankState:
    """Stateful, as torch.distributed.checkpoint calls it, with an entry under this process's rank among all: stages of
    a pipeline and parts of layers are saved into one checkpoint."""

    def __init__(self, owner: Keeps) -> None:
        self._owner, self._key = owner, f"rank {dist.get_rank() if dist.is_initialized() else 0}"

    def state_dict(self) -> dict[str, Any]:
        """Write the rank's state as bytes, in one entry."""
        file = io.BytesIO()
        torch.save(self._owner.state_dict(), file)
        return {self._key: file.getvalue()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from the rank's entry; refuse one that is missing, damaged, or of another plan or world size."""
        content = saved.get(self._key)
        if not isinstance(content, bytes):
            raise GradlabError(f"checkpoint: no state of {self._key}")
        try:
            state = load_saved(io.BytesIO(content), len(content))
        except GradlabError as error:
            raise GradlabError(f"{self._key}: {error}") from None
        self._owner.load_state_dict(state)


Result = TypeVar("Result")


class RankFiles:
    """The files `<stem>_rank_<rank>.pt` of a state. Every method is a collective of the model's ranks.

    residuals: use of the residuals in files of another world size, see `CompressionState.load_state_dicts`.
        Every rank then reads the files of all. None refuses them.
    """

    def __init__(self, state: Saves, model: DistributedDataParallel, residuals: str | None) -> None:
        self._state, self._residuals = state, residuals
        self._ranks = Ranks(model.process_group, next(model.parameters()).device)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._ranks.rank

    def agree(self, value: str) -> str:
        """Return rank 0's value."""
        first: str = self._ranks.gather(value)[0]
        return first

    def save(self, folder: Path, stem: str, marks: Mapping[str, Any] | None = None) -> None:
        """Write this rank's file, with plain values that `load` can ask for. On return all ranks have written theirs.

        Old files are replaced when all ranks' new ones are on the disk, so that a full one costs no older checkpoint.
        If one rank cannot write, all raise.
        """
        with ExitStack() as stack:

            def write() -> Written:
                file = io.BytesIO()
                torch.save({**self._state.state_dict(), "marks": dict(marks or {})}, file)
                folder.mkdir(parents=True, exist_ok=True)
                return stack.enter_context(written_beside(_path(folder, stem, self.rank), file.getbuffer()))

            written = self._together(folder, write)
            self._together(folder, written.take_its_name)

    def _together(self, folder: Path, attempt: Callable[[], Result]) -> Result:
        """Attempt something with files on all ranks, and go on only if all could. A collective."""
        done, problem = [], None
        try:
            done.append(attempt())
        except (OSError, GradlabError) as error:  # on this rank alone, perhaps: the others must not wait for it
            problem = f"{folder}: the compression state cannot be written: {error}"
        self._ranks.raise_together(problem)
        return done[0]

    def load(self, folder: Path, stem: str, missing: str, marks: Mapping[str, Any] | None = None) -> None:
        """Continue from the files of a checkpoint with these marks (None: any); `missing` says what to do without one.

        All ranks raise, if one has no sound file of this plan and rank, or files differ in age.
        """
        problem, read = None, partial(_read, folder, stem, missing, marks)
        try:
            go_on(self._state, self._residuals, read)
        except FileNotFoundError as error:
            problem = f"{error.filename}: missing; {missing}"
        except GradlabError as error:
            problem = f"{folder}: {error}"
        except Exception as error:
            problem = f"{folder}: a file is damaged, or not this program's: {type(error).__name__}"
        self._ranks.raise_together(problem)
        iterations = self._ranks.gather(self._state.iteration)
        if len(set(iterations)) > 1:
            raise GradlabError(f"{folder}: written over, but not by all ranks: it holds states of steps {iterations}")


def _read(folder: Path, stem: str, missing: str, marks: Mapping[str, Any] | None, rank: int) -> Any:
    """Read a rank's file, of a save with these marks."""
    path = _path(folder, stem, rank)
    with open(path, "rb") as file:
        saved = load_saved(file, path.stat().st_size)
    if not isinstance(saved, dict):
        raise GradlabError(f"{path.name}: a {type(saved).__name__}, expected what state_dict gives")
    if marks is not None and saved.get("marks") != dict(marks):
        raise GradlabError(f"{path.name} is of another save; {missing}")
    return saved


def _path(folder: Path, stem: str, rank: int) -> Path:
    return folder / f"{stem}_rank_{rank}.pt"
