"""What gradlab reads off DistributedDataParallel and optimizers, and how all ranks agree."""
