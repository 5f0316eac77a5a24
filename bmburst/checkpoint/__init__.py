"""Checkpoints: tensor files, files written by several ranks, Hugging Face directories, adapters, and training state."""
