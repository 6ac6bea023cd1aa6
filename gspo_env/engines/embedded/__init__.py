"""Sampling with the learner's own weights."""
