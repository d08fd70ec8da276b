"""The formats of trained models that the library opens itself; `lm` and `nmt` bring their own."""
