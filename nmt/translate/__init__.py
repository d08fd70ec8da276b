"""Translation, its server, and quality measurements."""
