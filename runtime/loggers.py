"""A run's numbers in the logger that a training has already: TensorBoard, W&B or Trackio.

None of these packages is imported here. A logger is known by its method: TensorBoard's writers have `add_scalar`, runs
of W&B and Trackio have `log`, which takes a dict.
"""

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


def log_scalars(logger: Any, state: Exchange | None, step: int, **values: float) -> None:
    """Log a step of a run: the state's `scalars()`, and other numbers such as the loss.

        log_scalars(writer, state, step, loss=loss.item())

    >>> from types import SimpleNamespace
    >>> from gradlab.runtime import log_scalars
    >>> writer = SimpleNamespace(add_scalar=lambda name, value, step: print(step, name, value))
    >>> log_scalars(writer, None, 7, loss=0.5)
    7 loss 0.5

    Call it on every rank, or on rank 0 alone: where there is no logger, nothing is done.

    Args:
        logger: TensorBoard's `SummaryWriter`; a run of W&B (what `wandb.init` returned) or of Trackio (`trackio.init`);
            anything else with `add_scalar(name, value, step)`, or with `log(numbers, step=step)`. None: this rank has
            none.
        state: result of `compress`, or any other `Exchange`; None: there are no numbers but those given.
        step: training step, from 0 or 1, ascending.
        values: more numbers, by name. Tensors must be read before.

    Raises:
        GradlabError: if the logger has neither method.
    """
    if logger is None:
        return
    numbers = ({} if state is None else state.scalars()) | values
    if callable(getattr(logger, "add_scalar", None)):
        for name, value in numbers.items():
            logger.add_scalar(name, value, step)
    elif callable(getattr(logger, "log", None)):
        logger.log(numbers, step=step)
    else:
        raise GradlabError(
            f"log_scalars: logger is a {type(logger).__name__}, expected TensorBoard's SummaryWriter, or a run of W&B "
            "or Trackio"
        )


class ScalarLog:
    """Append a run's numbers to a file. A context manager; only rank 0 writes.

        with ScalarLog("run.jsonl") as log:
            ...
            optimizer.step()
            log.add(state, loss=loss.item())

    A line has "step" (from 1), "time" (seconds since 1970), the state's `scalars()`, the values that were given, and
    what rules found since the last line. "slowest_rank" is the rank whose gradients are ready last, with its seconds
    and the usual rank's, once all ranks have told theirs. Numbers that are not finite are null. The last line has
    "ended": true, or "error". A log that cannot be written any more, as on a full disk, warns once, and training goes
    on.

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
        self._asked, self._slowest = -math.inf, dict[str, float]()
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
            line |= self._ranks_of(state) | self._rules(state)
        self._write({**line, **values})

    def _ranks_of(self, state: Exchange) -> dict[str, float]:
        """The slowest rank, which is asked for once a second."""
        if time.monotonic() - self._asked >= 1.0:
            self._asked, self._slowest = time.monotonic(), state._driver.rank_times.numbers()
        return self._slowest

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
