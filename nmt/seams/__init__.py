"""What `nmt.upstream` puts in place of parts of OpenNMT-py, by what it is about."""
