"""Record the gradients of a training run.

recorder = TraceRecorder(ddp_model, "trace")      # attaches itself to DDP; recorder.close() or `with`
repair("trace")                                   # close a trace that a killed run left open
EmulatedNodes(model, "trace", world_size=64)      # N nodes played by one model in one process
TraceWriter("trace", layers, world_size=4)        # write a trace of gradients that come from elsewhere
"""

from gradlab.capture.emulated.nodes import EmulatedNodes
from gradlab.capture.recorder import TraceRecorder, capture_hook
from gradlab.capture.repair import RepairedRank, repair
from gradlab.capture.writing.async_writer import RecorderReport
from gradlab.capture.writing.trace_writer import TraceWriter

__all__ = [
    "EmulatedNodes",
    "RecorderReport",
    "RepairedRank",
    "TraceRecorder",
    "TraceWriter",
    "capture_hook",
    "repair",
]
