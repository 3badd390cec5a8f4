"""Record several nodes' gradients from one process."""
