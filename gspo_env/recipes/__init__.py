"""Recipes: named starting points."""
