"""The tests: one directory per package, small, fast, on a CPU."""
