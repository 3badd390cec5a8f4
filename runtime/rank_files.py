"""Every rank's state in the folder of a checkpoint: one file per rank.

Frameworks save model and optimizer once, but every rank has residuals of its own. Each writes a file into the folder
that the framework makes, and reads it from there. So nothing crosses the network, and a checkpoint stays one folder.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from gradlab.codec.wrapper import POLICIES
from gradlab.ddp.agreement import Ranks
from gradlab.errors import GradlabError
from gradlab.files import Written, written_beside
from gradlab.runtime.outer.in_ddp import LocalSteps
from gradlab.runtime.saved import load_saved
from gradlab.runtime.state import CompressionState

Result = TypeVar("Result")


def check_policy(residuals: object) -> None:
    """Refuse a policy for residuals, in a checkpoint of another world size, that is neither None nor one's name."""
    if residuals not in (None, *POLICIES):
        raise GradlabError(f"residuals = {residuals!r}, expected None or one of {', '.join(POLICIES)}")


class RankFiles:
    """The files `<stem>_rank_<rank>.pt` of a state. Every method is a collective of the model's ranks.

    residuals: use of the residuals in files of another world size, see `CompressionState.load_state_dicts`.
        Every rank then reads the files of all. None refuses them.
    """

    def __init__(
        self, state: CompressionState | LocalSteps, model: DistributedDataParallel, residuals: str | None
    ) -> None:
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
        self._ranks.raise_together(self._attempt(folder, stem, missing, marks))
        iterations = self._ranks.gather(self._state.iteration)
        if len(set(iterations)) > 1:
            raise GradlabError(f"{folder}: written over, but not by all ranks: it holds states of steps {iterations}")

    def _attempt(self, folder: Path, stem: str, missing: str, marks: Mapping[str, Any] | None) -> str | None:
        """Load; return the problem, if there is one, for the other ranks."""
        try:
            self._restore(folder, stem, missing, marks)
        except FileNotFoundError as error:
            return f"{error.filename}: missing; {missing}"
        except GradlabError as error:
            return f"{folder}: {error}"
        except Exception as error:
            return f"{folder}: a file is damaged, or not this program's: {type(error).__name__}"
        return None

    def _restore(self, folder: Path, stem: str, missing: str, marks: Mapping[str, Any] | None) -> None:
        def read(rank: int) -> Any:
            path = _path(folder, stem, rank)
            with open(path, "rb") as file:
                saved = load_saved(file, path.stat().st_size)
            if not isinstance(saved, dict):
                raise GradlabError(f"{path.name}: a {type(saved).__name__}, expected what state_dict gives")
            if marks is not None and saved.get("marks") != dict(marks):
                raise GradlabError(f"{path.name} is of another save; {missing}")
            return saved

        first = read(0) if self._residuals is not None else {}
        if self._residuals is not None and not self._state.has_ranks_of(first):
            everyone = [read(rank) for rank in range(int(first["world_size"]))]
            self._state.load_state_dicts(everyone, self._residuals)
            return
        saved = read(self.rank)
        if saved.get("world_size") != self._ranks.size:
            came = f"checkpoint: world_size is {repr(saved.get('world_size'))[:80]}, this run has {self._ranks.size}"
            raise GradlabError(f"{came}; residuals= (split, sum or drop) says what becomes of the residuals")
        self._state.load_state_dict(saved)


def _path(folder: Path, stem: str, rank: int) -> Path:
    return folder / f"{stem}_rank_{rank}.pt"
