"""Checks that users and `gspo-env doctor` run."""
