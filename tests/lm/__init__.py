"""Tests of the language-model host."""
