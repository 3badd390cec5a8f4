"""Reports of frameworks."""
