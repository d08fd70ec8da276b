"""Utilities shared by all commands: files, signals, command lines."""
