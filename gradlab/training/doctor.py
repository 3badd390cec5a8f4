"""Measure some steps of a training that goes on unchanged: what `gradlab doctor` tells without a model, of this one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from gradlab.analysis.forecast.diagnosis import cores_of, network_of, sentences, waiting, written
from gradlab.analysis.forecast.processors import timed
from gradlab.analysis.forecast.real_steps import StepTimes, link_in_training, times_of_steps
from gradlab.analysis.outputs import require_free
from gradlab.ddp.copies import Uncopied
from gradlab.ddp.groups import Ranks
from gradlab.ddp.model import require_ddp, synchronised_layers
from gradlab.ddp.switch import switched
from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.jsonable import plain
from gradlab.runtime.bucket_times import BucketTimes, timed_hook
from gradlab.runtime.checks import check_ddp
from gradlab.runtime.doctor import measure

_SECONDS = 1.0  # of measuring the links, about


class doctor(Uncopied):
    """Tells what the steps of a model in DDP are made of: computing, exchanging, and waiting for it.

        with gradlab.doctor(ddp_model) as report:
            for inputs, targets in itertools.islice(batches, 20):
                ...  # the steps of your training

    All ranks make one together, which measures their links for a few seconds. Each bucket is timed in the block:
    when it is ready, and how long its exchange takes. On leaving the block rank 0 prints what `gradlab doctor` prints,
    with forecasts for this model on the links as its own buckets found them. Training is bit-identical to plain DDP
    in the block and after it, with the exception that `TraceRecorder` has. Afterwards `gradlab.compress` and a
    recorder can be attached as to a new model. The first step only warms up.

    >>> import gradlab
    >>> ddp_model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 32))
    >>> with gradlab.doctor(ddp_model):
    ...     ddp_model(torch.ones(8, 64)).sum().backward()
    Traceback (most recent call last):
    gradlab.errors.GradlabError: gradlab doctor measures between ranks, and there is one: start one on each node or more

    Args:
        model: the DistributedDataParallel model, or what torch.compile made of it.
        out: file for what was measured, which `--bandwidth` of other commands takes. Rank 0 writes it.
        overwrite: whether a file of that name is replaced.

    Raises:
        GradlabError: for a model that is not in DDP (by the name of what it is in) or has a communication hook; for one
            rank alone, or nodes of different sizes; for a file that is there. On leaving: if other ranks have failed.
    """

    def __init__(self, model: object, out: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> None:
        ddp = require_ddp(model, "gradlab.doctor")
        check_ddp(ddp, None, None)
        device = next(ddp.parameters()).device
        self._ranks = Ranks(ddp.process_group, device)
        self._out = None if out is None else Path(out)
        problem = None
        try:
            if self._out is not None and self._ranks.rank == 0:
                require_free(self._out, overwrite)
        except GradlabError as error:
            problem = str(error)
        self._ranks.raise_together(problem)
        self._layers = [layer for layer, _ in synchronised_layers(ddp)]
        self._found = measure(device, _SECONDS, ddp.process_group).to_json()
        self._links, self._nodes, self._node = network_of(self._found)
        self._processor = timed(device)
        self._summary: dict[str, Any] | None = None
        self._switch = switched(ddp)
        self._times = BucketTimes(ddp, self._switch.average, device)
        self._switch.given = self._times, timed_hook

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._switch.given = None
        if kind is not None:
            print(f"gradlab.doctor: {kind.__name__} ended the block, so nothing is told", flush=True)
            return
        try:
            rows = self._ranks.gather(self._times.rows())
        except RuntimeError as lost:
            raise GradlabError(f"gradlab.doctor: a rank did not come to the end of the block: {lost}") from lost
        if (times := times_of_steps(rows)) is not None:
            self._tell(times)
        elif self._ranks.rank == 0:
            made = f"{min(map(len, rows))} steps that exchange gradients were made"
            print(f"gradlab.doctor: {made} in the block, expected 2 or more", flush=True)

    def _tell(self, times: StepTimes) -> None:
        first = next(iter(self._links))
        links = self._links | {first: link_in_training(self._links[first], times)}
        steps, remarks = [], list[str]()
        if self._ranks.rank == 0:
            network = links[first], self._nodes, self._node
            ours: dict[str, Any] = {"cores": cores_of(self._found), "processor": self._processor}
            try:
                steps = [waiting(self._layers, times.computing_seconds, *network, ["int4"], **ours)]
            except GradlabError as error:  # training goes on
                remarks = [f"No forecast: {error}"]
            lines = sentences(self._found | {"work_seconds": times.computing}, links, steps)
            print(*lines[:1], *times.sentences, *lines[1:], *remarks, sep="\n", flush=True)
        self._summary = plain(written(self._found, links, steps, training=times, processor=self._processor))
        if self._out is not None and self._ranks.rank == 0:
            write_whole(self._out, json.dumps(self._summary, indent=1).encode())

    def summary(self) -> dict[str, Any]:
        """Return what was measured, as plain JSON in seconds, bytes and bits per second.

        Raises:
            GradlabError: before the block has ended with steps in it.
        """
        if self._summary is None:
            raise GradlabError("gradlab.doctor: nothing is measured before the block has ended, with 2 steps in it")
        return self._summary
