"""One codec each. Importing this package imports them all."""
