"""Compressing and trimming trained models of any host: read once, fit and measure in memory, write once."""
