"""Python values between ranks, over any communicator."""

import json
import pickle
from typing import Any

import torch

from bmburst.comm.protocol import Communicator
from bmburst.errors import UserError

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
    mine = torch.frombuffer(bytearray(data.ljust(_BYTES)), dtype=torch.uint8).to(device_of(comm))
    (gathered,) = comm.all_gather(mine).wait()
    return [json.loads(bytes(row)) for row in gathered.tolist()]


def broadcast_object(comm: Communicator, value: Any) -> Any:
    """Return rank 0's value on every rank of the group. Blocks the host.

    It travels as integers that are added to zeros, which every transport can do. Ranks of a group are one program and
    trust each other: the value is pickled.

    Args:
        comm: The group; every rank must call.
        value: On rank 0 anything that pickle holds; that of the others is not looked at.

    Raises:
        UserError: On every rank: pickle does not hold rank 0's.
    """
    if comm.size == 1:
        return value
    data = _pickled(value) if comm.rank == 0 else b""
    (size,) = comm.all_reduce(torch.tensor([len(data)], device=device_of(comm))).wait()
    nbytes = int(size.item())
    mine = torch.frombuffer(bytearray(data.ljust(-(-nbytes // 8) * 8, b"\0")), dtype=torch.int64).to(device_of(comm))
    (sent,) = comm.all_reduce(mine).wait()
    problem, found = pickle.loads(sent.cpu().numpy().tobytes()[:nbytes])
    if problem is not None:
        raise UserError(problem)
    return found


def _pickled(value: Any) -> bytes:
    """Return None and the value, or why it cannot be sent and None: the others wait, and must be told."""
    try:
        return pickle.dumps((None, value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # as the value's own types have it
        reason = " ".join(str(error).split())
        return pickle.dumps((f"rank 0's {type(value).__name__} cannot be sent: {reason}\nfix: arrays by name", None))


def device_of(comm: Communicator) -> torch.device:
    """Return where the tensors are that a group moves: on this rank's current GPU, or on CPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if comm.transport == "nccl" else torch.device("cpu")
