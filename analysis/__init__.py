"""Measure recorded gradients, fit codecs to them, replay plans over them, and report."""
