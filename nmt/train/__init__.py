"""Training: one process or several, stopping and resuming, distillation."""
