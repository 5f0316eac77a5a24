"""Communication between ranks: one interface over bmtrain.nccl, torch.distributed, copy engines, and test threads."""

from bmburst.comm.protocol import Communicator, Transfer

__all__ = ["Communicator", "Transfer"]
