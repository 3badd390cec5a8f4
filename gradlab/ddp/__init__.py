"""Facts of DistributedDataParallel and optimizers, and how all ranks agree."""
