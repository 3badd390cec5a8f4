"""A trial: one run of a user's training command under one plan, which `gradlab pilot` starts and reads."""

from gradlab.trial.losses import Losses, LossFile, read_losses
from gradlab.trial.process import Trial, trial
from gradlab.trial.settings import VARIABLE, TrialSettings

__all__ = ["VARIABLE", "LossFile", "Losses", "Trial", "TrialSettings", "read_losses", "trial"]
