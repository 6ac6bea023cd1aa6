"""Threads, event loops and child processes; knows no environment."""
