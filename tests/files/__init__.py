"""Files that commands read and write: none is lost, and no command waits for one forever."""
