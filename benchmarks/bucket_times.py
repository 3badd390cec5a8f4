"""What a byte costs in each of DDP's buckets, measured: L-GreCo's section 5.5 and Fig. 11b.

    torchrun --nproc-per-node 4 benchmarks/bucket_times.py [--samples 60] [--steps 6] [--out times.json]

A transformer of the datasets' kind trains on random tokens while its plan is set anew, at random, sample by sample
(every rank draws the same settings, so that nothing has to be told). Of each sample the median time from the first
bucket's arrival to the last result is kept, with the bytes that each bucket sent; half of the samples fit the
regression, the others score it. Run it on the link that is meant: on one machine's memory a byte costs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gradlab.analysis.layer_plan.bucket_time import fit_bucket_times
from gradlab.datasets.transformer import TransformerSize, initialized
from gradlab.plan import Plan
from gradlab.runtime import CompressionState, compression_hook

SIZE = TransformerSize(vocabulary=8192, context=64, width=256, layers=6)
RANKS = (1, 2, 4, 8, 16, 32, 64)


def redrawn(plan: Plan, generator: np.random.Generator) -> Plan:
    """Every group with a rank of its own, drawn."""
    groups = [replace(g, settings={**g.settings, "rank": int(generator.choice(RANKS))}) for g in plan.groups]
    return replace(plan, groups=tuple(groups))


def measure(samples: int, steps: int, batch: int, bucket_cap_mb: float) -> tuple[np.ndarray, np.ndarray]:
    """Bytes by bucket (samples, buckets) and seconds (samples,), as this rank saw them."""
    model = DistributedDataParallel(initialized(SIZE, 0), bucket_cap_mb=bucket_cap_mb)
    plan = Plan.uniform(model, "powersgd", rank=4, minimum_ratio=1e-9)
    draws, tokens = np.random.default_rng(0), torch.Generator().manual_seed(dist.get_rank())
    sizes, seconds = [], []
    with CompressionState(plan, model, measure_every=1) as state:
        model.register_comm_hook(state, compression_hook)
        for _ in range(samples):
            state.run.adopt(redrawn(plan, draws))
            for _ in range(steps):
                x = torch.randint(SIZE.vocabulary, (batch, SIZE.context), generator=tokens)
                model.zero_grad()
                functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            records = list(state.statistics.steps)[1 - steps :]  # the first meets cold factors
            seconds.append(statistics.median(record.synchronise_seconds for record in records))
            sent = records[-1].bucket_payload_bytes
            sizes.append([sent.get(bucket, 0) for bucket in range(max(sent) + 1)])
    return np.array(sizes[1:], dtype=float), np.array(seconds[1:])  # buckets are rebuilt after the first iteration


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--bucket-cap-mb", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes, seconds = measure(chosen.samples, chosen.steps, chosen.batch, chosen.bucket_cap_mb)
    if dist.get_rank() == 0:
        half = len(sizes) // 2
        fit = fit_bucket_times(sizes[:half], seconds[:half], positive=False)
        predicted = fit.intercept + sizes[half:] @ fit.coefficients
        left = float(((seconds[half:] - predicted) ** 2).sum() / ((seconds[half:] - seconds[half:].mean()) ** 2).sum())
        print(f"{len(sizes)} samples, {sizes.shape[1]} buckets; seconds {seconds.min():.3f} to {seconds.max():.3f}")
        print("bytes per bucket, mean:", " ".join(f"{value:.0f}" for value in sizes.mean(0)))
        print("seconds per byte:", " ".join(f"{value:.2e}" for value in fit.coefficients))
        print(f"intercept {fit.intercept:.3f} s; R^2 where fitted {fit.score:.3f}, on other samples {1 - left:.3f}")
        if chosen.out:
            chosen.out.write_text(json.dumps({"sizes": sizes.tolist(), "seconds": seconds.tolist()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
