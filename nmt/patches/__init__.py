"""Replacements of OpenNMT-py internals: the table, and the functions that it lists."""
