"""Environments in text."""
