"""Online: run a plan between ranks. Needs torch, and safetensors for artifacts.

Under DDP:

    with compress(ddp_model, "plan.safetensors", optimizer=optimizer) as state:
        ...  # the training loop

In two steps, `CompressionState.load("plan.safetensors", ddp_model, optimizer=optimizer)` and then
`ddp_model.register_comm_hook(state, compression_hook)`.

Between workers that take steps of their own: `OuterStep(plan, model, every=30).step()` after every optimizer step.

On gradients that you hand over yourself: `Exchange(plan, model.named_parameters(), group).step(gradients)`. One codec's
coroutine on a process group: `drive(coroutine, Communicator(group))`.
"""

from gradlab.runtime.attach import compress
from gradlab.runtime.engine.driver import drive
from gradlab.runtime.exchange import Exchange
from gradlab.runtime.fsdp.state import FSDPCompression, compress_fsdp
from gradlab.runtime.hook import compression_hook
from gradlab.runtime.loggers import log_scalars
from gradlab.runtime.network.communicator import Communicator
from gradlab.runtime.outer import OuterStep
from gradlab.runtime.scalar_log import ScalarLog
from gradlab.runtime.state import CompressionState

__all__ = [
    "Communicator",
    "CompressionState",
    "Exchange",
    "FSDPCompression",
    "OuterStep",
    "ScalarLog",
    "compress",
    "compress_fsdp",
    "compression_hook",
    "drive",
    "log_scalars",
]
