"""Small Python values between ranks, over any communicator."""

import json
from typing import Any

import torch

from bmburst.comm.protocol import Communicator

_BYTES = 1024


def gather_objects(comm: Communicator, value: Any) -> list[Any]:
    """Return every rank's value in rank order; also a barrier. Blocks the host.

    Args:
        comm: The group; every rank must call.
        value: Anything that JSON holds, in less than 1 KB.
    """
    data = json.dumps(value).encode()
    if len(data) > _BYTES:
        raise ValueError(f"{len(data)} bytes are too many for one object, at most {_BYTES}")
    device = torch.device("cuda", torch.cuda.current_device()) if comm.transport == "nccl" else torch.device("cpu")
    mine = torch.frombuffer(bytearray(data.ljust(_BYTES)), dtype=torch.uint8).to(device)
    (gathered,) = comm.all_gather(mine).wait()
    return [json.loads(bytes(row)) for row in gathered.tolist()]
