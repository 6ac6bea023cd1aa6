"""Rollouts: tasks in, groups of episodes out."""
