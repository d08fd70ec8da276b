"""Checks of command-line options, their ranges and paths."""
