"""Training: configuration, optimizers, the training loop, and resuming."""
