"""Batches: episodes and advantages in, packed rows out."""
