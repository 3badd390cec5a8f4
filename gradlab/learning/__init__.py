"""Fits of learned codecs: axes of slices, autoencoders, selections."""
