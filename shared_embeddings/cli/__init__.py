"""The command ``shared-embeddings``, one module per subcommand."""
