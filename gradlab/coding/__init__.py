"""Functions for authors of codecs: bits in bytes, positions, random bits."""
