"""Bits that an iteration of SGD and of signs takes: Table 1 of dist-EF-blockSGD by its formula, and counted.

    python benchmarks/sign_bits.py [--workers 4]

For ResNet-20 on CIFAR-10, whose layers are the blocks. Bits are pushed and pulled, of all workers together.
"""

from __future__ import annotations

import argparse

from gradlab.analysis.measure.sign_blocks import bits_per_iteration, counted_bits
from gradlab.datasets import get


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    workers = parser.parse_args().workers
    tensors = [value.detach().reshape(-1).numpy() for value in get("cifar10").model(0).parameters()]
    parameters = sum(tensor.size for tensor in tensors)
    counted = counted_bits(tensors, workers)
    dense = next(iter(counted.values()))
    print(f"{'method':28s} {'by Table 1':>12s} {'counted':>12s} {'ratio':>6s} {'vs 16 bits':>10s}")
    for method, bits in bits_per_iteration(parameters, len(tensors), workers).items():
        ratio = dense / counted[method]
        print(f"{method:28s} {bits:12,d} {counted[method]:12,d} {ratio:6.1f} {ratio / 2:10.1f}")


if __name__ == "__main__":
    main()
