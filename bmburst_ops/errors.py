"""Refusals of single-device operations."""


class KernelError(ValueError):
    """A kernel was asked for by name and cannot run on these inputs or this machine; the message says why."""
