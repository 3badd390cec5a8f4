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

from typing import TYPE_CHECKING

from gradlab.lazy import lazy_names

if TYPE_CHECKING:
    from gradlab.runtime.attach import compress, compression_hook
    from gradlab.runtime.engine.driver import drive
    from gradlab.runtime.exchange import Exchange
    from gradlab.runtime.fsdp.state import FSDPCompression, compress_fsdp
    from gradlab.runtime.loggers import ScalarLog, log_scalars
    from gradlab.runtime.network.communicator import Communicator
    from gradlab.runtime.outer.step import OuterStep
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Communicator": "gradlab.runtime.network.communicator",
        "CompressionState": "gradlab.runtime.state",
        "Exchange": "gradlab.runtime.exchange",
        "FSDPCompression": "gradlab.runtime.fsdp.state",
        "OuterStep": "gradlab.runtime.outer.step",
        "ScalarLog": "gradlab.runtime.loggers",
        "compress": "gradlab.runtime.attach",
        "compress_fsdp": "gradlab.runtime.fsdp.state",
        "compression_hook": "gradlab.runtime.attach",
        "drive": "gradlab.runtime.engine.driver",
        "log_scalars": "gradlab.runtime.loggers",
    },
)
