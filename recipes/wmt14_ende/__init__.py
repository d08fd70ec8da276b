"""Scripts, data and published rows of this task; the code is in `recipes.published`."""
