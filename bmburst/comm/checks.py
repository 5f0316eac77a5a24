"""A mismatch between ranks is an error on all of them, not a hang."""

import torch
from torch import Tensor

from bmburst.comm.protocol import Communicator, Transfer
from bmburst.errors import UserError

_SIGNATURE_BYTES = 512


class Mismatch(UserError):
    """The ranks of a group disagree on what they are about to exchange or compute."""


def describe(*tensors: Tensor) -> str:
    """Return shapes and dtypes as a short text: `float32[2, 8], int64[4]`."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def agree(comm: Communicator, what: str, signature: str, *, device: torch.device, problem: str | None = None) -> None:
    """Check on every rank that all of them are about to do the same thing.

    One all-gather of 512 bytes; it blocks the host.

    Args:
        comm: The group.
        what: The name of the operation, first word of the message.
        signature: What must be equal on every rank.
        device: Where tensors must be for this group.
        problem: A problem this rank found in its own input; every rank then raises it.

    Raises:
        Mismatch: The signatures differ. The message names the first two ranks that differ.
        UserError: Some rank has a problem: the first rank's, on every rank.
    """
    text = f"!{problem}" if problem else f"={signature}"
    encoded = text.encode()[:_SIGNATURE_BYTES].ljust(_SIGNATURE_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    (gathered,) = comm.all_gather(mine).wait()
    rows = gathered.reshape(comm.size, -1).tolist()
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
    problems = [text[1:] for text in texts if text.startswith("!")]
    if problem or problems:
        raise UserError(problem or problems[0])
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise Mismatch(f"{what}: the ranks of the group disagree\nrank 0: {texts[0][1:]}\nrank {rank}: {other[1:]}")


class Checked:
    """A communicator that compares operation, shapes and dtypes over the ranks before every call.

    Satisfies `Communicator`. CPU transports are always wrapped in it; GPU ones in the trainer's first step and where
    the user asks for it.
    """

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        self._inner = inner
        self.device = device
        self.rank, self.size, self.transport = inner.rank, inner.size, inner.transport
        self.active = True
        """Whether calls are compared. Set it on every rank at the same point of the program."""

    def agree(self, what: str, signature: str, problem: str | None = None) -> None:
        """Compare over the ranks, or only raise this rank's `problem` when not active. See `agree`."""
        if self.active and self.size > 1:
            agree(self._inner, what, signature, device=self.device, problem=problem)
        elif problem:
            raise UserError(problem)

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        self.agree("ring", f"ring shift={shift} {describe(*tensors)}")
        return self._inner.ring(*tensors, shift=shift)

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`."""
        self.agree("all_to_all", f"all_to_all {describe(tensor)}", self._rows_problem("all_to_all", tensor))
        return self._inner.all_to_all(tensor)

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        self.agree("all_gather", f"all_gather {describe(tensor)}")
        return self._inner.all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        self.agree("reduce_scatter", f"reduce_scatter {describe(tensor)}", self._rows_problem("reduce_scatter", tensor))
        return self._inner.reduce_scatter(tensor)

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        self.agree("all_reduce", f"all_reduce {describe(tensor)}")
        return self._inner.all_reduce(tensor)

    def _rows_problem(self, what: str, tensor: Tensor) -> str | None:
        if tensor.dim() and tensor.shape[0] == self.size:
            return None
        return f"{what}: dimension 0 must be the group's {self.size} ranks, got shape {list(tensor.shape)}"
