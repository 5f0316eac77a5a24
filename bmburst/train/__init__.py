"""Training: configuration, trainer, metrics, evaluation. Import the modules directly: some of them need no torch."""
