"""Files, signals, command lines: what all commands share."""
