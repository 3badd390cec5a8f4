"""What an author of a codec calls: bits in bytes, positions, random bits."""
