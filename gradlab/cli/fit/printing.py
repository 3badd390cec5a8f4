"""What the methods of `gradlab fit` print of their fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradlab.cli.console import OUT, print_table, print_warnings

if TYPE_CHECKING:
    from gradlab.analysis.fit.ecsq import Alone, AtEqualBytes
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement
    from gradlab.analysis.fit.lgc.fit import LgcMeasurement
    from gradlab.analysis.fit.signs import BlockFit
    from gradlab.analysis.layer_plan.provenance import LgrecoProvenance


def print_comparison(compared: AtEqualBytes) -> None:
    """Print errors without feedback: the floor, the plan's, and those of other codecs at no more bytes."""
    from gradlab.formatting import format_percent

    def row(one: Alone) -> tuple[str, str, str, str]:
        settings = ", ".join(f"{key} = {value}" for key, value in one.settings.items())
        return one.codec, settings, f"{one.bits:.3f}", format_percent(one.error)

    floor = ("rate-distortion function", "", f"{compared.ecsq.bits:.3f}", format_percent(compared.floor))
    first, last = compared.iterations
    print_table(
        f"a rank's error without feedback, iterations {first} to {last}",
        ("codec", "setting", "bits per value", "error"),
        [floor, *map(row, (compared.ecsq, *compared.others))],
    )


def print_gradiveq(measured: GradiveqMeasurement) -> None:
    """Print whether the fit holds; per layer K, d and the loss where it was fitted and later; and the loss by age."""
    from gradlab.analysis.questions.slices import fit_table, fit_verdict
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


def print_lgc(measured: LgcMeasurement) -> None:
    """Print whether the autoencoder beats codes without learning; each code at its bytes; and the error by age."""
    from gradlab.analysis.questions.lgc import lgc_verdict, lgc_warnings, selection_table
    from gradlab.formatting import format_percent

    OUT.print(lgc_verdict(measured), markup=False)
    print_warnings(lgc_warnings(measured))
    table = selection_table(measured)
    print_table(table.title, table.columns, table.rows, left=table.text_columns)
    held = measured.holdout
    rows = [
        (f"{first} to {last}", format_percent(error))
        for (first, last), error in zip(held.ages, held.error_by_age, strict=True)
    ]
    print_table("error by age of the autoencoder, in steps", ("age", "error"), rows)


def print_layer_plan(provenance: LgrecoProvenance) -> None:
    """Print whether the plan pays, and what every layer got beside the uniform plan's setting."""
    from gradlab.analysis.questions.layer_plans import layer_plan_table, layer_plan_verdict

    OUT.print(layer_plan_verdict(provenance), markup=False)
    if provenance.sample is not None:
        OUT.print(
            f"The trace holds {provenance.sample}: errors are those of the samples, bytes of whole layers.",
            markup=False,
        )
    table = layer_plan_table(provenance)
    print_table(table.title, table.columns, table.rows, left=table.text_columns)


def print_blocks(blocks: BlockFit) -> None:
    """Print the share of energy that signs keep, with these blocks and without, where they were fitted and later."""
    from gradlab.formatting import format_percent

    fitted, held_out = blocks.fitted, blocks.held_out
    rows = [
        (f"{blocks.scales} scales, shared out", format_percent(fitted.kept), format_percent(held_out.kept)),
        ("a scale per tensor", format_percent(fitted.by_tensor), format_percent(held_out.by_tensor)),
        ("one scale", format_percent(fitted.by_model), format_percent(held_out.by_model)),
    ]
    first, held, last = blocks.iterations
    columns = ("signs with", f"fitted, {first} to {held - 1}", f"held out, {held} to {last}")
    print_table("energy of the gradients that signs keep", columns, rows)
