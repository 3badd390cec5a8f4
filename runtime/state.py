"""The state that the DDP communication hook is registered with."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.artifact import Artifact
from gradlab.codec import Tensors
from gradlab.ddp import attached_hook, bucket_gradients, synchronised_layers
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.ranks import Ranks
from gradlab.runtime.communicator import Communicator
from gradlab.runtime.engine import Bucket, Engine
from gradlab.runtime.statistics import Statistics

_STATE_FORMAT = 1


class CompressionState:
    """A plan at work on one DDP model: codecs' states, the engine that runs them, and what it measured.

    All ranks construct it together (it makes a process group of its own and compares plans). Register it with

        ddp_model.register_comm_hook(state, compression_hook)

    and close it, or use it as a context manager, when training ends.

    Args:
        plan: made for this model's trainable parameters.
        ddp_model: the DistributedDataParallel model.
        optimizer: its parameter groups give the learning rates that some codecs follow.
        deterministic: take means by all-to-all, a sum in rank order and all-gather, bit-identical to the offline
            replay, instead of by the backend's all-reduce.
        segment_bytes: gradients encoded before the next collective is issued, in bytes.
        measure_errors: keep each layer's relative compression error per step (two passes over the gradients).
        check_requests: compare all ranks' requests before each collective (debugging).
        history: steps kept in `statistics`.
        process_group: of the DDP group's ranks, for the codecs' collectives alone: DDP's own must not mix with them in
            another order. None makes one. If DDP runs on a part of the world only, torch names that group after the
            number of groups a process has made; where ranks have made different numbers, pass one instead.
        timeout: of the collectives of a group made here; None takes that of the model's group.

    Raises:
        GradlabError: if the model is not in DDP or is not the plan's (with a layer-by-layer difference), or ranks
            have different plans.
    """

    def __init__(
        self,
        plan: Plan,
        ddp_model: DistributedDataParallel,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        deterministic: bool = False,
        segment_bytes: int = 8 * 2**20,
        measure_errors: bool = True,
        check_requests: bool = False,
        history: int = 1000,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        _require_ddp(ddp_model)
        pairs = synchronised_layers(ddp_model)
        options = {"deterministic": deterministic, "segment_bytes": segment_bytes, "check_requests": check_requests}
        _agree(ddp_model, lambda: _check(plan, ddp_model), {"the plan (sha256)": plan.digest, **options})
        self.plan = plan
        self.statistics = Statistics(history)
        self._names: dict[torch.Tensor, str] = {parameter: layer.name for layer, parameter in pairs}
        self._dense_bytes = sum(parameter.numel() * parameter.element_size() for _, parameter in pairs)
        self._made_group = None if process_group else _group_like(ddp_model.process_group, timeout)
        group = process_group or self._made_group
        assert group is not None
        self._communicator = Communicator(group, deterministic, check_requests)
        if self._communicator.world_size == 1:
            warnings.warn("gradlab: world size 1, there is no communication to compress", stacklevel=2)
        rates = _LearningRates(optimizer, self._names)
        self.engine = Engine(plan, self._communicator, rates, self.statistics, segment_bytes, measure_errors)
        # Also when the state is dropped, and at exit: a script that forgets close() still ends, without a stray thread.
        self._finalizer = weakref.finalize(self, _release, self.engine, self._made_group)

    @classmethod
    def load(cls, path: str | os.PathLike[str], ddp_model: DistributedDataParallel, **options: Any) -> CompressionState:
        """The state for a saved artifact; options as for the constructor.

        Raises:
            GradlabError: for an artifact that is missing, damaged, of a newer version, or for another model.
        """
        _require_ddp(ddp_model)
        loaded: list[Artifact] = []
        # A file may be missing on one machine only: all ranks then say so, and none waits for it.
        _agree(ddp_model, lambda: loaded.append(Artifact.load(path)), {})
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
        return self.engine.submit(Bucket(bucket.index(), bucket.is_last(), bucket.buffer(), gradients))

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: plain values and tensors, for `torch.save` and `torch.load` with weights_only.

        States are keyed "<group>::<layer>/<what>". Every rank must save its own: residuals differ between ranks.
        """
        states = {f"{group}::{key}": t.clone() for group, kept in self.engine.states.items() for key, t in kept.items()}
        return {**self._identity(), "iteration": self.engine.iteration, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same plan, rank and world size.

        Raises:
            GradlabError: naming what differs.
        """
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise GradlabError(f"checkpoint: {key} is {state.get(key)!r}, this run has {mine!r}")
        states, iteration = state.get("states"), state.get("iteration")
        if not isinstance(states, Mapping) or type(iteration) is not int:
            raise GradlabError("checkpoint: expected the states and the iteration that state_dict gives")
        restored: dict[str, Tensors] = {}
        for key, tensor in states.items():
            group, _, rest = key.partition("::")
            restored.setdefault(group, {})[rest] = tensor.clone()
        if unknown := sorted(set(restored) - {group.name for group in self.plan.groups}):
            raise GradlabError(f"checkpoint: states for groups the plan does not have: {', '.join(unknown)}")
        self.engine.states, self.engine.iteration = restored, iteration

    def _identity(self) -> dict[str, Any]:
        return {
            "format": _STATE_FORMAT,
            "plan": self.plan.digest,
            "rank": self._communicator.rank,
            "world_size": self._communicator.world_size,
        }

    def report(self) -> dict[str, Any]:
        """Plain JSON: bytes and times per step on this rank, error by layer, and what was expected.

        Sizes in bytes, times in seconds per step; see `StepRecord` for what each covers.
        """
        dense = self._dense_bytes
        summary = self.statistics.summary()
        payload = summary.get("payload_bytes_per_step")
        return {
            "rank": self._communicator.rank,
            "world_size": self._communicator.world_size,
            "iteration": self.engine.iteration,
            "dense_payload_bytes": dense,
            "forecast_payload_bytes": self.plan.payload_bytes(self._communicator.world_size),
            "compression_ratio": dense / payload if payload else None,
            **summary,
        }

    def close(self) -> None:
        """Stop the worker thread and give back the process group made here. Idempotent; also done at exit."""
        self._finalizer()

    def __enter__(self) -> CompressionState:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _require_ddp(model: object) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise GradlabError(f"expected a DistributedDataParallel model, not {type(model).__name__}")


def _check(plan: Plan, model: DistributedDataParallel) -> None:
    pairs = synchronised_layers(model)
    plan.check_model([layer for layer, _ in pairs])
    if strangers := {str(p.device) for _, p in pairs if p.device.type != "cpu"}:
        raise GradlabError(f"parameters on {', '.join(sorted(strangers))}: this version compresses on the CPU only")
    if hook := attached_hook(model):
        raise GradlabError(f"the DDP model has the communication hook {hook} already, and DDP takes one only")


def _agree(model: DistributedDataParallel, attempt: Callable[[], object], settings: dict[str, Any]) -> None:
    """Go on only if `attempt` succeeds on all ranks, with the same settings; else raise the same line everywhere."""
    problem = None
    try:
        attempt()
    except GradlabError as error:
        problem = str(error)
    ranks = Ranks(model.process_group, torch.device("cpu"))
    ranks.raise_together(problem)
    ranks.require_same(settings)


def _release(engine: Engine, group: dist.ProcessGroup | None) -> None:
    engine.close()
    if group is not None and dist.is_initialized():
        # ValueError: the group went before, with destroy_process_group().
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


class _LearningRates:
    """Learning rate by layer name, as the optimizer has it now."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, names: Mapping[torch.Tensor, str]) -> None:
        self._optimizer, self._names = optimizer, names

    def __call__(self) -> dict[str, float]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return {self._names[p]: float(group["lr"]) for group in groups for p in group["params"] if p in self._names}


def _group_like(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """A new process group of the same ranks."""
    ranks = dist.get_process_group_ranks(group)
    some = len(ranks) < dist.get_world_size()
    if timeout is None:
        backend = group._get_backend(torch.device("cpu"))
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=some)
    assert isinstance(made, dist.ProcessGroup)
    return made
