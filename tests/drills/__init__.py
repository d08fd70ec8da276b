"""Drills: processes that are killed, stopped and starved of disk, run by hand (``make drill``)."""
