"""Training with local steps: workers exchange what many optimizer steps add up to."""
