"""Print command x wall time x first line: the first hour of somebody who trains a GPT-2 with the Trainer and AdamW.

    PYTHONPATH=tests python tests/campaigns/first_hour.py TEXT [--work FOLDER] [--steps 120]

TEXT is any file of some 100 kB, read as bytes. A GPT-2 of random weights (4 layers, 128 wide) trains on two ranks with
gloo: recorded, checked, analysed, fitted in every way, evaluated, forecast, trained compressed, and continued from a
checkpoint, with the docs' commands. Peaks are the largest resident set of any process of a command. The exit
code is 1 if a command failed or wrote a traceback or a raw warning. With --work the files stay, and a folder's trace is
used again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LONGEST = 110  # characters of a first line that are shown
NOISE = ("Traceback (most recent call last)", "Warning: ", "UserWarning")
TORCH_OWN = ("reducer.cpp",)  # what torch says of find_unused_parameters, which the Trainer sets


def train(options: argparse.Namespace) -> None:
    """One rank of the user's script."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from gradlab.capture.transformers import RecordingCallback
    from gradlab.runtime.transformers import CompressionCallback

    set_seed(0)
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // 64 * 64].view(-1, 64)
    size = {"vocab_size": 256, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)),
        TrainingArguments(
            str(options.work / "run"),
            use_cpu=True,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_steps=options.steps // 2,
            logging_steps=options.steps // 4,
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    if options.compress is None:
        trainer.add_callback(RecordingCallback(options.work / "trace", trainer=trainer))
    else:
        trainer.add_callback(CompressionCallback(options.compress, trainer=trainer))
    trainer.train(resume_from_checkpoint=options.resume)


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """What is typed, by what it is called in the table."""
    work, steps = options.work, options.steps
    trace, warmup = str(work / "trace"), ["--warmup-steps", str(steps // 2)]
    names = ("powersgd", "gradiveq", "signs", "lgreco", "lgc")
    plans = {name: str(work / f"{name}.safetensors") for name in names}
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    ranks += [str(options.text), "--work", str(work), "--steps", str(steps), "--rank"]
    gradlab = [sys.executable, "-m", "gradlab"]
    powersgd = ["--codec", "powersgd", "--set", "rank=32", *warmup]
    fits = {
        "powersgd": ["uniform", trace, *powersgd],
        "gradiveq": ["gradiveq", trace, "--samples", str(steps // 2), *warmup],
        "signs": ["signs", trace],
        "lgreco": ["lgreco", trace, *powersgd],
        "lgc": ["lgc", trace, *warmup],
    }
    network = ["--nodes", "4,64,1024", "--bandwidth", "1gbit", "--compute-seconds", "0.36"]
    table = {
        "record": ranks,
        "trace info": [*gradlab, "trace", "info", trace],
        "trace check": [*gradlab, "trace", "check", trace],
        "analyze": [*gradlab, "analyze", trace, "--out", str(work / "report"), "--overwrite"],
        **{
            f"fit {words[0]}": [*gradlab, "fit", *words, "--out", plans[name], "--overwrite"]
            for name, words in fits.items()
        },
        "evaluate": [*gradlab, "evaluate", trace, *plans.values()],
        "predict": [*gradlab, "predict", plans["powersgd"], *network],
        "train": [*ranks, "--compress", plans["powersgd"]],
        "resume": [*ranks, "--compress", plans["powersgd"], "--resume", str(work / f"run/checkpoint-{steps // 2}")],
    }
    if (work / "trace" / "manifest.json").exists():
        del table["record"]
    return table


def run(name: str, command: list[str], log: Path) -> bool:
    """Run a command, print its row, and say whether it ended well."""
    inner = (
        "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", inner, *command],
        env=environment | os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begun
    log.write_text(done.stdout + "\n" + done.stderr, encoding="utf-8")
    *errors, peak = done.stderr.splitlines()
    first = next((line for line in [*done.stdout.splitlines(), *errors] if line.strip()), "")
    shown = first if len(first) <= LONGEST else first[: LONGEST - 1] + "…"
    print(f"{name:<12} | {seconds:7.1f} s | {int(peak) / 1e6:5.2f} GB | {shown}", flush=True)
    raw = [line for line in errors if any(sign in line for sign in NOISE) and not any(own in line for own in TORCH_OWN)]
    for line in raw if not done.returncode else [f"exit code {done.returncode}", *errors[-3:]]:
        print(f"    {line}", flush=True)
    return not done.returncode and not raw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, help="folder for all files; by default one that is removed")
    parser.add_argument("--steps", type=int, default=120, help="of each training; the first half is dense")
    for hidden in ("--compress", "--resume"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(options)
        return 0
    with tempfile.TemporaryDirectory() as name:
        options.work = (options.work or Path(name)).resolve()
        options.work.mkdir(parents=True, exist_ok=True)
        options.text = options.text.resolve()
        table = commands(options)
        ended = [run(what, table[what], options.work / f"{what.replace(' ', '-')}.log") for what in table]
    return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main())
