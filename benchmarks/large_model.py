"""Wall time and peak memory of recording and analysing a model of 124 million parameters within a budget of bytes.

Usage: nice python benchmarks/large_model.py FOLDER [--budget 2GB] [--steps 8] [--layers 12] [--width 768]

A GPT-2 of random weights (transformers; no download) trains with AdamW on random tokens, on 2 ranks with gloo, batch 1,
and is recorded within the budget. Then `gradlab analyze` and `gradlab fit lgreco` read the trace. Every command runs in
processes of its own; peak memory is the largest resident set of any one of them, as the kernel counted it. The result
is printed as a table and written to FOLDER/large_model.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Run the commands one after another; print and write the table."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    trace = options.folder / "trace"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    sizes = [f"--{name}={getattr(options, name)}" for name in ("budget", "steps", "layers", "width", "context")]
    train = [*ranks, str(options.folder), *sizes, "--rank"]
    gradlab, plan = ["-m", "gradlab"], str(options.folder / "lgreco.safetensors")
    fit = ["fit", "lgreco", str(trace), "--codec", "powersgd", "--set", "rank=4", "--out", plan]
    commands = {
        "train, plain": [*train, "--plain"],
        "train, recorded": train,
        "trace info": [*gradlab, "trace", "info", str(trace)],
        "trace check": [*gradlab, "trace", "check", str(trace)],
        "fit lgreco": [*gradlab, *fit],
        "evaluate": [*gradlab, "evaluate", str(trace), plan],
        "analyze": [*gradlab, "analyze", str(trace), "--out", str(options.folder / "report")],
    }
    rows = []
    for name, command in commands.items():
        row = {"command": name} | _measured([sys.executable, *command])
        rows.append(row)
        size = row["peak_bytes"] / 1e9
        print(f"\n{name}: {row['seconds']:.1f} s, peak {size:.2f} GB, exit {row['exit']}", flush=True)
        print("\n".join(f"  {line}" for line in row["output"][: options.lines]), flush=True)
    size = sum(file.stat().st_size for file in trace.rglob("*") if file.is_file())
    print(f"\n{'command':18} {'seconds':>8} {'peak GB':>8}")
    for row in rows:
        print(f"{row['command']:18} {row['seconds']:8.1f} {row['peak_bytes'] / 1e9:8.2f}")
    print(f"trace: {size} bytes on disk, budget {options.budget}")
    (options.folder / "large_model.json").write_text(json.dumps({"trace_bytes": size, "commands": rows}, indent=1))


def _measured(command: list[str]) -> dict[str, object]:
    """Run a command; seconds, the largest resident set of any of its processes in bytes, exit code, lines printed."""
    begun = time.perf_counter()
    # A process of its own reports its children's maximum: that of this one would keep the largest of all commands.
    run = (
        "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
        "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "COLUMNS": "140"} | os.environ
    done = subprocess.run(
        [sys.executable, "-c", run, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    *lines, peak = [line for line in done.stdout.splitlines() if line.strip()]
    return {
        "seconds": time.perf_counter() - begun,
        "peak_bytes": 1024 * int(peak.removeprefix("peak ")),
        "exit": done.returncode,
        "output": lines,
    }


def _train(options: argparse.Namespace) -> None:
    """One rank."""
    import contextlib

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import GPT2Config, GPT2LMHeadModel

    from gradlab.capture import TraceRecorder

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=options.width // 64)
    model = DistributedDataParallel(GPT2LMHeadModel(config), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with contextlib.ExitStack() as exits:
        recorder = None
        if not options.plain:
            settings = {"budget": options.budget, "expected_steps": options.steps}
            recorder = TraceRecorder(model, options.folder / "trace", optimizer=optimizer, **settings)
            exits.enter_context(recorder)
        for _ in range(options.steps):
            tokens = torch.randint(config.vocab_size, (1, options.context), generator=generator)
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            if recorder is not None:
                recorder.annotate(loss=loss.detach())
            optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count} parameters, {options.steps} steps, loss {float(loss.detach()):.3f}, rank 0: {peak:.2f} GB")
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", default="2GB")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lines", type=int, default=12, help="of each command's output that are shown")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = _options()
    _train(given) if given.rank else main()
