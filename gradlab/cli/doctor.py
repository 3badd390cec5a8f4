"""Measure what connects your ranks, before there is a model: bandwidth, latency, slow ranks, and what to expect.

Start it as your training is started, with as many ranks on each node: under torchrun, srun or mpirun. It takes less
than a minute, needs no recording, and prints once, on the first rank.

A step is forecast for a transformer of each number of parameters that --parameters names. --compute-seconds is the time
of its step without any exchange; without it, the forecast is of the exchange alone. With --out the links are written
to a file that other commands take in place of a speed: --bandwidth link.json. It holds the speed of codecs on these
processors or GPUs, too. In a training script `with gradlab.doctor(model):` around some 20 steps tells the same of
these.

Examples:

  torchrun --nproc-per-node 4 -m gradlab doctor

  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST -m gradlab doctor --out link.json

  srun --ntasks-per-node 8 python -m gradlab doctor --parameters 124M,1.3B --compute-seconds 0.3s
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from gradlab.analysis.forecast.diagnosis import Waiting, cores_of, network_of, sentences, step_texts, waiting, written
from gradlab.analysis.forecast.link import parse_seconds
from gradlab.analysis.forecast.processors import Processor, timed
from gradlab.analysis.outputs import require_free
from gradlab.cli import options
from gradlab.cli.console import Answer, Table, print_json, say
from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.formatting import format_seconds
from gradlab.jsonable import plain

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_FROM = {
    "RANK": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


def doctor(
    parameters: Annotated[
        str, typer.Option(metavar="P,...", help="Numbers of parameters, with commas: 124M,1.3B.")
    ] = "25M,124M,1.3B",
    compute_seconds: Annotated[str | None, typer.Option(help="A step's computing, without any exchange: 0.3s.")] = None,
    seconds: Annotated[str, typer.Option(help="Time for the measurements, about.")] = "20s",
    backend: Annotated[
        str | None, typer.Option(help="Backend of the process group. [default: nccl with a GPU, else gloo]")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="LINK.json", help="File for what was measured.")] = None,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
) -> None:

    counts = [_count_of(word) for word in parameters.split(",")]
    computing = None if compute_seconds is None else parse_seconds(compute_seconds)
    most = parse_seconds(seconds)
    _take_names_of_launchers()
    if out is not None and os.environ.get("RANK") == "0":
        require_free(out, overwrite)
    found, processor = _measured(backend, most)
    if os.environ["RANK"] != "0":
        return
    links, nodes, node = network_of(found)
    first = next(iter(links.values()))
    say(f"measured; forecasting a step of {parameters} parameters")
    cores = cores_of(found)
    steps = [waiting(one, computing, first, nodes, node, cores=cores, processor=processor) for one in counts]
    answer = written(found, links, steps, processor=processor)
    if out is not None:
        write_whole(out, json.dumps(plain(answer), indent=1).encode())
    if as_json:
        print_json(answer)
        return
    Answer(
        sentences(found, links, step_texts(steps)), tables=[_of_steps(steps)], notes=[] if out is None else [str(out)]
    ).print()


def _count_of(text: str) -> int:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)\s*([kmb]?)", text.strip().lower())
    count = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 1000 <= count <= 10**10:
        raise GradlabError(f"--parameters {text[:80]}: expected numbers from 1k to 10B, such as 124M,1.3B")
    return count


def _take_names_of_launchers() -> None:
    """Set torch's names of a rank's place from those that Slurm and Open MPI set."""
    for name, others in _FROM.items():
        for other in others:
            if other in os.environ:
                os.environ.setdefault(name, os.environ[other])
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise GradlabError(
            f"gradlab doctor measures between ranks, and {', '.join(missing)} is not set: start it by "
            "torchrun --nproc-per-node 2 -m gradlab doctor, on every node"
        )
    os.environ.setdefault("MASTER_PORT", "29500")


def _measured(backend: str | None, seconds: float) -> tuple[dict[str, Any], Processor]:
    import torch
    import torch.distributed as dist

    from gradlab.runtime.doctor import measure

    on_gpu = torch.cuda.is_available() and backend != "gloo"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend or ("nccl" if on_gpu else "gloo"))
    try:
        found = measure(device, seconds).to_json()
        return found, timed(device)  # while the other ranks do so, as in training
    finally:
        dist.destroy_process_group()


def _of_steps(steps: list[Waiting]) -> Table:
    columns = ["plan", *(f"{one.parameters / 1e6:,.4g}M" for one in steps)]
    rows = [[name, *(format_seconds(one.seconds[name], 2) for one in steps)] for name in steps[0].seconds]
    return Table("a step, by parameters of the model", columns, rows)
