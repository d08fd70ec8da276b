"""Tests of the library; ``cases.py`` is the table that the contract is checked against."""
