"""Record two emulated ranks, 16 steps for each line on standard input; close the trace at its end.

After each block the number of committed steps is printed. Whoever writes the lines decides how far the recording is.

Usage: recording_in_blocks.py FOLDER
"""

import sys

import numpy as np

from gradlab.capture import TraceWriter
from support.recorded import LAYERS

BLOCK, BUDGET = 16, 10_000_000
BLOCKS_PER_SEGMENT = 2


def main() -> None:
    segment_bytes = BLOCKS_PER_SEGMENT * BLOCK * 4 * sum(layer.numel for layer in LAYERS)
    metadata = {"budget": BUDGET, "max_steps": 10_000}
    generator = np.random.default_rng(0)
    step = 0
    with TraceWriter(sys.argv[1], LAYERS, 2, metadata=metadata, segment_bytes=segment_bytes) as writer:
        for _ in sys.stdin:
            for _ in range(BLOCK):
                for rank in range(2):
                    gradients = {layer.name: generator.standard_normal(layer.shape) for layer in LAYERS}
                    writer.append(rank, step, gradients, loss=1 / (1 + step), learning_rate=0.1)
                step += 1
            print(step, flush=True)


if __name__ == "__main__":
    main()
