"""A plan at work between the ranks of a process group, on gradients that the caller hands over."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradlab.codec import Tensors
from gradlab.ddp.copies import Uncopied
from gradlab.ddp.groups import group_or_world
from gradlab.ddp.optimizer_steps import at_any_step
from gradlab.ddp.optimizers import HeldLayers
from gradlab.errors import GradlabError
from gradlab.executor.rules import Finding, finding, no_feedback, outer_feedback
from gradlab.layout import Layer, bare_names
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import follower_of, layers_with_feedback
from gradlab.plan.plan import between
from gradlab.plan.traffic import excess_of
from gradlab.runtime import checkpoint
from gradlab.runtime import run_report as reporting
from gradlab.runtime.checks import Pairs, agree_on, check, device_of_model, given_plan, named_as_in, unknown_needs
from gradlab.runtime.engine.device import HostDevice
from gradlab.runtime.engine.driver import Part, StepDriver
from gradlab.runtime.engine.options import RunOptions, Surroundings
from gradlab.runtime.engine.statistics import Place, StepRecord
from gradlab.runtime.network.faults import CommunicationError, let_go

if TYPE_CHECKING:
    from gradlab.runtime.saved import RankState


class Exchange(Uncopied):
    """A plan at work on one model's gradients, between the ranks of a process group. It knows nothing of DDP.

        exchange = Exchange(plan, model.named_parameters(), group)
        loss.backward()
        exchange.step({name: parameter.grad for name, parameter in model.named_parameters()})

    `step` replaces every gradient by what the plan makes of all ranks', in place, before it returns. A hook that is
    handed a few gradients at a time calls `begin`, then `add` for each of them, then `finish`. All ranks construct it
    together, and hand over the same layers in the same order.

    If a step fails on one rank, that rank leaves the reason for the others and takes part in no further collective. The
    others raise an error with that reason when their next collective fails, at the latest after the group's timeout.

    >>> from gradlab.runtime import Exchange
    >>> model = torch.nn.Linear(64, 32)
    >>> exchange = Exchange(Plan.uniform(model, "topk", density=0.01), model.named_parameters())
    >>> model(torch.ones(8, 64)).square().sum().backward()
    >>> exchange.step({name: parameter.grad for name, parameter in model.named_parameters()}).payload_bytes
    249
    >>> int(model.weight.grad.count_nonzero()), model.weight.numel()
    (21, 2048)

    Attributes:
        plan: plan as it was given.
        run: the rank's run of it (`gradlab.executor.PlanRun`): codecs, states, and the plan as it is now.
        identity: digest of the plan, this rank and the number of ranks, which a checkpoint has to match.
        statistics: the last steps.

    Args:
        plan: plan of these parameters, or the path of an artifact.
        named_parameters: names as in the plan's layers, with the parameters. Those that need no gradient are left out.
        group: the process group; None is the default one. Its collectives are issued in the calling thread, so other
            use of the group has to stand in the same order on all ranks.
        optimizer: one or several (a list); all that train these parameters. For each layer the one that holds it
            counts. Parameter groups give the learning rates that residuals follow. They are read in every iteration,
            so schedules and groups added later count. A layer that no group holds does not move, and its residual
            waits. Optimizers are needed where the plan follows rates or applies momentum or weight decay, which they
            must then not do.
        scaler: the torch.amp.GradScaler, if one is in use. Residuals are then kept without its factor.
        deterministic: take means by all-to-all, a sum in rank order and all-gather, bit-identical to the offline
            replay, instead of by the backend's all-reduce.
        segment_bytes: gradients encoded before the next collective is issued, in bytes. It also waits until messages
            are a thirty-second of that, and those of a bucket that are less than a 256th travel with the next one's.
        measure_every: steps from one whose errors, norms and bytes by layer are measured (five passes over the
            gradients, eight without feedback) to the next. 0: none is measured.
        trace_steps: iterations whose spans are kept for `chrome_trace`.
        non_finite_limit: non-finite steps in a row after which every rank raises an error.
        check_requests: compare all ranks' requests before each collective (debugging).
        history: steps kept in `statistics`.
        hold_unused: whether a layer whose gradient is zero on all ranks keeps its state and gets no gradient.
        rules: action of each rule of `gradlab.executor.rules`, by name: "warn" (each once, on rank 0),
            "error" (raised on all ranks) or "ignore"; one of these words for all rules.
        exchanges: "gradients", or "pseudo-gradients", with `outer_feedback` in no_feedback's place under momentum.

    Raises:
        GradlabError: if the plan is for other parameters (with a difference by layer), the plan and the optimizer both
            apply momentum or weight decay, or ranks have different plans or options.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        chosen = RunOptions(**options)
        layers = _layers_with_parameters(named_parameters)
        everyone = group_or_world(group, "Exchange")

        def attempt() -> tuple[Plan, Pairs]:
            whole = given_plan(plan, "Exchange")
            pairs = named_as_in(whole, layers)
            check(whole, pairs, everyone.size(), chosen)
            return whole, pairs

        device = layers[0][1].device if layers else torch.device("cpu")
        plan, pairs = agree_on((everyone,), device, attempt, lambda done: chosen.same_everywhere(done[0]))
        # Work is done in the caller's thread, on the caller's stream: there is nothing to hand over.
        self._parameters = {layer.name: parameter for layer, parameter in pairs}
        around = Surroundings(self._parameters, chosen, HostDevice(device_of_model(pairs)))
        self._set_up(plan, plain_driver(plan, everyone, around, owned=False))
        self._finalizer = weakref.finalize(self, self._driver.close)

    def _set_up(self, plan: Plan, driver: StepDriver) -> None:
        """Put the parts together, from arguments that were checked. The driver's plan is this one or its shards."""
        self.plan, self.run, self.statistics, self._driver = plan, driver.run, driver.statistics, driver
        self.identity = driver.place.identity(plan)
        plan, held, world_size = driver.run.plan, driver.held, driver.communicator.world_size
        self._residuals = reporting.residual_statement(plan, held)
        try:
            if excess := excess_of(plan, world_size):
                driver.rules.tell([finding("bytes_sent", excess.sentence(world_size), excess.to_16_bits, 1)])
            if found := self._on_feedback(driver.around.options.exchanges, held):
                driver.rules.tell([found])
            if follower_of(plan) and not self.run.settings.plain_sgd and driver.place.rank == 0:
                warnings.warn(f"gradlab: {self._residuals}", stacklevel=4)
            if held.partial and unknown_needs(plan, held):
                driver.closing.append(at_any_step(held.refuse_other).remove)
        except GradlabError:
            driver.close()
            raise

    def _on_feedback(self, exchanges: str, held: HeldLayers) -> Finding | None:
        plan, settings = self.run.plan, held.settings()
        if exchanges == "gradients" or settings is None or settings.momentum is None:
            return no_feedback({group.name: plan.build(group) for group in plan.compressed_groups})
        layers = layers_with_feedback(between(plan, self._driver.communicator.world_size))
        return outer_feedback(layers, next(filter(None, (one.momentum for one in settings.of_layers(layers))), None))

    # --- steps ---

    def step(self, gradients: Mapping[str, torch.Tensor | None]) -> StepRecord:
        """Exchange the gradients of one step, in place.

        Args:
            gradients: gradients of all layers of the plan, by name. None counts as zeros.

        Returns:
            Bytes and times of the step.

        Raises:
            GradlabError: for other layers or shapes, or after too many steps in a row that were not finite.
            CommunicationError: if another rank failed (with its reason) or could not be reached within the timeout.
        """
        self.begin()
        self.add(gradients)
        return self.finish()

    def begin(self) -> None:
        """Begin a step."""
        with self._guarded():
            self._driver.communicator.timeline.begin(self.iteration)
            self._driver.begin()

    def add(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Exchange the gradients of some layers, in place.

        When it returns, all groups that are complete have their results. A group of several layers is complete with
        the last of them. Gradients of any rank may not be finite: `finish` decides whether the results count.

        Args:
            gradients: gradients by layer name. None counts as zeros.
        """
        with self._guarded():
            current = self._driver.current
            before = current.step.gradients if current else {}
            checked = _checked(gradients, self._parameters, before)
            self._driver.add(Part(len(current.parts) if current else 0, checked))
            self._driver.drain()

    def finish(self) -> StepRecord:
        """End the step and commit its states.

        If a gradient on some rank was not finite, all gradients are filled with NaN instead.

        Returns:
            Bytes and times of the step.
        """
        with self._guarded():
            current = self._driver.current
            if current and (missing := [name for name in self._parameters if name not in current.step.gradients]):
                raise GradlabError(f"Exchange: no gradient of {missing[0]} came in this step ({len(missing)} missing)")
            return self._driver.finish()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Do a part of a step; if it fails, tell the other ranks, and refuse to go on."""
        if self._driver.broken is not None:
            raise GradlabError(f"this Exchange stopped earlier: {self._driver.broken}")
        if self._driver.communicator.group is None:
            raise GradlabError("this Exchange is closed; make a new one")
        try:
            with torch.no_grad():
                yield
        except BaseException as error:
            reason = self._driver.fail(error)
            let_go(error)
            self._driver.close()
            if isinstance(error, CommunicationError):
                raise CommunicationError(reason) from None  # the cause is another rank, no line of this one's
            if isinstance(error, GradlabError):
                raise type(error)(reason) from error
            raise

    # --- what it holds ---

    @property
    def iteration(self) -> int:
        """Number of the next step, from 0, which is the number of steps synchronised so far."""
        return self.run.iteration

    def state_dict(self) -> dict[str, Any]:
        """Collect this rank's state: plain values and tensors, for `torch.save` and `torch.load` with weights_only.

        States are keyed "<group>::<layer>/<what>". Every rank must save its own, as residuals differ between ranks.

        Returns:
            The state.
        """
        return checkpoint.save(self.run, self.identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same plan, rank and world size. Every rank loads its own.

        Args:
            state: result of `state_dict`.

        Raises:
            GradlabError: naming what differs, or if a step is in progress. If ranks continue from different
                iterations, the next step raises it.
        """
        run = self.run
        self._driver.require_between_steps()
        checkpoint.restore(run, state, self.identity, self._driver.around.device)
        self._driver.ranks_compared = False

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], residuals: str) -> None:
        """Continue the run of N ranks on this run's M. Every rank loads the `state_dict` of all N, in rank order.

        State that all ranks share (warm starts, momentum after the average) is taken over. The residual of a sharded
        server is cut anew. `residuals` decides the use of the residuals and velocities e_i, of which each rank has
        its own:

        "split": every new rank gets their mean.
        "sum": new rank j gets the sum of e_i over the old ranks i with i mod M == j, times M / N. A rank that gets
            none starts from zero.
        "drop": all start from zero, the residual of a sharded server too.

        The first two keep (1/M) sum e'_j == (1/N) sum e_i, the mean of what was not sent yet.

        Args:
            states: the N ranks' state dicts.
            residuals: "split", "sum" or "drop".

        Raises:
            GradlabError: for another policy, another plan, or checkpoints that are not those of one run, whole. Also
                if a step is in progress.
        """
        run = self.run
        self._driver.require_between_steps()
        checkpoint.redistribute(run, states, self.identity, residuals, self._driver.around.device)
        self._driver.ranks_compared = False

    @property
    def stateful(self) -> RankState:
        """This rank's state for `torch.distributed.checkpoint.save` and `load`, beside those of all other ranks."""
        from gradlab.runtime.saved import RankState

        return RankState(self)

    def report(self) -> dict[str, Any]:
        """Summarise the run as plain JSON; a number that is not finite is None.

        It has the bytes and seconds per step on this rank, in all, by group and by codec, and the bytes that the plan
        forecasts. It also says what holds for the residuals under this optimizer. `StepRecord` says what each number
        covers.
        """
        return _summary(self).to_json()

    def table(self) -> str:
        """Return `report` as text, one line per group."""
        return reporting.table(_summary(self))

    def scalars(self) -> dict[str, float]:
        """Return the last step's numbers by name; `gradlab.runtime.log_scalars` hands them to a logger.

        `gradlab/wait_seconds` is the exposed wait, `gradlab/noise_scale` the gradient noise scale over the last 50
        measured steps, in batches of one rank.
        """
        return reporting.scalars(self.statistics.steps, self._driver.place)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return what the rules have found so far, the same on all ranks."""
        return self._driver.rules.findings

    def chrome_trace(self) -> list[dict[str, Any]]:
        """Return the events of the iterations in `trace_steps`, which chrome://tracing and Perfetto show once saved.

        The lists of several ranks may be joined: every rank is a process there, and times are those of the machine's
        clock.
        """
        everyone = self._driver.everyone
        return self._driver.communicator.timeline.events(everyone.names[everyone.rank])

    def close(self) -> None:
        """End the run. Later steps are refused. Closing twice does no harm, and exit closes too.

        A worker thread is stopped, and a process group that was made here is destroyed. Other ranks that go on find in
        their error that this rank was closed.
        """
        if self._driver.in_progress:
            self._driver.leave("closed before the step had ended")
        self._driver.end()
        self._finalizer()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object) -> None:
        if kind is not None:
            self._driver.leave(f"{kind.__name__}: {error}")
        self.close()


def _summary(exchange: Exchange) -> reporting.RunReport:
    driver, steps = exchange._driver, list(exchange.statistics.steps)
    return reporting.summarize_run(driver.run, steps, driver.place, exchange._residuals, driver.rules.findings)


def _checked(
    gradients: Mapping[str, torch.Tensor | None],
    parameters: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
) -> Tensors:
    """The gradients as dense tensors of the plan's shapes, by layer name; none of them came before."""
    checked: Tensors = {}
    for name, gradient in gradients.items():
        if name not in parameters:
            raise GradlabError(f"Exchange: a gradient of {str(name)[:80]!r}, which the plan does not have")
        if name in before:
            raise GradlabError(f"Exchange: a second gradient of {name} in one step")
        given, shape = torch.zeros_like(parameters[name]) if gradient is None else gradient, parameters[name].shape
        if given.is_sparse or given.shape != shape:
            came = "a sparse tensor" if given.is_sparse else f"shape {list(given.shape)}"
            raise GradlabError(f"Exchange: gradient of {name}: {came}, expected a dense {list(shape)}")
        checked[name] = given.detach()
    return checked


def _layers_with_parameters(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> Pairs:
    """Trainable parameters as layers; one that several modules share counts once."""
    pairs, seen, named = [], set(), list(named_parameters)
    for name, (_, parameter) in zip(bare_names([name for name, _ in named]), named, strict=True):
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            pairs.append((Layer(name, tuple(parameter.shape)), parameter))
    return pairs


def plain_driver(plan: Plan, group: dist.ProcessGroup, around: Surroundings, *, owned: bool) -> StepDriver:
    """Make the driver of a plan's steps between the ranks of a group."""
    everyone = around.communicator(group, owned=owned)
    if everyone.world_size == 1:
        warnings.warn("gradlab: world size 1: one rank sends nothing that could be compressed", stacklevel=4)
    run = around.run(plan, everyone.rank, everyone.world_size)
    carried = {name: (one, one.numel(), one.element_size()) for name, one in around.parameters.items()}
    place = Place.of(everyone, lambda plan: plan.payload_bytes(everyone.world_size), carried)
    return StepDriver(run, everyone, around, place)
