"""Online: load a plan into a DDP communication hook and train compressed. Needs torch and safetensors only.

state = CompressionState.load("plan.safetensors", ddp_model, optimizer=optimizer)
ddp_model.register_comm_hook(state, compression_hook)
"""

from gradlab.runtime.hook import compression_hook
from gradlab.runtime.state import CompressionState

__all__ = ["CompressionState", "compression_hook"]
