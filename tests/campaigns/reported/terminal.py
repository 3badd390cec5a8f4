"""Reports of terminal."""
