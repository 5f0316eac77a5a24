"""Checkpoints: tensor files, files written by several ranks, Hugging Face directories, and training state."""
