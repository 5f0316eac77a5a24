"""Training: configuration, trainer, metrics, checkpoints. Import the modules directly: some of them need no torch."""
