"""Encoding and decoding beside a plain copy of the same tensor, one thread, one run.

    python benchmarks/codec_speed.py [--numel 2359296] [--repeats 15] [--codecs sign qsgd topk]

Copy, encoding and decoding take turns, so that whatever else the machine does meets all of them; a ratio is that of the
medians, with the quartiles of the turns' own ratios. "decode and add" is what a server does with each rank's payload.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gradlab import codecs
from gradlab.codec import Compressor
from gradlab.codec_settings import build_settings

CASES: dict[str, list[dict[str, Any]]] = {
    "sign": [{}, {"block_size": 4096}, {"block_size": 256}, {"scale": "one"}],
    "qsgd": [{"bits": 4}],
    "topk": [{"density": 0.01}],
}


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(name: str, settings: dict[str, Any], numel: int, repeats: int) -> list[str]:
    """Lines of the table for one codec."""
    method = codecs.get(name)
    codec = method(build_settings(method, settings))
    assert isinstance(codec, Compressor)
    codec = codec.for_layers([numel])
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    target, total, draws = torch.empty_like(vector), torch.zeros_like(vector), torch.Generator().manual_seed(1)
    payload = codec.compress(vector, draws)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(vector),
        "encode": lambda: codec.compress(vector, draws),
        "decode": lambda: codec.decompress_into(target, payload),
        "decode and add": lambda: codec.add_decompressed(total, payload, 0.25),
    }
    times: dict[str, list[float]] = {key: [] for key in works}
    for turn in range(repeats + 2):
        for key, work in works.items():
            took = seconds(work)
            if turn > 1:  # the first turns warm up
                times[key].append(took)
    copy = statistics.median(times["copy"])
    title = name + "".join(f", {key} {value}" for key, value in settings.items())
    lines = []
    for key in list(works)[1:]:
        ratios = [a / b for a, b in zip(times[key], times["copy"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(times[key])
        gigabytes = vector.nbytes / median / 1e9
        lines.append(
            f"{title:24s} {key:15s} {median * 1e3:8.2f} ms  {median / copy:6.2f} copies ({low:.2f} to {high:.2f})  "
            f"{copy / median:5.2f} of its speed  {gigabytes:5.2f} GB/s"
        )
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=2_359_296)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--codecs", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.codecs:
        for settings in CASES[name]:
            print("\n".join(compare(name, settings, options.numel, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
