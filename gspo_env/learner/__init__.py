"""The learner: packed rows in, an optimiser step out."""
