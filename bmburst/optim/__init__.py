"""AdamW on BMTrain's ZeRO shards, with its state on the GPU or in host memory."""

from bmburst.optim.adamw import AdamW, build_optimizer, state_names

__all__ = ["AdamW", "build_optimizer", "state_names"]
