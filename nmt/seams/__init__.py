"""What `nmt.upstream` puts in place of parts of OpenNMT-py, by what it is about.

Public functions take what OpenNMT has, and return what goes there instead.
"""
