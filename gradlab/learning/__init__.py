"""What learned codecs fit: axes of slices, autoencoders, selections."""
