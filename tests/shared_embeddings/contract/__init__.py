"""The contract of the interface, for every row of ``cases.py``: each method in each of its modes."""
