"""Conversations with a simulated user who wants something of a database."""
