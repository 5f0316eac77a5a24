"""Ranks that exchange tensors: one small protocol over bmt.nccl, torch.distributed, and threads for tests."""

from bmburst.comm.protocol import Communicator, Transfer

__all__ = ["Communicator", "Transfer"]
