"""A sentence encoder of Hugging Face with a smaller vocabulary and a smaller table."""
