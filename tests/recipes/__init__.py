"""Tests of the recipes."""
