"""Record the gradients of a training run.

recorder = TraceRecorder(ddp_model, "trace")      # attaches itself to DDP; recorder.close() or `with`
repair("trace")                                   # close a trace that a killed run left open
TraceWriter("trace", layers, world_size=4)        # write a trace of emulated ranks from one process
"""

from gradlab.capture.async_writer import RecorderReport
from gradlab.capture.recorder import TraceRecorder, capture_hook
from gradlab.capture.repair import RepairedRank, repair
from gradlab.capture.trace_writer import TraceWriter

__all__ = ["RecorderReport", "RepairedRank", "TraceRecorder", "TraceWriter", "capture_hook", "repair"]
