"""The state that the DDP communication hook is registered with."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.artifact import Artifact
from gradlab.ddp import bucket_gradients, synchronised_layers
from gradlab.errors import GradlabError
from gradlab.optimizers import is_plain_sgd, learning_rates
from gradlab.plan import Plan
from gradlab.runtime import checkpoint
from gradlab.runtime import report as reporting
from gradlab.runtime.checks import agree_on, check, check_types, device_of_model, require_ddp
from gradlab.runtime.communicator import Communicator
from gradlab.runtime.device import device_of
from gradlab.runtime.engine import Engine
from gradlab.runtime.faults import Reasons
from gradlab.runtime.groups import group_like
from gradlab.runtime.options import EngineOptions, Surroundings
from gradlab.runtime.statistics import Statistics
from gradlab.runtime.timeline import Timeline
from gradlab.segments import SEGMENT_BYTES
from gradlab.workspace import RecyclingWorkspace


class CompressionState:
    """A plan at work on one DDP model: codecs' states, the engine that runs them, and what it measured.

    All ranks construct it together (it makes a process group of its own and compares plans). Register it with

        ddp_model.register_comm_hook(state, compression_hook)

    and close it, or use it as a context manager, when training ends.

    Args:
        plan: made for this model's trainable parameters.
        ddp_model: the DistributedDataParallel model.
        optimizer: its parameter groups give the learning rates that residuals follow, anew in every iteration, so that
            schedules and groups added later are heeded; needed where the plan follows them or applies momentum or
            weight decay, which the optimizer must then not do.
        scaler: the torch.amp.GradScaler, if one is in use: residuals are then kept without its factor.
        deterministic: take means by all-to-all, a sum in rank order and all-gather, bit-identical to the offline
            replay, instead of by the backend's all-reduce.
        segment_bytes: gradients encoded before the next collective is issued, in bytes.
        measure_every: steps from one whose errors, norms and bytes by layer are measured (two passes over the
            gradients) to the next; 0 for none.
        trace_steps: iterations whose spans are kept for `chrome_trace`.
        non_finite_limit: non-finite steps in a row after which every rank raises an error.
        check_requests: compare all ranks' requests before each collective (debugging).
        history: steps kept in `statistics`.
        process_group: of the DDP group's ranks, for the codecs' collectives alone: DDP's own must not mix with them in
            another order. None makes one. If DDP runs on a part of the world only, torch names that group after the
            number of groups a process has made; where ranks have made different numbers, pass one instead.
        timeout: of the collectives of a group made here; None takes that of the model's group.

    Raises:
        GradlabError: if the model is not in DDP or is not the plan's (with a layer-by-layer difference), the plan and
            the optimizer both apply momentum or weight decay, or ranks have different plans.
    """

    def __init__(
        self,
        plan: Plan,
        ddp_model: DistributedDataParallel,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        deterministic: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        measure_every: int = 10,
        trace_steps: Collection[int] = (),
        non_finite_limit: int = 50,
        check_requests: bool = False,
        history: int = 1000,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        require_ddp(ddp_model)
        settled: list[EngineOptions] = []

        def settle() -> None:
            check_types(plan, optimizer, scaler, history, trace_steps, process_group, timeout, ddp_model)
            settled.append(
                EngineOptions(
                    segment_bytes,
                    measure_every,
                    hold_unused=ddp_model.find_unused_parameters or ddp_model.static_graph,
                    non_finite_limit=non_finite_limit,
                    plain_sgd=is_plain_sgd(optimizer),
                    scaled=scaler is not None and scaler.is_enabled(),
                    trace_steps=tuple(trace_steps),
                )
            )
            check(plan, ddp_model, optimizer, settled[0])

        same = {"deterministic": bool(deterministic), "check_requests": bool(check_requests)}
        agree_on(ddp_model, settle, lambda: {"the plan (sha256)": plan.digest, **same, **asdict(settled[0])})
        if ddp_model.process_group.size() == 1:
            warnings.warn("gradlab: world size 1, there is no communication to compress", stacklevel=2)
        self._residuals = reporting.residual_statement(plan, optimizer)
        if plan.follows_learning_rate and not is_plain_sgd(optimizer):
            warnings.warn(f"gradlab: {self._residuals}", stacklevel=2)
        options, pairs = settled[0], synchronised_layers(ddp_model)
        self.plan = plan
        self.statistics = Statistics(history)
        self._names: dict[torch.Tensor, str] = {parameter: layer.name for layer, parameter in pairs}
        self._dense_bytes = sum(parameter.numel() * parameter.element_size() for _, parameter in pairs)
        self._device = device_of(device_of_model(pairs))
        self._timeline = Timeline(options.trace_steps)
        workspace = RecyclingWorkspace()
        group = process_group or group_like(ddp_model.process_group, timeout, self._device.device)
        self._communicator = Communicator(
            group,
            deterministic,
            check_requests,
            owned=process_group is None,
            timeline=self._timeline,
            workspace=workspace,
            device=self._device.device,
        )
        names = self._names
        self.engine = Engine(
            plan,
            self._communicator,
            Surroundings(
                lambda: learning_rates(optimizer, names),
                lambda: scaler.get_scale() if scaler else 1.0,
                {name: parameter.detach() for parameter, name in names.items()},
            ),
            self.statistics,
            self._device,
            self._timeline,
            Reasons(group.group_name, self._communicator.rank, self._communicator.world_size),
            workspace,
            options,
        )
        del group  # of one made here the communicator alone holds on: destroying it is how peers learn of a failure
        # Also when the state is dropped, and at exit: a script that forgets close() still ends, without a stray thread.
        self._finalizer = weakref.finalize(self, self.engine.close)

    @classmethod
    def load(cls, path: str | os.PathLike[str], ddp_model: DistributedDataParallel, **options: Any) -> CompressionState:
        """The state for a saved artifact; options as for the constructor.

        Raises:
            GradlabError: for an artifact that is missing, damaged, of a newer version, or for another model.
        """
        require_ddp(ddp_model)
        loaded: list[Artifact] = []
        # A file may be missing on one machine only: all ranks then say so, and none waits for it.
        agree_on(ddp_model, lambda: loaded.append(Artifact.load(path)), dict)
        return cls(loaded[0].plan, ddp_model, **options)

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand one of DDP's buckets to the engine; the hook calls this.

        Raises:
            GradlabError: for a parameter that is not in the plan's model, or a sparse gradient.
        """
        # Buckets are rebuilt after the first iteration: which layers one holds is asked anew each time.
        try:
            gradients = {self._names[parameter]: gradient for parameter, gradient in bucket_gradients(bucket)}
        except KeyError:
            raise GradlabError("a bucket holds a parameter that this state's model does not have") from None
        return self.engine.submit(bucket.index(), bucket.is_last(), bucket.buffer(), gradients)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain values and tensors, for `torch.save` and `torch.load` with weights_only.

        States are keyed "<group>::<layer>/<what>". Every rank must save its own: residuals differ between ranks.
        """
        return checkpoint.save(self.engine, self._identity())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same plan, rank and world size; every rank loads its own.

        Raises:
            GradlabError: naming what differs. If ranks continue from different iterations, the next step says so.
        """
        checkpoint.restore(self.engine, state, self._identity(), self._device)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], residuals: str) -> None:
        """Continue the run of N ranks on this run's M: every rank loads the `state_dict` of all N, in rank order.

        residuals: what becomes of the residuals and velocities e_i, of which each rank has its own. "split": every
        new rank gets their mean. "sum": old rank i's go to new rank i mod M; each sums what it gets, times M / N; a
        rank that gets none starts from zero. Both keep (1/M) sum e'_j == (1/N) sum e_i, what is owed to the model.
        "drop": all start from nothing. What ranks share (warm starts, momentum after the average) is taken over, and
        the residual of a sharded server is cut anew; "drop" drops that one too.

        Raises:
            GradlabError: for another policy, another plan, or checkpoints that are not those of one run, whole.
        """
        checkpoint.redistribute(self.engine, states, self._identity(), residuals, self._device)

    def _identity(self) -> dict[str, Any]:
        communicator = self._communicator
        return {"plan": self.plan.digest, "rank": communicator.rank, "world_size": communicator.world_size}

    def report(self) -> dict[str, Any]:
        """Plain JSON: bytes and times per step on this rank, by group and by codec, what was expected, and what holds
        for the residuals under this optimizer.

        Sizes in bytes, times in seconds per step; see `StepRecord` for what each covers.
        """
        dense = self._dense_bytes
        summary = self.statistics.summary()
        payload = summary.get("payload_bytes_per_step")
        groups = reporting.layer_rows(self.engine.plan, list(self.statistics.steps))
        return {
            "rank": self._communicator.rank,
            "world_size": self._communicator.world_size,
            "iteration": self.engine.iteration,
            "dense_payload_bytes": dense,
            "forecast_payload_bytes": self.engine.plan.payload_bytes(self._communicator.world_size),
            "compression_ratio": dense / payload if payload else None,
            "residuals": self._residuals,
            "refresh": self._refresh_report(),
            **summary,
            "groups": groups,
            "codecs": reporting.codec_rows(groups),
        }

    def _refresh_report(self) -> dict[str, Any] | None:
        """The settings last chosen, by group, and why the choice after that failed; None if the plan has no refresh."""
        replanner = self.engine.replanner
        return None if replanner is None else {"choice": replanner.choice, "failure": replanner.failure}

    def table(self) -> str:
        """`report` as text, one line per group."""
        return reporting.table(self.report())

    def scalars(self) -> dict[str, float]:
        """The last step as flat names and numbers, for TensorBoard: `writer.add_scalar(name, value, step)` each."""
        return reporting.scalars(self.statistics)

    def chrome_trace(self) -> list[dict[str, Any]]:
        """Events of the iterations in `trace_steps`, for chrome://tracing or Perfetto once saved as JSON.

        The lists of several ranks may be joined: a rank is a process there, and clocks are the machine's.
        """
        return self._timeline.events(self._communicator.rank)

    def close(self) -> None:
        """Stop the worker thread and give back the process group made here. Idempotent; also done at exit."""
        self._finalizer()

    def __enter__(self) -> CompressionState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object) -> None:
        if kind is not None:
            self.engine.leave_reason(f"{kind.__name__}: {error}")
        self.close()
