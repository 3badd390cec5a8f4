"""Which compressor? One file per method."""
