"""Concrete agents."""
