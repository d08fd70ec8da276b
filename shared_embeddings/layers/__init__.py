"""Building blocks of the methods."""
