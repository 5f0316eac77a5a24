"""Compares calls over the ranks of a group, so that a mismatch is an error on all of them and not a hang."""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from bmburst.comm.disagreement import decoded, disagreement, encoded
from bmburst.comm.meter import WaitMeter, traced
from bmburst.comm.protocol import Communicator, CompletedTransfer, Transfer
from bmburst.errors import UserError
from bmburst.schedule.exchange import Exchange

T = TypeVar("T")

DEBUG_SWITCH = "BMBURST_CHECK"
"""The environment variable that, set to 1 on every rank, compares every call on GPUs too."""

_SAME, _PROBLEM = "=", "!"
_FIRST = 8  # calls of a kind: token ids, labels, positions and masks of a first step, or two
_SAMPLED = 64
_ALIKE = 0.25  # of the norm: far above what 16 bits round, far below the 1.4 of unrelated numbers


class Mismatch(UserError):
    """The ranks of a group disagree on what they are about to exchange or compute."""


def describe(*tensors: Tensor) -> str:
    """Return shapes and dtypes as a short text: `float32[2, 8], int64[4]`."""
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def contents(tensor: Tensor) -> str:
    """Return a short text that differs for tensors that hold other numbers: `#1a2b3c4d`. Waits for their device."""
    data = tensor.detach().cpu().reshape(-1)
    dense = torch.empty(len(data), dtype=data.dtype, device="cpu").copy_(
        data
    )  # of one element any stride counts as contiguous
    return f"#{zlib.crc32(dense.view(torch.uint8).numpy().tobytes()):08x}"


def is_exact(tensor: Tensor) -> bool:
    """Return whether ranks that compute the same get the same bits: token ids do, hidden states may be rounded."""
    return tensor.element_size() == 1 or not (tensor.is_floating_point() or tensor.is_complex())


def require_own_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that only stands for others, as torch's DTensor does: there is nothing at its address.

    Raises:
        UserError: It is one.
    """
    if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
        raise UserError(
            f"{name} must be a plain tensor, got a {type(tensor).__name__}\n"
            "fix: pass the tensor that this rank holds; of a DTensor, its to_local()"
        )


def require_numbers(name: str, tensor: Tensor) -> None:
    """Refuse a tensor on torch's meta device, which has a shape and no numbers.

    Raises:
        UserError: It is there.
    """
    if tensor.is_meta:
        raise UserError(
            f"{name} must hold numbers, got a meta tensor {list(tensor.shape)}\n"
            "fix: make it on this rank's device; of a model, model.to_empty(device=...) and load its weights"
        )


@dataclass(slots=True)
class _CheckState:
    on: bool
    meter: WaitMeter | None = None
    compared: dict[str, int] = field(default_factory=dict)
    """How many calls of a kind were compared because they were the first."""


class CheckedCommunicator:
    """The communicator that everything else holds: it compares operation, shapes and dtypes over the ranks.

    Satisfies `Communicator`. A comparison is one all-gather of 512 bytes before the call, and blocks the host.

    Args:
        inner: What moves the tensors between ranks; not asked where a rank would only send to itself.
        device: Where tensors must be for this group.
        always: Whether every call is compared, as on CPU transports. If not, calls are compared where `active` is set
            (the trainer's first step), inside `checking`, and everywhere if BMBURST_CHECK=1 is in the environment.
    """

    def __init__(self, inner: Communicator, device: torch.device, *, always: bool = True) -> None:
        self.inner = inner
        self.base = self
        """The group without a mesh's hints: what is made once for a group is made for this."""
        self.device = device
        self.rank, self.size, self.transport = inner.rank, inner.size, inner.transport
        self.nodes: int | None = None
        """On how many nodes the ranks lie, in order, as many on each; None: what `transports.find_nodes` finds."""
        self.ulysses_degree: int | None = None
        """How many neighbouring ranks exchange attention heads, 1 for none; None: the cheapest degree."""
        self.always = always or os.environ.get(DEBUG_SWITCH) == "1"
        self._state = _CheckState(self.always)

    @property
    def active(self) -> bool:
        """Whether calls are compared. Set it on every rank at the same point of the program."""
        return self._state.on

    @active.setter
    def active(self, on: bool) -> None:
        self._state.on = on

    @property
    def meter(self) -> WaitMeter | None:
        """What measures waits for this group, over any transport; none unless somebody sets one."""
        return self._state.meter

    @meter.setter
    def meter(self, meter: WaitMeter | None) -> None:
        self._state.meter = meter

    def over(self, inner: Communicator) -> "CheckedCommunicator":
        """Return the same group, or a part of it, over another transport; the two are active together."""
        other = CheckedCommunicator(inner, self.device)
        other.always, other._state = self.always, self._state
        return other

    def hinted(self, nodes: int | None, ulysses_degree: int | None) -> "CheckedCommunicator":
        """Return the same group with what a mesh says of it; whoever else has the group is not told."""
        other = self.over(self.inner)
        other.nodes, other.ulysses_degree, other.base = nodes, ulysses_degree, self.base
        return other

    def __deepcopy__(self, memo: object) -> "CheckedCommunicator":
        """Return itself: the copy of a model talks to the same ranks."""
        return self

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Compare calls inside this block, whatever `active` is outside. Every rank must enter it."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def first_calls(self, kind: str) -> Iterator[None]:
        """Compare the first calls of a kind, on GPUs too. Every rank makes them, so every rank counts alike.

        Args:
            kind: For example the name of a function. A call that raises is not counted.
        """
        count = self._state.compared.get(kind, 0)
        if count >= _FIRST:
            yield
            return
        with self.checking():
            yield
        self._state.compared[kind] = count + 1

    def require_alike(self, call: str, tensor: Tensor) -> None:
        """Check, while active, that every rank holds this tensor of rounded numbers, but for rounding.

        Some 64 of its numbers are compared. What all ranks compute from one batch may differ by a rounding; what they
        compute from different ones differs by about as much as it is.

        Raises:
            Mismatch: The ranks hold different ones.
        """
        if not self.active or self.size == 1 or is_exact(tensor) or not tensor.numel():
            return
        places = torch.linspace(0, tensor.numel() - 1, _SAMPLED, dtype=torch.float64, device="cpu").long()
        drawn = tensor.detach()[torch.unravel_index(places.to(tensor.device), tensor.shape)]
        mine = (drawn.real if drawn.is_complex() else drawn).double().nan_to_num(0, 0, 0).to(self.device)
        (gathered,) = self.inner.all_gather(mine).wait()
        rows = gathered.cpu()
        near = (rows - rows[0]).norm(dim=1) <= _ALIKE * torch.maximum(rows.norm(dim=1), rows[0].norm())
        different = disagreement(
            [f"{call}\ncontents {contents(rows[0 if same else r])}" for r, same in enumerate(near.tolist())]
        )
        if different:
            raise Mismatch(different)

    def decided(self, decide: Callable[[], tuple[T, str]]) -> T:
        """Return this rank's decision, once every rank has decided and all of them agree.

        Args:
            decide: Returns the decision and, as text, what of it must be equal on every rank: see `agree`.

        Raises:
            UserError: `decide` raised it, here or, while active, on any rank.
            Mismatch: The texts differ, while active.
        """
        try:
            decision, signature = decide()
        except UserError as error:
            self.refuse(str(error))
        self.agree(signature)
        return decision

    def agree(self, signature: str) -> None:
        """Check, while active, that every rank is about to do the same thing.

        Args:
            signature: The call, then on a line each what of it must be equal, so that a message shows what differs.

        Raises:
            Mismatch: The signatures differ. The message names the first two ranks that differ, and shows what does.
            UserError: Another rank called `refuse` instead: the first such rank's problem.
        """
        texts = self._exchange(_SAME + signature)
        for text in texts:
            if text.startswith(_PROBLEM):
                raise UserError(text.removeprefix(_PROBLEM))
        different = disagreement([text.removeprefix(_SAME) for text in texts])
        if different:
            raise Mismatch(different)

    def refuse(self, problem: str) -> NoReturn:
        """Raise `UserError(problem)`; while active, every rank that calls `agree` meanwhile raises it too."""
        self._exchange(_PROBLEM + problem)
        raise UserError(problem) from None

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        self._check(f"ring shift={shift}", *tensors)
        return (
            self._started(lambda: self.inner.ring(*tensors, shift=shift))
            if shift % self.size
            else CompletedTransfer(tensors)
        )

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.outbox`."""
        return self.inner.outbox(nbytes, lane)

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `BlockMover.pull`."""
        self._check(f"pull of {exchange.nbytes} bytes in lane {lane} into", *targets)
        return self._started(lambda: self.inner.pull(exchange, outbox, targets, lane))

    def inbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.inbox`."""
        return self.inner.inbox(nbytes, lane)

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """See `BlockMover.push`."""
        self._check(f"push of {exchange.nbytes} bytes in lane {lane} from", *sources)
        return self._started(lambda: self.inner.push(exchange, sources, inbox, lane))

    def all_to_all(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_to_all`."""
        self._check("all_to_all", tensor, one_row_a_rank=True)
        return self._started(lambda: self.inner.all_to_all(tensor)) if self.size > 1 else CompletedTransfer((tensor,))

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        self._check("all_gather", tensor)
        return (
            self._started(lambda: self.inner.all_gather(tensor))
            if self.size > 1
            else CompletedTransfer((tensor[None],))
        )

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        self._check("reduce_scatter", tensor, one_row_a_rank=True)
        return (
            self._started(lambda: self.inner.reduce_scatter(tensor))
            if self.size > 1
            else CompletedTransfer((tensor[0],))
        )

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        self._check("all_reduce", tensor)
        return (
            self._started(lambda: self.inner.all_reduce(tensor))
            if self.size > 1
            else CompletedTransfer((tensor.detach().clone(),))
        )

    def _started(self, start: Callable[[], Transfer]) -> Transfer:
        """Return the transfer; its waits, and on a CPU its start, are measured where there is a meter."""
        meter = self.meter
        if meter is None:
            return start()
        with traced("exchange"), nullcontext() if self.device.type == "cuda" else meter.waiting():
            return meter.metered(start())

    def _check(self, call: str, *tensors: Tensor, one_row_a_rank: bool = False) -> None:
        """Refuse what cannot be exchanged, then compare the call over the ranks."""
        for tensor in tensors:
            if one_row_a_rank and (not tensor.dim() or tensor.shape[0] != self.size):
                self.refuse(
                    f"{call}: dimension 0 must be the group's {self.size} ranks, got shape {list(tensor.shape)}"
                )
            if self.size > 1 and tensor.device.type != self.device.type:
                self.refuse(
                    f"{call}: the group moves {self.device.type} tensors by {self.transport}, not {tensor.device} ones"
                )
        if self.active:
            self.agree(f"{call}\n{describe(*tensors)}")

    def _exchange(self, text: str) -> list[str]:
        """Return every rank's text while active; else nothing."""
        if not self.active or self.size == 1:
            return []
        mine = torch.frombuffer(bytearray(encoded(text)), dtype=torch.uint8).to(self.device)
        (gathered,) = self.inner.all_gather(mine).wait()
        return [decoded(bytes(row)) for row in gathered.tolist()]
