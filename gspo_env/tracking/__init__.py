"""Tracking: where metrics and episodes go."""
