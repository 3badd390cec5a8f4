"""LGC's autoencoder, fitted to a trace, and what it has to beat."""
