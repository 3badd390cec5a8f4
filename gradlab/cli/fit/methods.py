"""The methods of `gradlab fit`: for each a dataclass of settings, whose docstring is its help, and how it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from gradlab.analysis.figures.chart import Chart
from gradlab.analysis.fit.gradiveq import PAPER, RECOMMENDED, GradiveqOptions, fit_gradiveq
from gradlab.analysis.fit.lgc.fit import Fitting, LgcOptions, fit_lgc
from gradlab.analysis.fit.signs import (
    decay_after_momentum,
    fit_block_sizes,
    require_blocks,
    residuals_follow,
    sign_method,
    with_block_sizes,
)
from gradlab.analysis.fit.trained_with import optimizer_of_training, require_trainable
from gradlab.analysis.fit.uniform import parse_wrapper, uniform_artifact
from gradlab.analysis.forecast.link import Link, parse_bandwidth, parse_seconds
from gradlab.analysis.layer_plan.costs import Cost
from gradlab.analysis.layer_plan.grids import candidates_of_grid
from gradlab.analysis.layer_plan.lgreco import LgrecoOptions, fit_lgreco
from gradlab.analysis.questions.layer_plans import layers_chart
from gradlab.analysis.questions.lgc import fit_chart
from gradlab.analysis.replay import replay
from gradlab.artifact import Artifact
from gradlab.cli.console import Answer
from gradlab.cli.evaluate import answer_of
from gradlab.cli.fit import printing
from gradlab.codec.settings import build_settings, setting
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.ddp.optimizers import OptimizerSettings
from gradlab.errors import GradlabError
from gradlab.plan import FEEDBACK, Plan, Wrap, method_plan
from gradlab.plan.optimizer_rules import applied_by
from gradlab.progress import Progress
from gradlab.trace import Trace

ROLE = "roles of the layers to compress, such as linear or embedding; the codec's own by default (`gradlab trace info`)"


@dataclass(frozen=True)
class Job:
    """The recording, the artifact's file, the codec's settings, and who shares the work."""

    trace: Trace
    out: Path
    settings: Mapping[str, Any]
    workers: int
    progress: Progress


@dataclass(frozen=True)
class Made:
    """An artifact, what was measured of it, and its drawing."""

    artifact: Artifact
    answer: Answer
    chart: Chart | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """Settings of every method. Subclasses name their options, and the codec whose settings the help lists.

    by_layer: whether `-s LAYER:NAME=VALUE` sets one layer's codec.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    options: ClassVar[tuple[str, ...]]
    listed: ClassVar[str] = ""
    by_layer: ClassVar[bool] = False
    warmup_steps: int | None = setting(None, help="number of dense training steps before the first compressed one")
    seed: int = setting(0, help="seed of the random streams that ranks share")
    average_ranks: int = setting(
        1, help="number of recorded ranks that make a node: each such group is averaged, and the plan is for nodes"
    )

    def make(self, job: Job) -> Made:
        """Make the artifact."""
        raise NotImplementedError

    @classmethod
    def with_option(cls) -> tuple[str, ...]:
        """Settings that have an option of their own."""
        return ("warmup_steps", *cls.options)

    @property
    def codec_name(self) -> str:
        """The codec whose settings `-s` takes too."""
        return self.listed or self.codec  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class PlanMethod(Method):
    """A method whose plan is checked against the optimizer of the training, and replayed."""

    trained_with: str | None = setting(
        None,
        help="optimizer of the training by its torch.optim name, such as AdamW, SGD:momentum=0.9 or Muon+AdamW; the "
        "recorded one by default",
    )

    def optimizer(self, job: Job) -> OptimizerSettings | None:
        return optimizer_of_training(job.trace, self.trained_with)


@dataclass(frozen=True, kw_only=True)
class Gradiveq(Method):
    """GradiVeQ's PCA bases for convolutions, linear layers, embeddings and experts; vectors stay dense.

    Half of a code is of fitted axes, half random coordinates of what these leave, new in every iteration, with error
    feedback, so that nothing is lost for good. Bases are fitted again on what was decoded, every four times --samples
    iterations. This form of GradiVeQ trained best at the same bytes. --paper is the published method, which samples
    again to refit.

    Example:

      gradlab fit gradiveq trace --out gradiveq.safetensors --samples 100 --warmup-steps 100

      gradlab fit gradiveq trace --out gradiveq.safetensors -s ratio=16 -s stem.weight:ratio=8

      gradlab fit gradiveq trace --out paper.safetensors --paper -s loss_threshold=0.05
    """

    name, about = "gradiveq", "PCA bases of gradient slices (GradiVeQ)"
    options = ("samples", "role", "paper")
    listed = "gradiveq"
    by_layer = True
    samples: int = setting(
        100,
        help="iterations to fit on (the paper's L_t): the last before --warmup-steps, or the first of the trace",
    )
    role: tuple[str, ...] = setting((), help=ROLE)
    paper: bool = setting(
        False,
        help="the paper's method: d by lambda = 0.01, bases of each layer's first slice, nothing random; after four "
        "times --samples compressed iterations the run samples again (as 4-bit QSGD) and fits its bases anew",
    )
    start: int | None = setting(None, help="position of the first iteration to fit on")

    def make(self, job: Job) -> Made:

        options = GradiveqOptions(
            samples=self.samples,
            start=self.start,
            settings=self._settings({name: value for name, value in job.settings.items() if ":" not in name}),
            layer_settings=_by_layer(job.settings),
            roles=self.role or GradiVeQ.about.defaults.roles,
            warmup_steps=self.warmup_steps or 0,
            seed=self.seed,
        )
        fit = fit_gradiveq(job.trace, options, workers=job.workers, progress=job.progress)
        return Made(fit.artifact(), printing.gradiveq(fit.measured))

    def _settings(self, given: dict[str, Any]) -> Any:
        """The paper's or the recommended settings, with those given."""
        values = asdict(PAPER if self.paper else RECOMMENDED)
        values |= {"sample_steps": self.samples, "compressed_steps": 4 * self.samples}
        if given.get("loss_threshold") is not None:
            values["ratio"] = None
        if given.get("complement") == 0:
            values["refresh"] = "sample"
        return build_settings(GradiVeQ, values | given)


@dataclass(frozen=True, kw_only=True)
class Ecsq(PlanMethod):
    """One quantization step for the whole model and an entropy coder, replayed on the trace.

    `gradlab analyze` places it beside the least bits possible and beside every other codec.

    Example:

      gradlab fit ecsq trace --bits 0.25 --out ecsq.safetensors

      gradlab fit ecsq trace --error 0.3 --out ecsq.safetensors

      gradlab fit ecsq trace --bits 0.5 --both-ways --warmup-steps 100 --out ecsq.safetensors
    """

    name, about = "ecsq", "One step for all values, entropy-coded"
    options = ("bits", "error", "both_ways", "role")
    listed = "ecsq"
    bits: float = setting(0.25, help="bits per value, counted as wire bytes; the step follows")
    error: float | None = setting(None, help="error of a rank's contribution to hold, in place of --bits")
    both_ways: bool = setting(
        False, help="a server for each shard, which quantizes the mean and keeps its error: for many ranks"
    )
    role: tuple[str, ...] = setting((), help=ROLE)

    def make(self, job: Job) -> Made:

        settings = {"bits": self.bits, **job.settings, **({} if self.error is None else {"error": self.error})}
        around = [*FEEDBACK, *([Wrap("two_way")] if self.both_ways else [])]
        plan = Plan.uniform(
            job.trace.model_layers,
            "ecsq",
            wrappers=around if self.both_ways else None,
            warmup_steps=self.warmup_steps or 0,
            roles=self.role or None,
            seed=self.seed,
            **settings,
        )
        optimizer = self.optimizer(job)
        note = require_trainable(optimizer, *applied_by(plan), "")
        return _replayed(job, plan, optimizer, [note])


@dataclass(frozen=True, kw_only=True)
class Signs(PlanMethod):
    """Fit a sign-compression plan (dist-EF-blockSGDM and its relatives) for all tensors, and replay it on the trace.

    One bit per value both ways and a scale per block: the fewest bytes without a fit, at a loss of accuracy. More
    --scales cut tensors into blocks where that pays; what the blocks keep is checked on iterations that were not looked
    at. The plan is one that trains under the optimizer that the recording names.

    Example:

      gradlab fit signs trace --out signs.safetensors

      gradlab fit signs trace --method dist-EF-blockSGD --scales 16 --out blocks.safetensors

      gradlab fit signs trace --weight-decay 5e-4 -s weight_decay_form=apart --out signs.safetensors
    """

    name, about = "signs", "Signs with feedback (dist-EF-blockSGDM)"
    options = ("method", "weight_decay", "scales")
    listed = "sign"
    method: str | None = setting(
        None,
        help="dist-EF-blockSGD(M), dist-EF-SGD(M), signSGD, signum, SGD or SGDM; by default dist-EF-blockSGDM, or "
        "dist-EF-blockSGD where the optimizer has momentum that no plan's can replace (AdamW)",
    )
    weight_decay: float = setting(
        0.0, help="weight decay in the plan; the optimizer's has to be 0; 0: the optimizer keeps it"
    )
    scales: float = setting(
        1.0, help="mean number of scales per tensor, placed where they keep most of the gradients' energy"
    )
    momentum: float = setting(0.9, help="momentum of the methods that have it; the optimizer's has to be 0")
    weight_decay_form: str | None = setting(
        None,
        help="place of weight decay: on the gradient before momentum ('gradient', the default), or 'apart' with a "
        "momentum of its own, uncompressed, as in the published code of dist-EF-blockSGDM",
    )
    server: str = setting("sharded", help="server of the means: 'sharded' (each rank, its part) or 'rank' (rank 0)")
    samples: int | None = setting(None, help="iterations that energy is measured on; half of the trace, at most 100")

    def make(self, job: Job) -> Made:

        if self.weight_decay_form is not None and not self.weight_decay:
            form = f"weight_decay_form = {self.weight_decay_form}"
            raise GradlabError(f"{form} says how --weight-decay works, which is 0")
        optimizer, blocks = self.optimizer(job), None
        method, notes = sign_method(self.method, optimizer)
        plan = self._plan(job, method, optimizer)
        remedy = "use --weight-decay 0" if applied_by(plan)[0] is None else "use --method dist-EF-blockSGD"
        notes += [require_trainable(optimizer, *applied_by(plan), remedy)]
        notes += [decay_after_momentum(plan, optimizer)]
        if self.scales != 1:
            require_blocks(method, job.settings)
            half = min(100, max(1, len(job.trace.steps) // 2)) if self.samples is None else self.samples
            blocks = fit_block_sizes(job.trace, self.scales, half, workers=job.workers, progress=job.progress)
            plan = with_block_sizes(plan, blocks.block_sizes)
        tables = [] if blocks is None else [printing.blocks(blocks)]
        return _replayed(job, plan, optimizer, notes, tables, method=method, blocks=blocks)

    def _plan(self, job: Job, method: str, optimizer: OptimizerSettings | None) -> Plan:

        return method_plan(
            job.trace.model_layers,
            method,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            weight_decay_form=self.weight_decay_form or "gradient",
            server=self.server,
            warmup_steps=self.warmup_steps or 0,
            step_size_ratio=residuals_follow(method, optimizer),
            seed=self.seed,
            **job.settings,
        )


@dataclass(frozen=True, kw_only=True)
class Lgreco(Method):
    """L-GreCo: a setting per layer, the smallest plan with no more error than a uniform one.

    All ranks' gradients are accumulated over windows of the trace, and compressed without feedback. The plan is chosen
    on the first half of the windows and checked on the other half. The search proves that no plan is smaller.

    Example:

      gradlab fit lgreco trace --codec topk -s density=0.01 --figure layers.svg --out topk.safetensors

      gradlab fit lgreco trace -s rank=4 -s family=all --cost wire -s nodes=8 --out hybrid.safetensors

      gradlab fit lgreco trace -s rank=4 -s refresh=400 -s accordion=2:8 --out accordion.safetensors
    """

    name, about = "lgreco", "A setting for each layer (L-GreCo)"
    options = ("codec", "alpha", "cost", "figure")
    codec: str = setting("powersgd", help="codec of the uniform plan, which you know to train well")
    alpha: float = setting(1.0, help="the error that the plan may have, as a multiple of the uniform plan's")
    cost: str = setting(
        "payload",
        help="cost that the plan minimises: payload (bytes, as in the paper), wire (bytes sent among the ranks) or "
        "seconds (summed over layers, as if nothing were hidden)",
    )
    figure: str | None = setting(None, help="drawing of what every layer got (.svg, .pdf)")
    grid: str = setting(
        "paper",
        help="settings to choose from: 'paper' (D/2 to 2 D; densities D/10 to 10 D) or 'own' (the codec's list)",
    )
    family: str = setting(
        "", help="families to choose among, with commas between: PCA, PowerSGD, top-k, QSGD, ECSQ, signs, cast, or all"
    )
    samples: int = setting(
        50, help="iterations that PCA bases are fitted on, ahead of those that errors are measured on"
    )
    metric: str = setting("l2", help="sum of layers' errors: 'l2' (norms, as in the paper) or 'squared-l2'")
    window: int | None = setting(None, help="steps that gradients are accumulated over; a quarter of the trace")
    start: int = setting(0, help="position of the first recorded step to look at")
    nodes: int | None = setting(None, help="number of ranks that will train; the trace's")
    bandwidth: str = setting("1gbit", help="speed of a node's link, for cost seconds: 200mbit, 10gbit")
    latency: str = setting("100us", help="one-way latency of that link")
    local_ranks: int = setting(1, help="ranks per node, which share its one link to the others")
    refresh: int = setting(0, help="iterations of training after which plans are chosen anew; 0: never")
    accordion: str | None = setting(
        None,
        help="MOST:LEAST, with refresh: Accordion allows the error of the second setting in critical regimes, "
        "elsewhere that of the first, more compressed one; 2:8 for ranks",
    )

    def make(self, job: Job) -> Made:

        ranks = job.trace.world_size if self.nodes is None else self.nodes
        candidates, first = candidates_of_grid(
            job.trace,
            self.codec,
            job.settings,
            grid=self.grid,
            families=self.family.split(",") if self.family else (),
            start=self.start,
            samples=self.samples,
            workers=job.workers,
            progress=job.progress,
        )
        options = LgrecoOptions(
            candidates,
            alpha=self.alpha,
            metric=self.metric,
            window=self.window,
            start=first,
            cost=self._cost(),
            world_size=ranks,
            warmup_steps=self.warmup_steps or 0,
            refresh_every=self.refresh,
            accordion=_between(self.accordion),
            seed=self.seed,
            workers=job.workers,
        )
        fit = fit_lgreco(job.trace, self.codec, job.settings, options, progress=job.progress)
        return Made(fit.artifact(), printing.layer_plan(fit.provenance), layers_chart(fit.provenance))

    def _cost(self) -> Cost:
        link = Link(parse_bandwidth(self.bandwidth), parse_seconds(self.latency)) if self.cost == "seconds" else None
        return Cost(self.cost, link, local_ranks=self.local_ranks)


@dataclass(frozen=True, kw_only=True)
class Lgc(PlanMethod):
    """LGC's autoencoder, learned on a trace; what needs no learning is printed beside it, at its bytes.

    The first 60 % of the recorded iterations are learned from, the next 15 % say when to stop, the rest judge. Training
    with the artifact skips the phase in which LGC learns (-s fine_tune_steps=100: shortens it). It compresses after 200
    dense steps unless --warmup-steps says otherwise.

    Example:

      gradlab fit lgc trace --density 0.01 -s order=value --feedback --out sorted.safetensors --figure lgc.svg

      gradlab fit lgc trace --pattern server -s positions=shared --density 0.01 --out server.safetensors
    """

    name, about = "lgc", "An autoencoder of several ranks' values (LGC)"
    options = ("density", "pattern", "feedback", "figure")
    listed = "lgc_ring"
    density: float = setting(0.001, help="share of each layer's values that is selected, the paper's alpha / 100")
    pattern: str = setting(
        "ring", choices=("ring", "server"), help="ring: codes are averaged; server: one rank's code, a decoder per rank"
    )
    feedback: bool = setting(False, help="feedback of what decoding loses too, which the paper forgets")
    figure: str | None = setting(None, help="drawing of the error over epochs and over age (.svg, .pdf)")
    first: str | None = setting(None, help="layer that stays dense; the first recorded matrix")
    last: str | None = setting(None, help="layer that is sent without the autoencoder; the last one")
    vectors: str = setting(
        "dense", help="biases and normalization vectors: dense; autoencoder: in its group; sparse: as the last layer"
    )
    momentum: float | None = setting(
        None, help="momentum of momentum correction; the optimizer's has to be 0; without it none"
    )
    epochs: int = setting(100, help="passes over the recorded iterations, at most")
    adam_rate: float = setting(1e-3, help="learning rate of Adam, which learns the autoencoder on the trace")

    @property
    def codec_name(self) -> str:
        return f"lgc_{self.pattern}"

    def make(self, job: Job) -> Made:

        options = LgcOptions(
            settings={"density": self.density, **job.settings},
            fitting=Fitting(self.epochs, learning_rate=self.adam_rate),
            first=self.first,
            last=self.last,
            vectors=self.vectors,
            momentum=self.momentum,
            keep="difference" if self.feedback else "unselected",
            warmup_steps=200 if self.warmup_steps is None else self.warmup_steps,
            seed=self.seed,
        )
        wrapper = None if self.momentum is None else "momentum_correction"
        note = require_trainable(self.optimizer(job), wrapper, remedy="leave momentum out")
        fit = fit_lgc(job.trace, self.pattern, options, progress=job.progress)
        notes = (note, _beyond_the_trace(fit.plan, int(job.trace.steps[-1])))

        answer = printing.lgc(fit.measured, fit.plan, job.trace.path)
        answer = replace(answer, notes=[*filter(None, notes), *answer.notes])
        return Made(fit.artifact(), answer, fit_chart(fit.measured))


@dataclass(frozen=True, kw_only=True)
class Uniform(PlanMethod):
    """One codec with one setting for all layers, but vectors and small ones (signs: all), replayed on the trace.

    It compresses after as many dense steps as the codec recommends unless --warmup-steps says otherwise.

    Example:

      gradlab fit uniform trace --codec topk -s density=0.01 --out topk.safetensors

      gradlab fit uniform trace --codec topk -s density=0.001 --wrap momentum_correction:momentum=0.9
      --wrap sparsity_warmup:steps=500 --out dgc.safetensors
    """

    name, about = "uniform", "One codec with one setting: needs no fit"
    options = ("codec", "wrap", "error_feedback", "role")
    codec: str = setting(help="any codec that needs no fit: topk, powersgd, qsgd, sign, ... (see gradlab methods)")
    wrap: tuple[str, ...] = setting(
        (), help="wrapper around the codec as NAME[:KEY=VALUE,...], outermost first; repeatable; in place of feedback"
    )
    error_feedback: bool | None = setting(None, help="error feedback around the codec; by default as it recommends")
    role: tuple[str, ...] = setting((), help=ROLE)

    def make(self, job: Job) -> Made:

        plan = Plan.uniform(
            job.trace.model_layers,
            self.codec,
            error_feedback=self.error_feedback,
            wrappers=[parse_wrapper(text) for text in self.wrap] or None,
            warmup_steps=self.warmup_steps,
            roles=self.role or None,
            seed=self.seed,
            **job.settings,
        )
        remedy, optimizer = "leave such wrappers out of --wrap", self.optimizer(job)
        note = require_trainable(optimizer, *applied_by(plan), remedy)
        return _replayed(job, plan, optimizer, [note])


METHODS: dict[str, type[Method]] = {method.name: method for method in (Gradiveq, Ecsq, Signs, Lgreco, Lgc, Uniform)}


def _replayed(
    job: Job,
    plan: Plan,
    optimizer: OptimizerSettings | None,
    notes: Sequence[str | None],
    tables: Sequence[Any] = (),
    **metadata: Any,
) -> Made:
    """The artifact of a plan, with its replay: judged on iterations later than those of the metadata's "fitted_on"."""
    replayed = replay(job.trace, plan, workers=job.workers, progress=job.progress)
    replayed = replayed.held_out({"trace": replayed.trace_digest, **metadata})
    answer = answer_of({job.out.stem: replayed})
    answer = replace(answer, tables=[*answer.tables, *tables], notes=[*filter(None, notes)])
    return Made(uniform_artifact(plan, replayed, optimizer=optimizer, **metadata), answer)


def _by_layer(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read LAYER:NAME=VALUE settings by layer."""
    by_layer: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        layer, colon, name = key.rpartition(":")
        if colon:
            by_layer.setdefault(layer, {})[name] = value
    return by_layer


def _between(text: str | None) -> tuple[float, float] | None:
    """Read MOST:LEAST."""
    if text is None:
        return None
    most, _, least = text.partition(":")
    try:
        return float(most), float(least)
    except ValueError:
        raise GradlabError(f"accordion {text[:80]!r}, expected two values, as 2:8") from None


def _beyond_the_trace(plan: Plan, last: int) -> str | None:
    """A note on a plan that compresses nothing up to the iteration where the trace ends."""
    if plan.schedule.compresses(last):
        return None
    return (
        f"dense until iteration {plan.schedule.warmup_steps}, and the trace ends at {last}: `gradlab evaluate` cannot "
        "replay it there; make it with fewer --warmup-steps for that"
    )
