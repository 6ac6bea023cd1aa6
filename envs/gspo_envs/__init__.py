"""Concrete environments, registered under `gspo/` by importing `gspo_env`."""
