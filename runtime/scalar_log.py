"""A run's numbers in a file while it trains, a line of JSON per step: what `gradlab watch` shows."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch.distributed as dist

from gradlab.errors import GradlabError
from gradlab.executor.rules import sentences

if TYPE_CHECKING:
    from gradlab.runtime.exchange import Exchange


class ScalarLog:
    """Append a run's numbers to a file. A context manager; only rank 0 writes.

        with ScalarLog("run.jsonl") as log:
            ...
            optimizer.step()
            log.add(state, loss=loss.item())

    A line has "step" (from 1), "time" (seconds since 1970), the state's `scalars()`, the values that were given, and
    what rules found since the last line. Numbers that are not finite are null. The last line has "ended": true, or
    "error". A log that cannot be written any more, as on a full disk, warns once, and training goes on.

    >>> import json
    >>> from pathlib import Path
    >>> from gradlab.runtime import ScalarLog
    >>> with ScalarLog("run.jsonl") as log:
    ...     log.add(loss=2.3)
    >>> [json.loads(line).get("loss") for line in Path("run.jsonl").read_text().splitlines()]
    [2.3, None]

    Args:
        path: path of a new file, or of the file of the run that is resumed.
        every: steps from one line to the next.

    Raises:
        GradlabError: if every is not a whole number from 1, or the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        if type(every) is not int or every < 1:
            raise GradlabError(f"every = {every!r}, expected a whole number from 1")
        self._every, self._steps, self._told = every, 0, 0
        self._file: TextIO | None = None
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed at exit)
            except OSError as error:
                raise GradlabError(f"cannot write the log {path}: {error.strerror or error}") from None

    def add(self, state: Exchange | None = None, **values: float) -> None:
        """Add a step.

        Args:
            state: result of `compress`, or any other `Exchange`; None: there are no numbers but those given.
            values: more of them, such as the loss. Numbers of this process: tensors must be read before.
        """
        self._steps += 1
        if self._file is None or self._steps % self._every:
            return
        line: dict[str, Any] = {"step": self._steps, "time": time.time()}
        if state is not None:
            line |= {name.removeprefix("gradlab/"): value for name, value in state.scalars().items()}
            line |= self._rules(state)
        self._write({**line, **values})

    def _rules(self, state: Exchange) -> dict[str, list[str]]:
        """Findings of the rules since the last line, a sentence each."""
        found = state.findings
        new, self._told = found[self._told :], len(found)
        return {"rules": sentences(new, state.run.world_size)} if new else {}

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(f"{json.dumps({name: _finite(one) for name, one in line.items()})}\n")
            self._file.flush()
        except OSError as error:
            warnings.warn(f"gradlab: the log ends here: {error.strerror or error}", stacklevel=4)
            with suppress(OSError):
                self._file.close()
            self._file = None

    def __enter__(self) -> ScalarLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._file is None:
            return
        end = {"ended": True} if kind is None else {"error": f"{kind.__name__}: {error}"[:500]}
        self._write({"step": self._steps, "time": time.time(), **end})
        if self._file is not None:
            self._file.close()
        self._file = None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
