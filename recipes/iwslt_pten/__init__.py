"""Scripts, data and rows of this task; the code is in `recipes.translation`."""
