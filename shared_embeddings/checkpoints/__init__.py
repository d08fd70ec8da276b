"""Compressing and trimming trained models, for every host that has an adapter."""
