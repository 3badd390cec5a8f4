"""`gradlab fit gradiveq`: bases of slices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import OUT, print_table, print_warnings, progress_bars
from gradlab.cli.fit.options import (
    AsJson,
    Folder,
    Overwrite,
    Roles,
    Seed,
    Setting,
    Target,
    known_roles,
    parse_layer_settings,
    print_fit,
    setting_help,
)
from gradlab.cli.setting_texts import parse_settings
from gradlab.cli.trace_options import AverageRanks
from gradlab.cli.worker_options import Dask, Processes, workers_of

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement
    from gradlab.codecs.gradiveq import GradiVeQ

Samples = Annotated[int, typer.Option(help="Iterations to fit on (the paper's L_t).")]
Start = Annotated[
    int | None, typer.Option(help="Position of the first of them, if they shall not end where compression begins.")
]
Paper = Annotated[
    bool,
    typer.Option(
        "--paper",
        help="The paper's method: d by lambda = 0.01, bases of each layer's first slice, nothing random. After four "
        "times --samples compressed iterations the run samples again (as 4-bit QSGD) and fits its bases anew.",
    ),
]
LossThreshold = Annotated[float | None, typer.Option(help=setting_help("gradiveq", "loss_threshold"))]
SliceSize = Annotated[int | None, typer.Option(help=setting_help("gradiveq", "slice_size"))]
Reuse = Annotated[int | None, typer.Option(help=setting_help("gradiveq", "reuse"))]
Ratio = Annotated[
    float | None, typer.Option(help=setting_help("gradiveq", "ratio", "20 if nothing else decides on d."))
]
TotalRatio = Annotated[
    float | None, typer.Option(help="d of all layers at once: the whole model so many times smaller than in 32 bits.")
]
Complement = Annotated[
    float | None,
    typer.Option(help=setting_help("gradiveq", "complement", "Brings error feedback; 0.5 by default.")),
]
LayerSetting = Annotated[
    list[str] | None,
    typer.Option("--layer-set", metavar="LAYER:NAME=VALUE", help="A setting of one layer's codec; repeatable."),
]
Warmup = Annotated[
    int,
    typer.Option(
        help="Dense steps of training before the first compressed one. The fit takes the last --samples of them. With "
        "0 it takes the first --samples, and compression begins after these."
    ),
]


def gradiveq(
    trace: Folder,
    out: Target,
    samples: Samples = 100,
    start: Start = None,
    paper: Paper = False,
    loss_threshold: LossThreshold = None,
    slice_size: SliceSize = None,
    reuse: Reuse = None,
    ratio: Ratio = None,
    total_ratio: TotalRatio = None,
    complement: Complement = None,
    setting: Setting = None,
    layer_setting: LayerSetting = None,
    role: Roles = None,
    warmup_steps: Warmup = 0,
    seed: Seed = 0,
    workers: Processes = None,
    dask: Dask = None,
    average_ranks: AverageRanks = 1,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """GradiVeQ's PCA bases for convolutions, linear layers, embeddings and experts; vectors stay dense.

    Half of a code is of fitted axes, half random coordinates of what these leave, new in every iteration, with error
    feedback, so that nothing is lost for good. Bases are fitted again on what was decoded, every four times --samples
    iterations. Of GradiVeQ's forms this trained best at the same bytes. --paper is the published method, which samples
    again to refit.

    Example:

      gradlab fit gradiveq trace --out gradiveq.safetensors --samples 100 --warmup-steps 100

      gradlab fit gradiveq trace --out gradiveq.safetensors --total-ratio 16 --set monitor=normalised
      --layer-set stem.weight:on_loss=dense

      gradlab fit gradiveq trace --out paper.safetensors --paper --loss-threshold 0.05
    """
    from gradlab.analysis.fit.gradiveq import GradiveqOptions, fit_gradiveq
    from gradlab.analysis.outputs import require_free
    from gradlab.codecs.gradiveq import GradiVeQ
    from gradlab.trace import Trace

    require_free(out, overwrite)
    sharing = workers_of(workers, dask)
    given = {
        "loss_threshold": loss_threshold,
        "slice_size": slice_size,
        "reuse": reuse,
        "ratio": ratio,
        "complement": complement,
    }
    options = GradiveqOptions(
        samples=samples,
        start=start,
        settings=_settings(paper, samples, given, parse_settings(setting or [])),
        layer_settings=parse_layer_settings(layer_setting or []),
        total_ratio=total_ratio,
        roles=known_roles(role) or GradiVeQ.defaults.roles,
        warmup_steps=warmup_steps,
        seed=seed,
    )
    with Trace(trace, average_ranks=average_ranks) as opened, progress_bars() as progress:
        fit = fit_gradiveq(opened, options, workers=sharing, progress=progress)
    fit.artifact().save(out, overwrite)
    print_fit(fit.provenance, as_json, partial(print_gradiveq, fit.measured), out)


def _settings(
    paper: bool, samples: int, options: dict[str, int | float | None], settings: dict[str, Any]
) -> GradiVeQ.Settings:
    """The paper's or the recommended settings, with those given as options, and then with --set."""
    from dataclasses import asdict

    from gradlab.analysis.fit.gradiveq import PAPER, RECOMMENDED
    from gradlab.codec.settings import build_settings
    from gradlab.codecs.gradiveq import GradiVeQ

    values = asdict(PAPER if paper else RECOMMENDED) | {"sample_steps": samples, "compressed_steps": 4 * samples}
    if options["loss_threshold"] is not None:
        values["ratio"] = None
    if options["complement"] == 0:
        values["refresh"] = "sample"
    values |= {name: value for name, value in options.items() if value is not None}
    return build_settings(GradiVeQ, values | settings)


def print_gradiveq(measured: GradiveqMeasurement) -> None:
    """Print whether the fit holds; per layer K, d and the loss where it was fitted and later; and the loss by age."""
    from gradlab.analysis.report.tables import fit_table
    from gradlab.analysis.report.verdict import fit_verdict
    from gradlab.formatting import format_percent

    OUT.print(fit_verdict(measured), markup=False)
    print_warnings(measured.warnings)
    table = fit_table(measured)
    print_table(table.title, table.columns, table.rows)
    held, control = measured.holdout, measured.random_basis
    rows = [
        (f"{first} to {last}", format_percent(loss), format_percent(random))
        for (first, last), loss, random in zip(held.ages, held.loss_by_age, control.loss_by_age, strict=True)
    ]
    print_table("loss by age of the bases, in steps", ("age", "these bases", "random, same size"), rows)
    OUT.print(
        f"payload {measured.saving.text('smaller than dense')} over the whole model, from iteration "
        f"{measured.warmup_steps} on",
        markup=False,
    )
    if measured.mean_payload_bytes > measured.payload_bytes:
        OUT.print(
            f"{measured.mean_saving.text('smaller than dense')} on average, with the iterations that are sampled again",
            markup=False,
        )
