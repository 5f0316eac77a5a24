"""Communication between ranks: one interface over bmtrain.nccl, torch.distributed, and threads for tests."""

from bmburst.comm.protocol import Communicator, Transfer

__all__ = ["Communicator", "Transfer"]
