"""Models: packed rows in, log-probabilities out."""
