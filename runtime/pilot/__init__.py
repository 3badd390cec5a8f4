"""Try plans on the training itself: some steps from one snapshot, on the same batches, beside plain DDP."""

from gradlab.runtime.pilot.pilot import Pilot
from gradlab.runtime.pilot.result import Outcome, PilotResult

__all__ = ["Outcome", "Pilot", "PilotResult"]
