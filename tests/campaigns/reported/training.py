"""Reports of training."""
