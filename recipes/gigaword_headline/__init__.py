"""Headlines of English Gigaword and DUC 2004, task 1 (ALONE, Table 3)."""
