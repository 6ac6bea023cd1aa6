"""Environments made of rows of data."""
