"""Recipes: one directory per task, with its scripts, settings and results."""
