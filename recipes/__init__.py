"""Recipes: one directory per task, with what is needed to run it and the results that it gave."""
