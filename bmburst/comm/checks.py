"""Compares calls over the ranks of a group, so that a mismatch raises an error on all of them instead of a hang.

What is compared is a signature: the name of a call, then one line for each value that must be equal: `burst_attention`,
`mask causal`, ... It is sent in a fixed number of bytes. An error shows only the lines that differ.
"""

import hashlib
import os
import re
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from bmburst.comm.communicator import Communicator, CompletedTransfer, OnCurrentStream, Transfer
from bmburst.comm.waits import WaitMeter, traced
from bmburst.errors import UserError
from bmburst.schedule.exchange import Exchange
from bmburst_ops.dtypes import name_of

T = TypeVar("T")

DEBUG_SWITCH = "BMBURST_CHECK"
"""The environment variable that, set to 1 on every rank, compares every call on GPUs too."""

_SAME, _PROBLEM = "=", "!"
_FOREIGN = "a collective that is not bmburst's, such as one of DDP"
_FIRST = 8  # calls of a kind that are compared: token ids, labels, positions and masks of one step or two
_LATER = nullcontext(False)
_SAMPLED = 64
_ALIKE = 0.25  # of the norm: far above 16-bit rounding errors, far below the 1.4 of unrelated tensors


class Mismatch(UserError):
    """The ranks of a group call different operations, or the same one with different arguments."""


def describe_tensors(*tensors: Tensor) -> str:
    """Return shapes and dtypes as a short text: `float32[2, 8], int64[4]`."""
    return ", ".join(f"{name_of(t.dtype)}{list(t.shape)}" for t in tensors)


def contents(tensor: Tensor) -> str:
    """Return a checksum of a tensor's numbers as text: `#1a2b3c4d`. The host waits for the device."""
    data = tensor.detach().cpu().reshape(-1)
    # A copy: torch regards one element with any stride as contiguous.
    dense = torch.empty(len(data), dtype=data.dtype, device="cpu").copy_(data)
    return f"#{zlib.crc32(dense.view(torch.uint8).numpy().tobytes()):08x}"


def is_exact(tensor: Tensor) -> bool:
    """Return whether equal computations give equal bits on all ranks: true for integers, not for floating point."""
    return tensor.element_size() == 1 or not (tensor.is_floating_point() or tensor.is_complex())


@dataclass(slots=True)
class _CheckState:
    on: bool
    meter: WaitMeter | None = None
    compared: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """The number of first calls of each kind that were compared."""
    numbered: int = 0


class _Running(threading.local):
    """What the calls of this thread are part of: a line of their signatures, or nothing."""

    line = ""


_RUNNING = _Running()


def call_number(comm: object) -> int:
    """Count a differentiable call of a group and return its number, or 0 where not every call is compared.

    Every rank makes the same calls, so a call has the same number on all of them.
    """
    if not isinstance(comm, CheckedCommunicator) or not comm.always:
        return 0
    return comm.next_number()


@contextmanager
def in_backward_of(number: int) -> Iterator[None]:
    """Compare also of which call this is the backward: in another order, ranks would exchange gradients of others."""
    before, _RUNNING.line = _RUNNING.line, f"\nbackward of call {number}" if number else ""
    try:
        yield
    finally:
        _RUNNING.line = before


class CheckedCommunicator:
    """A communicator that compares operation, shapes and dtypes over the ranks. The library always uses this one.

    Satisfies `Communicator`. A comparison is one all-gather of 512 bytes before the call, and blocks the host.

    Args:
        inner: The communicator that moves tensors; not called if a rank would only send to itself.
        device: The device of this group's tensors.
        always: Whether every call is compared, as on CPU transports. If not, calls are compared where `active` is set
            (the trainer's first step), inside `checking` and `first_calls`, and everywhere if BMBURST_CHECK=1 is in the
            environment.
    """

    def __init__(self, inner: Communicator, device: torch.device, *, always: bool = True) -> None:
        self.inner = inner
        self.base = self
        """The group without a mesh's hints: the key of caches that exist once per group."""
        self.device = device
        self.rank, self.size, self.transport = inner.rank, inner.size, inner.transport
        self.nodes: int | None = None
        """Nodes of the group, each with equally many consecutive ranks; None: see `transports.find_nodes`."""
        self.ulysses_degree: int | None = None
        """The Ulysses degree: how many neighbouring ranks exchange attention heads; None: the cheapest."""
        self.always = always or os.environ.get(DEBUG_SWITCH) == "1"
        self._state = _CheckState(self.always)
        self._is_direct = isinstance(inner, OnCurrentStream)

    @property
    def active(self) -> bool:
        """Whether calls are compared. Set it on every rank at the same point of the program."""
        return self._state.on

    @active.setter
    def active(self, on: bool) -> None:
        self._state.on = on

    @property
    def meter(self) -> WaitMeter | None:
        """The meter of waits for this group, over any transport; None unless one is set."""
        return self._state.meter

    @meter.setter
    def meter(self, meter: WaitMeter | None) -> None:
        self._state.meter = meter

    def next_number(self) -> int:
        """Return the number of the next differentiable call of this group, over any transport; see `call_number`."""
        self._state.numbered += 1
        return self._state.numbered

    def over(self, inner: Communicator) -> "CheckedCommunicator":
        """Return the same group, or a part of it, over another transport. Both share `active` and `meter`."""
        other = CheckedCommunicator(inner, self.device)
        other.always, other._state = self.always, self._state
        return other

    def hinted(self, nodes: int | None, ulysses_degree: int | None) -> "CheckedCommunicator":
        """Return a copy of the group with a mesh's hints; other references to the group do not have them."""
        other = self.over(self.inner)
        other.nodes, other.ulysses_degree, other.base = nodes, ulysses_degree, self.base
        return other

    def __deepcopy__(self, memo: object) -> "CheckedCommunicator":
        """Return itself: the copy of a model communicates with the same ranks."""
        return self

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Compare the calls inside this block, even if `active` is false outside. Every rank must enter it."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    def first_calls(self, kind: str) -> AbstractContextManager[bool]:
        """Compare the first calls of a kind, on GPUs too. Every rank makes these calls, so all counts are equal.

        The value of the block says whether this is one of them. Later ones cost the host a fraction of a microsecond.
        Calls that a CUDA graph records are not compared, because the host would wait for them.

        Args:
            kind: A name, for example of a function. A call that raises is not counted.
        """
        if self._state.compared[kind] >= _FIRST:
            return _LATER
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _LATER
        return self._first_call(kind)

    @contextmanager
    def _first_call(self, kind: str) -> Iterator[bool]:
        with self.checking():
            yield True
        self._state.compared[kind] += 1

    def require_alike(self, call: str, tensor: Tensor, fact: str = "values") -> None:
        """Check, while active, that every rank holds the same floating point tensor, up to rounding.

        64 of its elements are compared. Results that ranks compute from one batch differ by rounding errors; results
        from different batches differ by about their own size.

        Args:
            call: The name of the call in messages.
            tensor: The tensor, of any shape.
            fact: "values" of a weight or state, or "contents" of a batch. The fix in the message depends on it.

        Raises:
            Mismatch: The ranks hold different tensors.
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
            [f"{call}\n{fact} {contents(rows[0 if same else r])}" for r, same in enumerate(near.tolist())]
        )
        if different:
            raise Mismatch(different)

    def decided(self, decide: Callable[[], tuple[T, str]]) -> T:
        """Return this rank's decision, once every rank has decided and all of them agree.

        Args:
            decide: Returns the decision, and its signature: the text that must be equal on every rank, see `agree`.

        Raises:
            UserError: `decide` raised it, here or, while active, on any rank.
            Mismatch: The signatures differ, while active.
        """
        try:
            decision, signature = decide()
        except UserError as error:
            self.refuse(str(error))
        self.agree(signature)
        return decision

    def agree(self, signature: str) -> None:
        """Check, while active, that the signatures of all ranks are equal.

        Args:
            signature: The call, then one line for each value that must be equal; a message shows the lines that differ.

        Raises:
            Mismatch: The signatures differ. The message names the first two ranks that differ, and the difference.
            UserError: Another rank called `refuse` instead; the text is that of the first such rank.
        """
        texts = self._exchange(_SAME + signature)
        for text in texts:
            if text.startswith(_PROBLEM):
                raise UserError(text.removeprefix(_PROBLEM))
        different = disagreement([text.removeprefix(_SAME) if text.startswith(_SAME) else _FOREIGN for text in texts])
        if different:
            raise Mismatch(different)

    def refuse(self, problem: str) -> NoReturn:
        """Raise `UserError(problem)`; while active, the ranks that call `agree` at this point raise it too."""
        self._exchange(_PROBLEM + problem)
        raise UserError(problem) from None

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `Communicator.ring`."""
        self._check(f"ring shift={shift}", *tensors)
        if not shift % self.size:
            return CompletedTransfer(tensors)
        return self._started(lambda: self.inner.ring(*tensors, shift=shift))

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
        if self.size == 1:
            return CompletedTransfer((tensor,))
        return self._started(lambda: self.inner.all_to_all(tensor))

    def all_to_all_here(self, tensor: Tensor) -> Tensor:
        """Return the result of `all_to_all` on the current stream, which waits for it: the fewest calls of the host."""
        self._check("all_to_all", tensor, one_row_a_rank=True)
        if self.size == 1:
            return tensor
        if not self._is_direct:
            return self._started(lambda: self.inner.all_to_all(tensor)).wait()[0]
        inner: Any = self.inner
        received: Tensor
        if self.meter is None or not self.meter.running:
            received = inner.all_to_all_here(tensor)
            return received
        with traced("exchange"), self.meter.waiting():
            received = inner.all_to_all_here(tensor)
            return received

    def all_gather(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_gather`."""
        self._check("all_gather", tensor)
        if self.size == 1:
            return CompletedTransfer((tensor[None],))
        return self._started(lambda: self.inner.all_gather(tensor))

    def reduce_scatter(self, tensor: Tensor) -> Transfer:
        """See `Communicator.reduce_scatter`."""
        self._check("reduce_scatter", tensor, one_row_a_rank=True)
        if self.size == 1:
            return CompletedTransfer((tensor[0],))
        return self._started(lambda: self.inner.reduce_scatter(tensor))

    def all_reduce(self, tensor: Tensor) -> Transfer:
        """See `Communicator.all_reduce`."""
        self._check("all_reduce", tensor)
        if self.size == 1:
            return CompletedTransfer((tensor.detach().clone(),))
        return self._started(lambda: self.inner.all_reduce(tensor))

    def _started(self, start: Callable[[], Transfer]) -> Transfer:
        """Start and return the transfer. If there is a meter, its waits are measured, and on a CPU its start too."""
        meter = self.meter
        if meter is None:
            return start()
        with traced("exchange"), nullcontext() if self.device.type == "cuda" else meter.waiting():
            return meter.metered(start())

    def _check(self, call: str, *tensors: Tensor, one_row_a_rank: bool = False) -> None:
        """Refuse tensors that cannot be exchanged, then compare the call over the ranks."""
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
            self.agree(f"{call}\n{describe_tensors(*tensors)}{_RUNNING.line}")

    def _exchange(self, text: str) -> list[str]:
        """Return every rank's text while active, else an empty list."""
        if not self.active or self.size == 1:
            return []
        mine = torch.frombuffer(bytearray(encoded(text)), dtype=torch.uint8).to(self.device)
        (gathered,) = self.inner.all_gather(mine).wait()
        return [decoded(bytes(row)) for row in gathered.tolist()]


NBYTES = 512
"""Bytes of an encoded text."""

_CAPS = (NBYTES, 192, 96, 48, 24)  # limits of a line in bytes; the first limit with which all lines fit is used
_SHOWN, _FACT, _TAIL = 200, 80, 20  # characters of a rank's line, of one value, and of its end
_GAP = "..."

_SAME_CALLS = "make the same calls in the same order on every rank, none of them under an if on the rank"
_ONE_BATCH = (
    "ranks that share a sequence need the same batch: a sampler by data-parallel rank "
    "(num_replicas=mesh.shape.data, rank=mesh.data_rank), or a mesh with fewer sequence ranks"
)
_ONE_MODEL = "the same weights and states on every rank: one seed or a broadcast, and averaged gradients"
_GRADIENT = "call it under the same grad mode, with the same inputs that require a gradient, on every rank"
_ORDER = "run the backward of the same calls in the same order on every rank, for example of one sum of all losses"
_EQUAL = "pass the same value on every rank"
_CONTROL = "let callbacks decide from what all ranks share, such as steps or evaluated losses, not from a clock"
_FIXES = (
    (re.compile(r"^weights "), "give all hosts the same files of the model, in a folder that they share"),
    (re.compile(r"^values "), _ONE_MODEL),
    (re.compile(r"#[0-9a-f]{8}$|^documents "), _ONE_BATCH),  # values of a batch: a digest of `contents`, documents
    (re.compile(r"\d\[\d|shape \["), f"equal shapes and dtypes; {_ONE_BATCH}"),
    (re.compile(r"with(out)? gradient$"), _GRADIENT),
    (re.compile(r"^backward of call \d+$"), _ORDER),
    (re.compile(r"^should_\w+ "), _CONTROL),  # of a TrainerControl
)
"""The fix for a line that differs, by a pattern of the line; the first match is used."""


def disagreement(signatures: list[str]) -> str | None:
    """Return three lines on the first rank whose signature is not rank 0's, with the fix, or None if all are equal."""
    if len(set(signatures)) < 2:
        return None
    first = signatures[0]
    rank, other = next((rank, text) for rank, text in enumerate(signatures) if text != first)
    return (
        f"the ranks of the group disagree; fix: {_fix(first, other)}\n"
        f"rank 0: {_told(first, other)}\nrank {rank}: {_told(other, first)}"
    )


def encoded(text: str) -> bytes:
    """Return the text in `NBYTES` bytes. A line that is too long ends in a digest, so that its end is compared too."""
    lines = [line.encode() for line in text.split("\n")]
    fitting = (data for cap in _CAPS if len(data := b"\n".join(_capped(line, cap) for line in lines)) <= NBYTES)
    return next(fitting, _capped(text.encode(), NBYTES)).ljust(NBYTES, b"\0")


def decoded(data: bytes) -> str:
    """Return the encoded text; long lines remain shortened."""
    return data.rstrip(b"\0").decode(errors="replace")


def _capped(data: bytes, cap: int) -> bytes:
    if len(data) <= cap:
        return data
    digest = f"{_GAP} #{hashlib.sha256(data).hexdigest()[:12]}".encode()
    return data[: cap - len(digest)] + digest


def _fix(mine: str, theirs: str) -> str:
    (call, *facts), (their_call, *others) = mine.split("\n"), theirs.split("\n")
    if call != their_call:
        return _SAME_CALLS
    differing = [a or b for a, b in zip_longest(facts, others, fillvalue="") if a != b]
    return next((fix for looks, fix in _FIXES for fact in differing if looks.search(fact)), _EQUAL)


def _told(mine: str, theirs: str) -> str:
    """Return the call, and the lines of `mine` that differ from `theirs`."""
    (call, *facts), (their_call, *others) = mine.split("\n"), theirs.split("\n")
    if call != their_call:
        return _end(call)
    differing = [_brief(a, b) for a, b in zip_longest(facts, others, fillvalue="") if a != b]
    return _end(f"{call} {', '.join(differing)}")


def _brief(mine: str, theirs: str) -> str:
    """Return a line. A long line is cut to the part from its first differing word on, and its end with the digest."""
    if len(mine) <= _FACT:
        return mine
    words, others = mine.split(" "), theirs.split(" ")
    same = next((i for i, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), 0)
    text = " ".join([*words[:1], *([_GAP] if same > 1 else []), *words[max(same, 1) :]])
    return text if len(text) <= _FACT else f"{text[: _FACT - _TAIL]}{_GAP}{text[-_TAIL:]}"


def _end(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - len(_GAP)]}{_GAP}"
