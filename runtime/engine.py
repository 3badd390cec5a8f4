"""Run a plan's codecs under DDP: one ordered worker thread that overlaps with backward.

DDP hands over buckets in one order on every rank. The worker turns each into segments of groups; every segment is a
tick: (1) the new groups are encoded up to their first request, while the last tick's collectives travel; (2) those
are awaited, and the groups that asked for them advance to their next request or finish; (3) all open requests are
issued together, one collective per kind. After the last bucket, ticks go on without new groups until none is open.
So the order of collectives follows from buckets and phases alone, never from timing, and one order serves every
backend. A bucket without layers that a codec works on is averaged in its own buffer, exactly as plain DDP does it; in
an iteration without codecs the hook starts that itself, so that it need not wait for a thread to wake.

States are committed once, after the last bucket, if the gradients of all ranks were finite; the flag that tells
travels with the last segment. If they were not, all buckets become NaN on every rank, so that a loss scaler skips the
step everywhere.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from gradlab.codec import Codec, Context, Exchanged, Tensors, exchange_group
from gradlab.codecs.identity import Identity
from gradlab.collectives import Broadcast, payload_bytes
from gradlab.errors import GradlabError
from gradlab.measures import contribution_error, is_finite, squared_norm
from gradlab.plan import Plan
from gradlab.ranks import Ranks
from gradlab.replanning import Replanner, adopted_state
from gradlab.runtime.communicator import Communicator
from gradlab.runtime.device import HostDevice
from gradlab.runtime.exchange import Bucket, Exchange, Iteration
from gradlab.runtime.faults import CommunicationError, Reasons
from gradlab.runtime.finiteness import NonFiniteSteps, agree
from gradlab.runtime.options import EngineOptions, Surroundings
from gradlab.runtime.statistics import Statistics, StepRecord
from gradlab.runtime.timeline import Timeline
from gradlab.segments import segments
from gradlab.workspace import RecyclingWorkspace
from gradlab.wrapper import innermost, wrappers_of


class Engine:
    """The worker and the states it keeps; `submit` is called by the hook, everything else runs in the worker.

    states: by group name, the codec's state after the last committed iteration. iteration: synchronised steps so far.
    learning_rates: by layer name, the last of a committed iteration that was not zero: the unit of residuals.
    """

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        surroundings: Surroundings,
        statistics: Statistics,
        device: HostDevice,
        timeline: Timeline,
        reasons: Reasons,
        workspace: RecyclingWorkspace,
        options: EngineOptions,
    ) -> None:
        self.plan = plan  # as it is now: a refresh may have changed its settings
        self.replanner: Replanner | None = None
        if plan.refresh is not None:
            self.replanner = Replanner(plan, communicator.rank, communicator.world_size, beside=True)
        self.states: dict[str, Tensors] = {}
        self.iteration = 0
        self.learning_rates: dict[str, float] = {}
        self.ranks_compared = False
        self.broken: str | None = None
        self.closed = False
        self.codecs: dict[str, Codec] = {g.name: plan.build(g).to(device.device) for g in plan.compressed_groups}
        self._communicator = communicator
        self._surroundings = surroundings
        self._statistics = statistics
        self._device = device
        self._timeline = timeline
        self._reasons = reasons
        self._options = options
        self._workspace = workspace
        self._groups = {group.name: group for group in plan.compressed_groups}
        self._group_of = {name: group.name for group in plan.compressed_groups for name in group.layers}
        self._context = Context(0, 1, 0)
        self._non_finite = NonFiniteSteps(options.non_finite_limit, options.scaled)
        self._current: Iteration | None = None
        self._all_dense = False  # no codec will run in the next iteration; and in the one that hands over its buckets:
        self._starting_here = False
        self._queue: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # --- called from the training thread ---

    def submit(
        self, index: int, is_last: bool, buffer: torch.Tensor, gradients: Tensors
    ) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket; the future resolves to its buffer, averaged."""
        if self.broken is not None:
            raise RuntimeError(f"gradlab: the engine stopped earlier: {self.broken}")
        if self.closed:
            raise RuntimeError("gradlab: this CompressionState is closed; DDP keeps its hook, so make a new DDP model")
        bucket = Bucket(index, is_last, buffer, gradients, self._device.future(), self._device.ready())
        if self._starts_here(index):
            bucket.start(self._communicator.mean_in_place)
        if self._thread is None:
            # A daemon, so that an interpreter that exits without close() is not held up.
            self._thread = threading.Thread(target=self._work, name="gradlab-engine", daemon=True)
            self._thread.start()
        self._queue.put(bucket)
        # Chained, because DDP would take an exception set from Python for the bucket's tensor.
        return bucket.future.then(lambda future: future.value())

    def _starts_here(self, index: int) -> bool:
        """Whether the hook starts a bucket's all-reduce. The worker is idle when an iteration's first bucket comes."""
        if index == 0:
            self._timeline.begin(self.iteration)
            plain = self._device.shares_stream and not self._communicator.deterministic
            self._starting_here = plain and self._all_dense and self.ranks_compared
        return self._starting_here

    def leave_reason(self, reason: str) -> None:
        """Tell the other ranks why this one ends, if its engine has not."""
        if self.broken is None and not self.closed:
            self._reasons.leave(f"step {self.iteration}: {reason}")

    def close(self) -> None:
        """Stop the worker, if it runs, wait for its end, and let go of the process group; later buckets are refused."""
        self.closed = True
        if self._thread is not None:
            self._queue.put(None)
            if self._thread is not threading.current_thread():  # which a finalizer may run in
                self._thread.join()
                self._thread = None
        self._communicator.close()

    # --- the worker ---

    @torch.no_grad()
    def _work(self) -> None:
        while (bucket := self._queue.get()) is not None:
            if self.broken is not None:
                bucket.reject(self.broken)
                continue
            try:
                with self._device.working():
                    self._accept(bucket)
                continue
            except BaseException as error:  # whatever failed belongs to the training loop, by way of the futures
                self.broken = self._reason(error)
            # Out here the traceback is gone. It holds collectives, and these the group that peers must see closed.
            self._fail(bucket, self.broken)

    def _reason(self, error: BaseException) -> str:
        """What the training loop is told. Other ranks find it too, if it began here."""
        text = str(error) if isinstance(error, GradlabError) else f"{type(error).__name__}: {error}"
        reason = f"step {self.iteration}: {text}"
        if isinstance(error, CommunicationError):
            theirs = self._reasons.find()
            return f"step {self.iteration}: another rank failed ({theirs})" if theirs else reason
        self._reasons.leave(reason)
        return reason

    def _fail(self, bucket: Bucket, reason: str) -> None:
        """Give the reason to the training loop, and let go of the group."""
        current, self._current = self._current, None
        if current is not None:
            current.abandon()
        for waiter in [*(current.buckets if current else []), bucket]:
            waiter.reject(reason)
        del current
        self._communicator.close()

    def _accept(self, bucket: Bucket) -> None:
        began, waited = time.perf_counter(), self._communicator.wait_seconds
        self._device.receive(bucket.ready, bucket.buffer)  # first: the loss scale may be on the device too
        if bucket.index == 0:
            self._begin()
        current = self._current
        if current is None:
            raise GradlabError(f"bucket {bucket.index} arrived outside an iteration")
        current.buckets.append(bucket)
        if bucket.failure is not None:
            raise bucket.failure
        self._start_bucket(current, bucket)
        if bucket.is_last:
            self._drain(current)
        waited = self._communicator.wait_seconds - waited
        current.record.communicate_seconds += waited
        current.record.compress_seconds += time.perf_counter() - began - waited
        if bucket.is_last:
            self._finish(current)

    def _begin(self) -> None:
        if self._current is not None:
            raise GradlabError("a new backward began before the last one's buckets had all arrived")
        self._compare_ranks()
        self._refresh()
        rates = self._surroundings.learning_rates()
        compressing = self._compresses()
        scale = self._surroundings.loss_scale()
        self._context = Context(
            rank=self._communicator.rank,
            world_size=self._communicator.world_size,
            iteration=self.iteration,
            seed=self.plan.seed,
            learning_rate=rates,
            previous_learning_rate={**rates, **self.learning_rates},
            loss_scale=scale,
            start=self.plan.schedule.warmup_steps,
            plain_sgd=self._options.plain_sgd,
            parameters=self._surroundings.parameters,
            workspace=self._workspace,
        )
        record = StepRecord(self.iteration, compressing, loss_scale=scale)
        self._current = Iteration(record, self._active_groups(), self._is_measured(compressing))

    def _compare_ranks(self) -> None:
        """Once after a start or a resume: ranks that stand at different steps would send each other nonsense."""
        if not self.ranks_compared:
            assert self._communicator.group is not None
            ranks = Ranks(self._communicator.group, self._device.device)
            keys = sorted(f"{group}::{key}" for group, state in self.states.items() for key in state)
            digest = hashlib.sha256(repr(keys).encode()).hexdigest()
            ranks.require_same({"the iteration": self.iteration, "which states there are (sha256)": digest})
            self.ranks_compared = True

    def _refresh(self) -> None:
        """Take a new choice of settings over, if it is time: the root tells it, when it has made it."""
        request = self.replanner.due(self.iteration) if self.replanner is not None else None
        if self.replanner is not None and request is not None:
            [answer] = self._communicator.issue(
                [Broadcast(request.tensor.to(self._device.device), request.root)]
            ).answers()
            if self.replanner.failure:
                said = (
                    f"gradlab: step {self.iteration}: the plan stays, as none could be chosen: {self.replanner.failure}"
                )
                warnings.warn(said, stacklevel=2)
            self.adopt(self.replanner.adopt(answer))

    def adopt(self, plan: Plan) -> None:
        """Go on with other settings of the same groups; codecs' states are carried over."""
        for group in plan.compressed_groups:
            if group != self._groups[group.name]:
                old, new = self.codecs[group.name], plan.build(group).to(self._device.device)
                self.codecs[group.name] = new
                if group.name in self.states:
                    self.states[group.name] = adopted_state(new, old, self.states[group.name])
        self.plan = plan
        self._groups = {group.name: group for group in plan.compressed_groups}

    def _compresses(self) -> bool:
        return bool(self._groups) and self.plan.schedule.compresses(self.iteration)

    def _active_groups(self) -> frozenset[str]:
        """The groups whose codecs run in this iteration."""
        if self._compresses():
            return frozenset(self._groups)
        return frozenset(n for n in self._groups if self.codecs[n].acts_when_dense(self.states.get(n, {})))

    def _is_measured(self, compressing: bool) -> bool:
        every = self._options.measure_every
        return compressing and every > 0 and (self.iteration - self.plan.schedule.warmup_steps) % every == 0

    def _start_bucket(self, current: Iteration, bucket: Bucket) -> None:
        self._timeline.add("backward", f"bucket {bucket.index} ready", bucket.arrived, bucket.arrived)
        if not current.active:
            current.dense.append(bucket.started or self._communicator.mean_in_place(bucket.buffer))
            bucket.started = None
            return
        self._look_at(current, bucket)
        if self.replanner is not None:
            self.replanner.add(bucket.gradients, self.iteration, self._context.loss_scale)
        if not any(self._group_of.get(name) in current.active for name in bucket.gradients):
            current.dense.append(self._communicator.mean_in_place(bucket.buffer))
            if current.measured:
                current.record.bucket_payload_bytes[bucket.index] = bucket.buffer.nbytes
        else:
            exchanges = list(self._exchanges(current, bucket))
            for segment in segments(exchanges, lambda pair: pair[1], self._options.segment_bytes):
                self._tick(current, [exchange for exchange, _ in segment])
        if bucket.is_last:
            flag = agree(current, self._communicator.world_size, bucket.buffer.device)
            self._tick(current, [Exchange("finite flag", flag, lambda _: None, bucket=bucket.index)])

    def _look_at(self, current: Iteration, bucket: Bucket) -> None:
        """What the ranks will have to agree on: are gradients finite, and which layers have none at all?"""
        if not is_finite(bucket.buffer):
            current.finite = False
            bad = [name for name, grad in bucket.gradients.items() if not is_finite(grad)]
            current.record.non_finite_layers += tuple(bad)
        if self._options.hold_unused:
            layers = [name for name in bucket.gradients if self._group_of.get(name) in current.active]
            current.zero |= {name: not bool(bucket.gradients[name].any()) for name in layers}

    def _exchanges(self, current: Iteration, bucket: Bucket) -> Iterator[tuple[Exchange, int]]:
        """Exchanges that this bucket makes possible, each with its gradients' bytes; dense layers first."""
        dense = {
            name: grad for name, grad in bucket.gradients.items() if self._group_of.get(name) not in current.active
        }
        current.arrived |= dict.fromkeys(bucket.gradients, bucket)
        if dense:
            yield self._exchange(current, f"dense layers of bucket {bucket.index}", Identity(), dense, bucket.index)
        touched = dict.fromkeys(self._group_of[name] for name in bucket.gradients if name not in dense)
        for name in touched:
            group = self._groups[name]
            if name not in current.started and all(layer in current.arrived for layer in group.layers):
                current.started.add(name)
                grads = {layer: current.arrived[layer].gradients[layer] for layer in group.layers}
                yield self._exchange(current, name, self.codecs[name], grads, bucket.index)

    def _exchange(
        self, current: Iteration, name: str, codec: Codec, grads: Tensors, bucket: int
    ) -> tuple[Exchange, int]:
        coroutine = exchange_group(
            codec,
            grads,
            self.states.get(name, {}),
            replace(self._context, group=name),
            scaled_by=self._context.loss_scale,
            dense=not current.record.compressing,
        )

        def finish(done: Exchanged) -> None:
            self._apply(current, name, grads, done)

        described = "+".join([innermost(codec).name, *(w.name for w in wrappers_of(codec))])
        method = described if name in self._groups else ""
        return Exchange(name, coroutine, finish, method, bucket), sum(grad.nbytes for grad in grads.values())

    def _apply(self, current: Iteration, name: str, grads: Tensors, done: Exchanged) -> None:
        """Write a finished group's mean into its buckets and stage its state."""
        if name in self._groups:
            current.staged[name] = done.state
            if current.measured:  # before the gradients, which `done` may still refer to, are overwritten
                current.record.errors |= contribution_error(done)
                norms = {layer: squared_norm(unsent) ** 0.5 for layer, unsent in done.unsent.items()}
                current.record.residual_norms |= norms
        for layer, grad in grads.items():
            grad.copy_(done.mean[layer])

    def _tick(self, current: Iteration, fresh: Sequence[Exchange]) -> None:
        began = time.perf_counter()
        for exchange in fresh:
            self._advance(current, exchange, None)
        current.record.encode_seconds += time.perf_counter() - began
        self._receive(current)
        current.running = [exchange for exchange in (*current.running, *fresh) if not exchange.done]
        requests = [request for exchange in current.running for request in exchange.requests]
        current.in_flight = self._communicator.issue(requests)

    def _receive(self, current: Iteration) -> None:
        """Await the round in flight and advance the exchanges that asked for it."""
        if current.in_flight is None:
            return
        answers = iter(current.in_flight.answers())
        current.in_flight = None
        began = time.perf_counter()
        for exchange in current.running:
            self._advance(current, exchange, [next(answers) for _ in exchange.requests])
        current.record.decode_seconds += time.perf_counter() - began

    def _advance(self, current: Iteration, exchange: Exchange, answers: list[object] | None) -> None:
        began = time.perf_counter()
        exchange.advance(answers)
        stop = time.perf_counter()
        verb = "encode" if answers is None else "decode"
        self._timeline.add("encode and decode", f"{verb} {exchange.name}", began, stop)
        if current.measured:
            name, record = exchange.name, current.record
            encode, decode = record.group_seconds.get(name, (0.0, 0.0))
            spent = stop - began
            record.group_seconds[name] = (encode + spent, decode) if answers is None else (encode, decode + spent)
            asked = sum(payload_bytes(request, self._communicator.rank) for request in exchange.requests)
            record.group_payload_bytes[name] = record.group_payload_bytes.get(name, 0) + asked
            record.bucket_payload_bytes[exchange.bucket] = record.bucket_payload_bytes.get(exchange.bucket, 0) + asked

    def _drain(self, current: Iteration) -> None:
        if missing := sorted(current.active - current.started):
            raise GradlabError(f"group {missing[0]}: DDP handed over only some of its layers in this step")
        while current.running:
            self._tick(current, [])
        for position, fused in enumerate(current.dense):
            fused.answers()
            if not current.active and position + 1 < len(current.buckets):
                # Nothing to agree on: DDP may take bucket after bucket while the last ones travel.
                current.buckets[position].future.set_result(current.buckets[position].buffer)

    def _finish(self, current: Iteration) -> None:
        """Commit the iteration, or poison it if a gradient was not finite, and resolve all futures."""
        record = current.record
        if current.active:
            record.finite = current.finite and all(is_finite(bucket.buffer) for bucket in current.buckets)
            if record.finite:
                self._commit(current)
            else:
                for bucket in current.buckets:  # all of them: DDP may throw away the results of one
                    bucket.buffer.fill_(torch.nan)
        record.payload_bytes, record.wire_bytes = self._communicator.take_counts()
        record.wait_seconds = time.perf_counter() - current.buckets[-1].arrived
        record.synchronise_seconds = time.perf_counter() - current.buckets[0].arrived
        self._timeline.add("backward", "backward", current.buckets[0].arrived, current.buckets[-1].arrived)
        self._statistics.add(record)
        self._non_finite.add(record)
        if self.replanner is not None:
            self.replanner.end(self.iteration)
        self.iteration += 1
        self._all_dense = not self._active_groups()
        self._current = None
        self._workspace.recycle(tensor for state in self.states.values() for tensor in state.values())
        for bucket in current.buckets:
            if not bucket.future.done():
                bucket.future.set_result(bucket.buffer)

    def _commit(self, current: Iteration) -> None:
        """Take over the new states; a layer that had no gradient anywhere keeps its old one, and gets none."""
        for layer, zero in current.zero.items():
            if zero:
                name = self._group_of[layer]
                current.arrived[layer].gradients[layer].zero_()
                of_group = innermost(self.codecs[name]).group_state

                def mine(key: str, layer: str = layer, of_group: frozenset[str] = of_group) -> bool:
                    owner, _, what = key.rpartition("/")
                    return owner == layer and what not in of_group

                others = {k: v for k, v in current.staged[name].items() if not mine(k)}
                kept = {k: v for k, v in self.states.get(name, {}).items() if mine(k)}
                current.staged[name] = {**others, **kept}
        self.states.update(current.staged)
        rates = self._context.learning_rate
        self.learning_rates |= {layer: rate for layer, rate in rates.items() if rate and not current.zero.get(layer)}
