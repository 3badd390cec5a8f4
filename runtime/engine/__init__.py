"""The worker thread that runs a plan's codecs while DDP goes backward."""
