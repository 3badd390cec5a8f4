"""`gradlab inspect`: what an artifact holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlab.cli.console import OUT, print_json, print_table


def inspect(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A .safetensors file made by gradlab fit.")],
    ranks: Annotated[int, typer.Option(min=1, help="World size for the forecast of bytes.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what an artifact does to which layer, where it came from, and the bytes it will send.

    Example:

      gradlab inspect plan.safetensors
    """
    from gradlab.analysis.replay import methods_of
    from gradlab.artifact import Artifact
    from gradlab.collectives import ring_sends
    from gradlab.formatting import format_bytes
    from gradlab.plan import most_ranks, pays_up_to, saving_of_sent, sent_bytes
    from gradlab.saving import Saving

    loaded = Artifact.load(artifact)
    plan = loaded.plan
    payload, dense = plan.payload_bytes(ranks), plan.payload_bytes(ranks, compressing=False)
    sent, saving = sent_bytes(plan, ranks), saving_of_sent(plan, ranks)
    if as_json:
        sizes = {
            "payload_bytes": payload,
            "dense_payload_bytes": dense,
            "sent_bytes": sent,
            "dense_sent_bytes": ring_sends(ranks) * dense,
            "most_ranks": most_ranks(plan),
            **saving.to_json(),
            "world_size": ranks,
            "estimated": plan.varying,
        }
        print_json({"digest": plan.digest, "plan": plan.to_json(), "origin": loaded.provenance, "expected": sizes})
        return

    def row(name: str, method: str, before: float, payload: float, sent: float) -> tuple[str, ...]:
        saved = Saving.of_sent(sent, before, ranks)
        return (name, method, *map(format_bytes, (before, payload, sent)), *saved.cells)

    rows = []
    for group in plan.groups:
        before = 4 * sum(layer.numel for layer in plan.members(group))
        payload, sends = plan.group_payload_bytes(group, ranks), plan.group_sent_bytes(group, ranks)
        rows.append(row(group.name, methods_of([group])[0], before, payload, sends))
    rows += [
        row(layer.name, "dense", 4 * layer.numel, 4 * layer.numel, ring_sends(ranks) * 4 * layer.numel)
        for layer in plan.dense_layers
        if not any(layer.name in group.layers for group in plan.groups)
    ]
    columns = ("group", "method", "dense", "payload", "wire", "ratio", "vs 16 bits")
    print_table(f"{artifact} ({plan.digest[:12]})", columns, rows, left=2)
    OUT.print(
        f"sent per step and rank at {ranks} ranks: {format_bytes(sent)} instead of "
        f"{format_bytes(ring_sends(ranks) * dense)}, {saving.text('fewer')}, after {plan.schedule.warmup_steps} dense "
        f"steps; made by {loaded.provenance.get('method', 'hand')}",
        markup=False,
    )
    if limit := pays_up_to(plan):
        OUT.print(f"this plan {limit}", markup=False)
    if plan.varying:
        OUT.print(
            f"messages of {', '.join(plan.varying)} vary in size with the gradients: their bytes are an estimate, "
            "which `gradlab evaluate` replaces by a count",
            markup=False,
        )
