"""What gradlab asks of DistributedDataParallel, of optimizers, and of all ranks together."""
