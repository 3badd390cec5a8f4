"""Answers of `gradlab fit`."""

from __future__ import annotations

from pathlib import Path

from gradlab.analysis.fit.gradiveq import GradiveqMeasurement
from gradlab.analysis.fit.lgc.fit import LgcMeasurement
from gradlab.analysis.fit.signs import BlockFit
from gradlab.analysis.layer_plan.provenance import LgrecoProvenance
from gradlab.analysis.questions.layer_plans import layer_plan_table, layer_plan_verdict
from gradlab.analysis.questions.lgc import lgc_verdict, lgc_warnings, selection_table
from gradlab.analysis.questions.slices import fit_table, fit_verdict
from gradlab.cli.console import Answer, Table
from gradlab.formatting import format_percent
from gradlab.plan import Plan


def gradiveq(measured: GradiveqMeasurement) -> Answer:
    """Whether the fit holds; K, d and loss per layer; and the loss by age of the bases."""
    held, control = measured.holdout, measured.random_basis
    rows = [
        (f"{first} to {last}", format_percent(loss), format_percent(random))
        for (first, last), loss, random in zip(held.ages, held.loss_by_age, control.loss_by_age, strict=True)
    ]
    ages = Table("loss by age of the bases, in steps", ("age", "these bases", "random, same size"), rows)
    saving = measured.saving.text("smaller than dense")
    notes = [f"payload {saving} over the whole model, from iteration {measured.warmup_steps} on"]
    if measured.mean_payload_bytes > measured.payload_bytes:
        mean = measured.mean_saving.text("smaller than dense")
        notes.append(f"{mean} on average, with the iterations that are sampled again")
    return Answer([fit_verdict(measured)], measured.warnings, [fit_table(measured), ages], notes)


def lgc(measured: LgcMeasurement, plan: Plan, trace: Path) -> Answer:
    """Whether the autoencoder beats codes without learning; each code at its bytes; and the error by age."""
    held = measured.holdout
    rows = [
        (f"{first} to {last}", format_percent(error))
        for (first, last), error in zip(held.ages, held.error_by_age, strict=True)
    ]
    ages = Table("error by age of the autoencoder, in steps", ("age", "error"), rows)
    notes = []
    if measured.better is not None:  # the same positions without an autoencoder
        compress = f"--codec clt_k -s density={measured.settings['density']:g} -s values=int8"
        warmup = f"--warmup-steps {plan.schedule.warmup_steps}"
        notes.append(f"in its place: gradlab fit uniform {trace} {compress} {warmup} --out clt_k.safetensors")
    return Answer([lgc_verdict(measured)], lgc_warnings(measured), [selection_table(measured), ages], notes)


def layer_plan(provenance: LgrecoProvenance) -> Answer:
    """Whether the plan pays, and what every layer got beside the uniform plan's setting."""
    lines = [layer_plan_verdict(provenance)]
    if provenance.sample is not None:
        lines.append(f"The trace holds {provenance.sample}: errors are those of the samples, bytes of whole layers.")
    return Answer(lines, tables=[layer_plan_table(provenance)])


def blocks(fit: BlockFit) -> Table:
    """Energy that signs keep, with these blocks and without, where they were fitted and later."""
    fitted, held_out = fit.fitted, fit.held_out
    rows = [
        (f"{fit.scales} scales, shared out", format_percent(fitted.kept), format_percent(held_out.kept)),
        ("a scale per tensor", format_percent(fitted.by_tensor), format_percent(held_out.by_tensor)),
        ("one scale", format_percent(fitted.by_model), format_percent(held_out.by_model)),
    ]
    first, held, last = fit.iterations
    columns = ("signs with", f"fitted, {first} to {held - 1}", f"held out, {held} to {last}")
    return Table("energy of the gradients that signs keep", columns, rows)
