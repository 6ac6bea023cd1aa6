"""Environments with tools."""
