"""Record the gradients of several emulated ranks (nodes) from one process."""
