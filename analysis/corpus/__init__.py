"""A corpus: small recordings, and what became of methods on them, by which a new method is judged in minutes."""
