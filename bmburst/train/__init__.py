"""Training: configuration, trainer, metrics, checkpoints. Modules are imported one by one, for some need no torch."""
