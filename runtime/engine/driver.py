"""Drive a plan's steps on a process group: gradients come in parts, their means go back into the same memory.

Each part is cut into segments of groups, and every segment is a tick (`gradlab.executor.ticks`): while its groups are
encoded, the last segment's collectives travel. A part without layers that a codec works on is averaged in its own
buffer, exactly as plain DDP does it. Collectives follow from parts and segments alone, so that one order serves every
backend.

The ranks' agreement on finite gradients travels after the last part. If gradients were not finite, all of the step's
become NaN on every rank, so that a loss scaler skips it everywhere.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from gradlab.codec import Exchanged, Tensors
from gradlab.codec.exchanged import described
from gradlab.codec.measures import contribution_error, is_finite, largest_magnitudes
from gradlab.collectives import Coroutine, Request, as_requests, payload_bytes, resumed
from gradlab.collectives import Step as Requested
from gradlab.ddp.step_clock import Moment, moment
from gradlab.errors import BadMessage, GradlabError
from gradlab.executor import PlanRun, Step, Ticks
from gradlab.executor.ticks import InFlight
from gradlab.executor.watch import GroupMeasures, gradient_norms, measure, noise_squares, residual_norms
from gradlab.runtime.engine.options import Surroundings
from gradlab.runtime.engine.rules import RuleWatch
from gradlab.runtime.engine.statistics import Place, Statistics, StepRecord
from gradlab.runtime.network.communicator import Communicator
from gradlab.runtime.network.faults import CommunicationError, Reasons
from gradlab.runtime.network.in_flight import InPlaceMean
from gradlab.runtime.network.rank_times import RankTimes
from gradlab.runtime.network.relay import measured
from gradlab.runtime.timeline import profiled

Result = TypeVar("Result")


def drive(coroutine: Coroutine[Result], communicator: Communicator) -> Result:
    """Run a codec's coroutine to its end on a process group, in the calling thread.

    All ranks of the group have to call it with coroutines that ask for the same collectives.

    >>> from gradlab.codec import mean_only
    >>> from gradlab.runtime import Communicator, drive
    >>> communicator = Communicator(torch.distributed.group.WORLD)
    >>> drive(mean_only({"w": torch.tensor([3.0])}), communicator).mean
    {'w': tensor([3.])}

    Args:
        coroutine: a codec's.
        communicator: communicator of the group.

    Returns:
        What the coroutine returns.

    Raises:
        CommunicationError: if a collective failed.
    """
    try:
        step = next(coroutine)
        while True:
            step = resumed(coroutine, step, communicator.issue(as_requests(step)).answers())
    except StopIteration as stop:
        return stop.value


@dataclass(eq=False)
class Part:
    """Gradients that arrive together, and in whose memory the results are written.

    index: number within the step, from 0.
    buffer: the flat memory that holds all of them and nothing else; None if there is none.
    arrived: when they came, by time.perf_counter.
    ready: event of a device after which they are there; None: at `arrived`.
    started: result of `StepDriver.start`, if the first collective is on its way already.
    """

    index: int
    gradients: Tensors
    buffer: torch.Tensor | None = None
    arrived: float = field(default_factory=time.perf_counter)
    ready: Any = None
    started: Any = None

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold its gradients."""
        return list(self.gradients.values()) if self.buffer is None else [self.buffer]

    def settle(self) -> None:
        """Pass the results on after they are written."""


class Running:
    """One coroutine in progress: a group's codec, the dense layers of a part, or the ranks' agreement.

    part: number of the part that it began with.
    finish: called with what the coroutine returns.
    watch: called after every stretch of its code, with begin, end, and whether it was the first.
    """

    def __init__(
        self,
        name: str,
        coroutine: Coroutine[Any],
        part: int,
        *,
        codec: str = "",
        finish: Callable[[Any], None] = lambda _: None,
        watch: Callable[[Running, float, float, bool], None] = lambda *_: None,
    ) -> None:
        self.name, self.part = name, part
        self.requests: tuple[Request, ...] = ()
        self.done = False
        self._label = f"codec {codec} on {name}" if codec else name
        self._coroutine, self._finish, self._watch = coroutine, finish, watch
        self._requested: Requested = ()

    def advance(self, answers: Sequence[Any] | None = None) -> None:
        """Run to the next request, or to the end; without answers, from the start."""
        began = time.perf_counter()
        try:
            with profiled("encode" if answers is None else "decode"):
                self._go_on(answers)
        except BadMessage:
            raise  # it names the codec and the group
        except Exception as error:
            raise GradlabError(f"{self._label}: {type(error).__name__}: {error}") from error
        self._watch(self, began, time.perf_counter(), answers is None)

    def _go_on(self, answers: Sequence[Any] | None) -> None:
        try:
            coroutine = self._coroutine
            self._requested = next(coroutine) if answers is None else resumed(coroutine, self._requested, answers)
            self.requests = as_requests(self._requested)
        except StopIteration as stop:
            self.requests, self._requested, self.done = (), (), True
            self._finish(stop.value)


@dataclass
class Iteration:
    """The data of the step in progress, which are dropped after it.

    measured_groups: groups' sums for the rules, by name; empty in a step that is not measured.
    dense: means of whole buffers that travel, by number of the part.
    results: largest magnitudes of results that were handed over before the host knows whether they count; or None.
    """

    step: Step
    record: StepRecord
    ticks: Ticks[Running]
    measured: bool = False
    measured_groups: dict[str, GroupMeasures] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    dense: dict[int, InPlaceMean] = field(default_factory=dict)
    results: torch.Tensor | None = None

    def abandon(self) -> None:
        """Let go of what holds collectives, because exchanges refer back to this object."""
        self.ticks.abandon()
        self.dense.clear()


class StepDriver:
    """Drives the steps of one rank's run of a plan: `begin`, `add` for each part, `finish`.

    It knows no thread. Whoever calls it catches what a step raises, passes that to `fail`, and then calls `close`.

    place: this rank's place among all of the run.
    beside: the ranks that carry other parts of the same gradients, and whose steps have to end alike; or None.
    everyone: all ranks of the run, if the plan runs between some of them alone; else the communicator.
    broken: why no further step can follow, None while all is well.
    ranks_compared: whether all ranks are known to stand at the same step.
    all_dense: whether no codec will run in the next step.
    rank_times: how long each rank takes to its gradients.
    telling: place of the part whose coming tells how slow a rank is: 0 where ranks wait for each other from then on.
    """

    telling = -1

    def __init__(
        self,
        run: PlanRun,
        communicator: Communicator,
        around: Surroundings,
        place: Place,
        everyone: Communicator | None = None,
        beside: Communicator | None = None,
    ) -> None:
        self.run = run
        self.communicator = communicator
        communicator.relay_below = measured(communicator)
        self.place = replace(place, relay_below=communicator.relay_below)
        self.everyone = everyone or communicator
        self.beside = beside
        self.statistics = Statistics(around.options.history)
        self.current: Iteration | None = None
        self.broken: str | None = None
        self.ranks_compared = False
        self.all_dense = False
        self.held = around.held
        self.closing: list[Callable[[], None]] = []  # what else ends with it
        self.around = around
        self._timeline = communicator.timeline
        self.rules = RuleWatch(run, around.options, self.everyone)
        assert self.everyone.group is not None
        ranks = self.everyone.rank, self.everyone.names
        self._reasons = Reasons(self.everyone.group.group_name, *ranks)
        self.rank_times = RankTimes(self._reasons.store, self._reasons.prefix, *ranks)
        self._ended: Moment | None = None  # the last step

    @property
    def may_start(self) -> bool:
        """Whether `start` may be called for the next step's parts, before it begins: no codec will run in it."""
        return self.ranks_compared and self.all_dense and not self.communicator.deterministic

    def start(self, part: Part) -> Any:
        """Issue a part's first collective, the mean of its buffer, in whatever thread; return it."""
        assert part.buffer is not None
        return self.communicator.mean_in_place(part.buffer)

    def begin(self) -> None:
        """Begin a step. A collective, where ranks have to agree on where they stand, or a refresh is due."""
        if self.current is not None:
            raise GradlabError("a new step began before the last one's gradients had all arrived")
        self._compare_ranks()
        if why := drive(self.run.refresh(), self.communicator):
            message = f"gradlab: step {self.run.iteration}: the plan stays, as none could be chosen: {why}"
            warnings.warn(message, stacklevel=2)
        if self.held.look():
            self.rules.see_groups(self.held)
        rates, scale = self.held.rates(), self.around.loss_scale()
        self.rules.see_rates(rates)
        step = self.run.begin(rates, scale, self.around.parameters)
        record = StepRecord(self.run.iteration, step.compressing, loss_scale=scale)
        self.current = Iteration(
            step, record, Ticks(self._issue, self.around.options.segment_bytes), self._is_measured(step.compressing)
        )

    def add(self, part: Part) -> None:
        """Take in the next part of the step: start the exchanges that it completes."""
        current = self._in_progress(part)
        current.parts.append(part)
        self._timeline.add("backward", f"bucket {part.index} ready", part.arrived, part.arrived)
        with self._timed(current):
            complete = current.step.add(part.gradients, part.buffer)
            rest = current.step.without_codec(part.gradients)
            if part.buffer is not None and len(rest) == len(part.gradients):
                self._average(current, part, part.buffer)
            else:
                begun = [self._dense(current, part, rest)] if rest else []
                begun += [self._group(current, part, name) for name in complete]
                for running, nbytes in begun:
                    current.ticks.start(running, nbytes)
                current.ticks.end_part()

    def _drain_part(self, current: Iteration, index: int, last: int) -> None:
        """Wait until the results of one part are there. last: number of the part that completed its last group."""
        with self._timed(current):
            current.ticks.drain(lambda running: running.part <= last)
            if index in current.dense:
                current.dense.pop(index).answers()

    def finish(self) -> StepRecord:
        """End the step after its last part: commit it, or fill all of it with NaN if a gradient was not finite."""
        current = self._in_progress(None)
        ahead = self._may_hand_over(current.step)
        self._start_agreement(current, ahead)
        self.drain()
        if ahead:
            self._hand_over(current)
            current.step.learn()
        self._agree_beside(current)
        if current.step.mixed:
            raise GradlabError(
                "ranks used other modules in this step, or in another order, so that gradients of one were averaged "
                "with those of another; all ranks have to run the same modules in a step (no LayerDrop, no branches "
                "that depend on a rank's batch)"
            )
        return self._commit(current)

    @property
    def in_progress(self) -> bool:
        """Whether a step has begun whose results training does not have yet."""
        current = self.current  # which the worker may drop meanwhile
        return current is not None and current.results is None

    def _may_hand_over(self, step: Step) -> bool:
        """Return whether results may be handed over before the host knows whether they count: a worker whose device
        decides it too."""
        alone = self.beside is None and step.order is None and not self.run.settings.hold_unused
        return step.active != frozenset() and alone and not self.around.device.shares_stream

    def _hand_over(self, current: Iteration) -> None:
        """Make the results NaN on the device unless everything was finite, and settle the parts: training goes on."""
        memory = [tensor for part in current.parts for tensor in part.memory]
        current.results = largest_magnitudes(memory)
        factor = torch.where(current.step.sound(current.results), 1.0, torch.nan)
        for tensor in memory:
            tensor.mul_(factor.to(tensor.dtype))
        for part in current.parts:
            part.settle()

    def _issue(self, requests: Sequence[Request]) -> InFlight:
        """Start the collectives of a tick, which is called when the last one's results are written."""
        return self.communicator.issue(requests)

    def _agree_beside(self, current: Iteration) -> frozenset[str]:
        """Learn what the ranks beside this one have agreed on: the layers that no rank had a gradient of."""
        step, run = current.step, self.run
        if self.beside is None:
            return step.held
        results = [tensor for part in current.parts for tensor in part.memory]
        names = [name for group in run.plan.compressed_groups for name in group.layers if run.settings.hold_unused]
        finite = step.finite and all(is_finite(result) for result in results)
        flags = [bool(step.active), not finite, step.noticed, *(name in step.held for name in names)]
        message = torch.tensor(flags, dtype=torch.uint8, device=self.beside.device)
        rows = torch.stack(self.beside.gather_bytes(message)).amax(0).tolist()
        if rows[0]:
            step.finite, step.noticed = not rows[1], bool(rows[2])
        return frozenset(name for name, held in zip(names, rows[3:], strict=True) if held)

    def _start_agreement(self, current: Iteration, ahead: bool = False) -> None:
        """Let the ranks learn, beside the last part's exchange, whether all gradients were finite. ahead: it is read
        later."""
        current.step.require_whole()
        if current.step.active:
            last = current.parts[-1].index if current.parts else 0
            begin = current.step.ask if ahead else current.step.agree
            agreement = begin(self.communicator.device, notice=bool(self.rules.pending))
            with self._timed(current):
                current.ticks.start(Running("finite flag", agreement, last, watch=self._watch), 0)
                current.ticks.tick()

    def drain(self) -> None:
        """Wait until the results of all complete groups are written, and the means of all whole buffers; settle parts
        that nothing can change."""
        current = self._in_progress(None)
        with self._timed(current):
            current.ticks.drain()
            while current.dense:
                index, mean = next(iter(current.dense.items()))
                mean.answers()
                del current.dense[index]
                if not current.step.active and index + 1 < len(current.parts):
                    # Nothing to agree on: DDP may take bucket after bucket while the last ones travel.
                    current.parts[index].settle()

    def _commit(self, current: Iteration) -> StepRecord:
        step, record = current.step, current.record
        memory = [tensor for part in current.parts for tensor in part.memory]
        self.run.end(step, memory if current.results is None else [current.results])
        if not step.finite and current.results is None:
            for tensor in memory:  # all of it: DDP may throw away the results of one bucket
                tensor.fill_(torch.nan)
        for layer in step.held & step.gradients.keys() if step.finite else ():
            step.gradients[layer].zero_()
        record.finite, record.non_finite_layers = step.finite, step.non_finite
        record.payload_bytes, record.wire_bytes = self.communicator.take_counts()
        moments = [(part.arrived, part.ready) for part in current.parts] or [(time.perf_counter(), None)]
        first, last = moments[0][0], moments[-1][0]
        record.wait_seconds = time.perf_counter() - last
        before, self._ended = self._ended, moment(self.around.device.device)
        self._timeline.add("backward", "backward", first, last)
        self.statistics.steps.append(record)
        self.rules.see_step(record, current.measured_groups)
        self.rules.settle(record, step.noticed)
        self.all_dense = not self.run.active
        self.current = None
        self.around.workspace.recycle()
        for part in current.parts:
            part.settle()
        came, ready = moments[self.telling]
        self.rank_times.tell(before, ready or came)
        return record

    def fail(self, error: BaseException) -> str:
        """Note why a step failed, also for the other ranks; return the reason, which becomes `broken`.

        If this rank has left before, in another thread, that reason stands: the error may be no more than what comes of
        it.
        """
        if self.broken is None:
            self.broken = self._reasons.of(error, self.run.iteration)
        return self.broken

    def leave(self, reason: str) -> None:
        """Tell the other ranks why this one ends, unless it has failed or ended before."""
        if self.broken is None and self.communicator.group is not None:
            self.broken = f"step {self.run.iteration}: {reason}"
            self._reasons.leave(self.broken)

    def end(self) -> None:
        """Tell the other ranks that this one's run ends here, unless it has failed or ended before."""
        if self.broken is None and self.communicator.group is not None:
            self._reasons.leave(f"step {self.run.iteration}: its run was closed")

    def close(self) -> None:
        """Let go of the step in progress, if there is one, and of the process group. Idempotent."""
        self.abandon()
        while self.closing:
            self.closing.pop()()
        for one in (self.communicator, self.everyone, self.beside):
            if one is not None:
                one.close()

    def require_between_steps(self) -> None:
        """Refuse to load a checkpoint into a step in progress."""
        if self.current is not None:
            raise GradlabError(f"step {self.run.iteration} is in progress; load a checkpoint between steps")

    def abandon(self) -> list[Part]:
        """Let go of the step in progress, after an error; return its parts."""
        current, self.current = self.current, None
        if current is None:
            return []
        current.abandon()
        return current.parts

    def _in_progress(self, part: Part | None) -> Iteration:
        if self.current is None:
            what = "the end of a step came" if part is None else f"bucket {part.index} arrived"
            raise GradlabError(f"{what} before the step had begun")
        return self.current

    @contextmanager
    def _timed(self, current: Iteration) -> Iterator[None]:
        began, waited = time.perf_counter(), self.communicator.wait_seconds
        yield
        waited = self.communicator.wait_seconds - waited
        current.record.communicate_seconds += waited
        current.record.compress_seconds += time.perf_counter() - began - waited

    def _compare_ranks(self) -> None:
        """Compare the steps at which ranks stand, once after a start or a resume, as different ones cannot exchange."""
        if not self.ranks_compared:
            keys = sorted(f"{name}::{key}" for name, state in self.run.states.items() for key in state)
            digest = hashlib.sha256(repr(keys).encode()).hexdigest()
            same = {"the iteration": self.run.iteration, "which states there are (sha256)": digest}
            try:
                self.communicator.ranks.require_same(same)
                if self.everyone is not self.communicator:
                    self.everyone.ranks.require_same({"the iteration": self.run.iteration})
            except RuntimeError as error:
                raise CommunicationError(f"ranks could not be compared: {error}") from error
            self.ranks_compared = True

    def _is_measured(self, compressing: bool) -> bool:
        every = self.around.options.measure_every
        return compressing and every > 0 and (self.run.iteration - self.run.plan.schedule.warmup_steps) % every == 0

    def _average(self, current: Iteration, part: Part, buffer: torch.Tensor) -> None:
        """Average a whole buffer, in place."""
        current.dense[part.index] = part.started or self.communicator.mean_in_place(buffer)
        part.started = None
        if current.measured:
            current.record.bucket_payload_bytes[part.index] = buffer.nbytes

    def _dense(self, current: Iteration, part: Part, gradients: Tensors) -> tuple[Running, int]:
        """The layers of a part that no codec works on."""
        running = Running(
            f"dense layers of bucket {part.index}",
            current.step.average(gradients),
            part.index,
            finish=partial(_write, gradients),
            watch=self._watch,
        )
        return running, sum(grad.nbytes for grad in gradients.values())

    def _group(self, current: Iteration, part: Part, name: str) -> tuple[Running, int]:
        """A group whose last layer came with this part."""
        gradients, codec = current.step.batch(name), self.run.codecs[name]

        def finish(done: Exchanged) -> None:
            if current.measured:  # before the gradients, which `done` may still refer to, are overwritten
                current.record.errors |= contribution_error(done)
                self._measure(current, name, gradients, done)
            _write(gradients, done)

        # What is measured is measured on the gradients, after the exchange.
        exchange = current.step.exchange(name, reuse=not current.measured)
        running = Running(name, exchange, part.index, codec=described(codec), finish=finish, watch=self._watch)
        return running, sum(grad.nbytes for grad in gradients.values())

    def _measure(self, current: Iteration, name: str, gradients: Tensors, done: Exchanged) -> None:
        """Note norms by layer, and what the rules ask of the group."""
        codec, record = self.run.codecs[name], current.record
        residuals = residual_norms(done)
        norms = gradient_norms(codec, gradients, done, self.around.parameters, record.loss_scale)
        record.residual_norms |= residuals
        record.gradient_norms |= norms
        current.measured_groups[name] = measure(codec, done, residuals, norms)
        if (squares := noise_squares(codec, gradients, done, record.loss_scale)) is not None:
            record.squares = [a + b for a, b in zip(record.squares or (0.0, 0.0, 0.0), squares, strict=True)]

    def _watch(self, one: Running, began: float, stop: float, first: bool) -> None:
        """Note a stretch of an exchange's code, and the bytes of the requests that it ended with."""
        current = self._in_progress(None)
        record, spent = current.record, stop - began
        record.encode_seconds += spent if first else 0.0
        record.decode_seconds += 0.0 if first else spent
        self._timeline.add("encode and decode", f"{'encode' if first else 'decode'} {one.name}", began, stop)
        if current.measured:
            encode, decode = record.group_seconds.get(one.name, (0.0, 0.0))
            record.group_seconds[one.name] = (encode + spent, decode) if first else (encode, decode + spent)
            nbytes = sum(payload_bytes(request, self.communicator.rank) for request in one.requests)
            record.group_payload_bytes[one.name] = record.group_payload_bytes.get(one.name, 0) + nbytes
            record.bucket_payload_bytes[one.part] = record.bucket_payload_bytes.get(one.part, 0) + nbytes


def _write(gradients: Tensors, done: Exchanged) -> None:
    """Put a group's mean where its gradients were."""
    pairs = [(gradient, done.mean[layer]) for layer, gradient in gradients.items()]
    pairs = [(gradient, mean) for gradient, mean in pairs if mean.data_ptr() != gradient.data_ptr()]
    if pairs:
        torch._foreach_copy_([gradient for gradient, _ in pairs], [mean for _, mean in pairs])
