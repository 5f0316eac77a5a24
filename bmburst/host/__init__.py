"""The host runtime: runs unmodified BMTrain 1.0.1 on CPUs, with gloo instead of NCCL."""

from bmburst.host.patches import install, is_installed, silence_storage_warnings, wrap_communication

__all__ = ["install", "is_installed", "silence_storage_warnings", "wrap_communication"]
