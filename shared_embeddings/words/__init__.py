"""Words and their data: counts, classes and vectors."""
