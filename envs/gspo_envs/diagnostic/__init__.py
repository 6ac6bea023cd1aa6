"""Environments that show what an estimator does."""
