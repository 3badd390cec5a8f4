"""Codecs that have kernels, by name and settings."""

from __future__ import annotations

from typing import Any

from gradlab.codecs.block_scaled import FORMATS

_SCALED: list[dict[str, Any]] = [
    *({"dtype": dtype, "stochastic": at_random} for dtype in FORMATS for at_random in (False, True)),
    *({"dtype": dtype, "scale": 100.0} for dtype in ("int8", "int4", "float8_e4m3fn")),
]
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("block_scaled", settings) for settings in _SCALED),
    *(("sign", settings) for settings in ({}, {"scale": "one"}, {"block_size": 256})),
    ("one_bit", {}),
    *(("qsgd", {"bits": bits}) for bits in (1, 3, 4, 7, 8)),
    *(("qsgd", {"norm": "l2", "bucket_size": size}) for size in (512, 100)),
    *(("nuqsgd", {"bits": bits, "norm": norm}) for bits, norm in ((2, "max"), (4, "l2"), (6, "max"))),
    *(("terngrad", {"clip": clip}) for clip in (0.0, 2.5)),
    ("natural", {}),
]
SELECTIONS: list[tuple[str, dict[str, Any]]] = [
    ("chunk_topk", {"chunk": 300, "count": 7}),
    ("chunk_topk", {"chunk": 537, "count": 11, "bits": 4}),
    ("chunk_topk", {"chunk": 700, "count": 700, "bits": None}),
    ("topk", {}),
    ("topk", {"index_coding": "raw"}),
    ("topk", {"index_coding": "bitmap"}),
    ("topk", {"across_layers": False}),
    ("topk", {"across_layers": False, "density": 0.4}),  # bit maps of most
    ("threshold", {"threshold": 60.0}),
    ("sampled_threshold", {"density": 0.015}),
    ("threshold", {"threshold": 30.0}),
    ("sampled_threshold", {"density": 0.1}),
]
# Coefficients of chunks.
TRANSFORMED: list[tuple[str, dict[str, Any]]] = [
    ("dct_topk", {"chunk": 8, "count": 5}),
    ("dct_topk", {"chunk": 12, "count": 70, "average": "senders"}),
    ("dct_topk", {"chunk": 64, "count": 32}),
]
# Codecs whose sums, or values at one rank's positions, travel.
SUMMED: list[tuple[str, dict[str, Any]]] = [
    ("cast", {"dtype": "bfloat16", "stochastic": True}),
    *(("intsgd", {"bits": 8, "random": at_random}) for at_random in (True, False)),
    ("intsgd", {"bits": 32, "scale": "running"}),
    ("clt_k", {"density": 0.03}),
    ("clt_k", {"density": 0.3}),  # bit maps
    ("clt_k", {"density": 0.03, "across_layers": False, "values": "int8"}),
    ("clt_k", {"density": 0.03, "selection": "chunks", "index_coding": "raw"}),
    ("random_k", {"density": 0.03, "unbiased": True}),
    *(("terngrad", {"shared_scale": True, "clip": clip}) for clip in (0.0, 2.5)),
]
