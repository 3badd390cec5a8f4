"""Training with local steps: workers exchange what many optimizer steps add up to."""

from gradlab.runtime.outer.step import OuterStep

__all__ = ["OuterStep"]
