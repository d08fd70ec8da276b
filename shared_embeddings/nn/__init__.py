"""Parts of methods and models: dropout, activations, tensors without values."""
