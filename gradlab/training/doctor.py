"""Measure some steps of a training that goes on unchanged: what `gradlab doctor` tells without a model, of this one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from gradlab.analysis.forecast.diagnosis import (
    Waiting,
    cores_of,
    network_of,
    sentences,
    sharded_text,
    step_texts,
    waiting,
    waiting_sharded,
    written,
)
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.network import Network, Profile
from gradlab.analysis.forecast.processors import timed
from gradlab.analysis.forecast.real_steps import (
    ShardedTimes,
    StepTimes,
    link_in_training,
    times_of_sharded_steps,
    times_of_steps,
)
from gradlab.analysis.forecast.simulator import SHARDS
from gradlab.analysis.outputs import require_free
from gradlab.ddp.copies import Uncopied
from gradlab.ddp.groups import Ranks, group_or_world
from gradlab.ddp.model import is_sharded, require_ddp, synchronised_layers, without_compile
from gradlab.ddp.sharded_units import layers_of_units, shard_group
from gradlab.ddp.switch import switched
from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.jsonable import plain
from gradlab.runtime.bucket_times import BucketTimes, timed_hook
from gradlab.runtime.checks import check_ddp
from gradlab.runtime.doctor import measure
from gradlab.runtime.shard_times import ShardTimes

_SECONDS = 1.0  # of measuring the links, about
_CALLER = "gradlab.doctor"


class _Buckets:
    """A model in DDP, whose buckets are timed."""

    def __init__(self, model: object) -> None:
        self._ddp = require_ddp(model, _CALLER)
        check_ddp(self._ddp, None, None)
        self.group, self.device = self._ddp.process_group, next(self._ddp.parameters()).device
        self._layers = [layer for layer, _ in synchronised_layers(self._ddp)]

    def start(self) -> None:
        self._switch = switched(self._ddp)
        self._times = BucketTimes(self._ddp, self._switch.average, self.device)
        self._switch.given = self._times, timed_hook

    def stop(self) -> None:
        self._switch.given = None

    def rows(self) -> list[Any]:
        return self._times.rows()

    def times(self, rows: Any) -> StepTimes | None:
        return times_of_steps(rows)

    def links(self, links: dict[str, Link], times: StepTimes) -> dict[str, Link]:
        first = next(iter(links))
        return links | {first: link_in_training(links[first], times)}

    def forecasts(self, times: StepTimes, network: Network) -> list[Waiting]:
        [link], [nodes] = network.links, network.nodes
        how: dict[str, Any] = {"cores": network.cores, "processor": network.processor}
        return [waiting(self._layers, times.computing_seconds, link, nodes, network.node, ["int4"], **how)]

    def texts(self, steps: Sequence[Waiting]) -> list[str]:
        return step_texts(steps)


class _Shards:
    """A model under FSDP2, whose collectives are timed."""

    def __init__(self, model: object) -> None:
        self._times = ShardTimes(model, _CALLER)
        self._layers, self.device = layers_of_units(model), self._times.device
        self.group = group_or_world(None, _CALLER)
        self._ranks = shard_group(self._times.units, _CALLER).size()

    def start(self) -> None:
        self._times.start()

    def stop(self) -> None:
        self._times.stop()

    def rows(self) -> list[Any]:
        return self._times.rows()

    def times(self, rows: Any) -> ShardedTimes | None:
        return times_of_sharded_steps(rows, on_gpu=self.device.type == "cuda")

    def links(self, links: dict[str, Link], times: ShardedTimes) -> dict[str, Link]:
        return links

    def forecasts(self, times: ShardedTimes, network: Network) -> list[Waiting]:
        """Forecast where parameters are sharded inside nodes, or over all ranks, each a node or all in one."""
        if times.computing_seconds is None or self._times.parts:
            return []
        node = network.node
        if node is not None and node.local_ranks == self._ranks and self._times.between:
            network = replace(network, node=replace(node, plans=SHARDS))
        elif node is None and network.nodes == [self._ranks]:
            network = replace(network, sharded=True)
        else:
            return []
        network = replace(network, profile=Profile(times.computing_seconds, "measured"))
        return [waiting_sharded(self._layers, network, times.seconds)]

    def texts(self, steps: Sequence[Waiting]) -> list[str]:
        return [sharded_text(one) for one in steps]


class doctor(Uncopied):
    """Tells what the steps of a model in DDP or FSDP2 are made of: computing, exchanging, and waiting for it.

        with gradlab.doctor(ddp_model) as report:
            for inputs, targets in itertools.islice(batches, 20):
                ...  # the steps of your training

    All ranks make one together, which measures their links for a few seconds. Each bucket is timed in the block:
    when it is ready, and how long its exchange takes; under FSDP2 each collective. On leaving the block rank 0 prints
    what `gradlab doctor` prints, with forecasts for this model. Training is bit-identical to FSDP2, and to plain DDP
    with the exception that `TraceRecorder` has, in the block and after it. Afterwards gradlab's compression or a
    recorder can be attached as to a new model. The first step only warms up.

    >>> import gradlab
    >>> ddp_model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 32))
    >>> with gradlab.doctor(ddp_model):
    ...     ddp_model(torch.ones(8, 64)).sum().backward()
    Traceback (most recent call last):
    gradlab.errors.GradlabError: gradlab doctor measures between ranks, and there is one: start one on each node or more

    Args:
        model: the DistributedDataParallel model, or the one that fully_shard was called on, native HSDP's and tensor
            parallel ones included; or what torch.compile made of it.
        out: file for what was measured, which `--bandwidth` of other commands takes. Rank 0 writes it.
        overwrite: whether a file of that name is replaced.

    Raises:
        GradlabError: for a model that is in neither (by the name of what it is in) or has a communication hook; for one
            rank alone, or nodes of different sizes; for a file that is there. On leaving: if other ranks have failed.
    """

    def __init__(self, model: object, out: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> None:
        self._model = _Shards(model) if is_sharded(without_compile(model)) else _Buckets(model)
        self._ranks = Ranks(self._model.group, self._model.device)
        self._out = None if out is None else Path(out)
        problem = None
        try:
            if self._out is not None and self._ranks.rank == 0:
                require_free(self._out, overwrite)
        except GradlabError as error:
            problem = str(error)
        self._ranks.raise_together(problem)
        self._found = measure(self._model.device, _SECONDS, self._model.group).to_json()
        self._links, self._nodes, self._node = network_of(self._found)
        self._processor = timed(self._model.device)
        self._summary: dict[str, Any] | None = None
        self._model.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._model.stop()
        if kind is not None:
            print(f"{_CALLER}: {kind.__name__} ended the block, so nothing is told", flush=True)
            return
        try:
            rows = self._ranks.gather(self._model.rows())
        except RuntimeError as lost:
            raise GradlabError(f"{_CALLER}: a rank did not come to the end of the block: {lost}") from lost
        if (times := self._model.times(rows)) is not None:
            self._tell(times)
        elif self._ranks.rank == 0:
            made = f"{min(map(len, rows))} steps that exchange gradients were made"
            print(f"{_CALLER}: {made} in the block, expected 2 or more", flush=True)

    def _tell(self, times: Any) -> None:
        links, steps = self._model.links(self._links, times), list[Waiting]()
        if self._ranks.rank == 0:
            remarks = list[str]()
            where: dict[str, Any] = {"node": self._node, "processor": self._processor}
            network = Network([next(iter(links.values()))], [self._nodes], cores=cores_of(self._found), **where)
            try:
                steps = self._model.forecasts(times, network)
            except GradlabError as error:  # training goes on
                remarks = [f"No forecast: {error}"]
            found = self._found | ({"work_seconds": times.computing} if times.computing else {})
            lines = sentences(found, links, self._model.texts(steps))
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
            raise GradlabError(f"{_CALLER}: nothing is measured before the block has ended, with 2 steps in it")
        return self._summary
