"""Attention by head exchange (DeepSpeed Ulysses): every rank attends with its own heads over the whole sequence.

A kernel gets all tokens of its heads, so outputs and gradients are those of one device's kernel: nothing is merged, and
only gradients of a KV head that several ranks share are summed. While a kernel works on one unit of heads, the next
unit arrives and the previous results return to their owners. Tensors move without packing.

Memory beside the results, on each rank: the inbox, `q + k + v` bytes of the local tensors forward and `q + k + v + dO`
backward (with KV heads repeated where there are fewer than ranks), and two outboxes for the results of a unit each.
Over the peer transport they stay allocated for the next call. There the kernels of short sequences are captured as CUDA
graphs (`bmburst.comm.streams`), which keep the temporary memory of backward: sums in fp32, at most 512 MiB; with GQA
also those of keys and values; under a mask of several tiles the gradients of each and their sums.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bmburst.attention.at_once import Attend, at_once_backward, at_once_forward
from bmburst.attention.call import AttentionCall, Executor
from bmburst.attention.gather import gather_backward, gather_forward
from bmburst.attention.local import local_backward, local_forward
from bmburst.attention.ring import ring_backward, ring_forward
from bmburst.comm.communicator import Transfer
from bmburst.comm.streams import RECORDINGS, UnitStreams, current_stream
from bmburst.comm.waits import working
from bmburst.schedule.heads_plan import HeadsPlan, StridedView
from bmburst.schedule.tiles import Span
from bmburst.schedule.units import records_kernels
from bmburst_ops.flash import BackwardInputs, Gradients, Partial
from bmburst_ops.flash.kernel import empty_partial
from bmburst_ops.merge import accumulation_dtype

_IN, _OUT = 0, 1  # lanes: arriving inputs do not queue behind returning results
_SHORT = 1 << 19  # tokens; for longer sequences, overlapping kernel tails is not worth each stream's scratch memory


def executor_of(call: AttentionCall) -> Executor:
    """Return the executor of a call: a head exchange, one rank alone, a gather or a ring."""
    if call.strategy.ulysses_degree > 1:
        return _AT_ONCE if call.strategy.at_once else _HEADS
    if call.comm.size == 1:
        return _LOCAL
    return _GATHER if call.strategy.outer == "gather" else _RING


def spread_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Partial:
    """Return attention of this rank's queries by a given function, after the head exchange of the call's strategy.

    Inference uses it: its function also fills the KV cache and attends to the cached tokens.

    Args:
        call: The attention.
        q: `[batch, local_tokens, heads, head_dim]`.
        k: `[batch, local_tokens, kv_heads, head_dim]`.
        v: `[batch, local_tokens, kv_heads, value_dim]`.
        attend: Called for the KV heads of each unit, in the same order on all ranks, with the call that remains after
            the head exchange (`AttentionCall.outer`). It writes its results into the last argument.
    """
    if call.strategy.ulysses_degree > 1:
        return (at_once_forward if call.strategy.at_once else heads_forward)(call, q, k, v, attend)
    into = empty_partial(q, v)
    attend(call, Span(0, k.shape[2]), q, k, v, into)
    return into


def heads_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, attend: Attend | None = None) -> Partial:
    """Return attention of this rank's queries over the whole sequence; see `ring_forward`.

    `attend` as in `spread_forward`; default: the executor of `call.outer`.
    """
    brought = [_token_rows(t) for t in (q, k, v)]
    plan = call.heads_plan(brought, backward=False)
    streams = _streams(call, plan, q)
    arriving = _UnitPrefetch(call, plan, brought, streams)  # first: the transfer hides the host work below
    delivered = empty_partial(q, v)
    inbox, outer = arriving.inbox, call.outer
    run = executor_of(outer).forward

    def work(i: int, outbox: Tensor) -> None:
        results = Partial(*_tensors(outbox, plan.outbound[i].views, q.dtype))
        queries, keys, values = _tensors(inbox, plan.views[i], q.dtype)
        if attend is None:
            run(outer, queries, keys, values, results)
        else:
            attend(outer, plan.units[i].kv_heads, queries, keys, values, results)

    _by_units(call, plan, streams, arriving, work, delivered, is_recorded=attend is None and _is_recorded(call, plan))
    return delivered


def heads_backward(call: AttentionCall, given: BackwardInputs) -> Gradients:
    """Return the gradients of this rank's q, k and v; see `ring_backward`."""
    grad_out, q, k, v, lse, delta = given
    brought = [*(_token_rows(t) for t in (q, k, v, grad_out)), lse.contiguous(), delta.contiguous()]
    plan = call.heads_plan(brought, backward=True)
    streams = _streams(call, plan, q)
    arriving = _UnitPrefetch(call, plan, brought, streams)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = (t.new_empty((plan.shapes.replicas, *t.shape)) for t in (k, v))
    inbox, outer = arriving.inbox, call.outer
    differentiate = executor_of(outer).backward

    def work(i: int, outbox: Tensor) -> None:
        queries, keys, values, grads, own_lse, own_delta = _tensors(inbox, plan.views[i], q.dtype)
        results = _tensors(outbox, plan.outbound[i].views, q.dtype)
        differentiate(outer, BackwardInputs(grads, queries, keys, values, own_lse, own_delta), Gradients(*results))

    targets = (grad_q, grad_k, grad_v)
    _by_units(call, plan, streams, arriving, work, targets, is_recorded=_is_recorded(call, plan))
    return Gradients(grad_q, *(_joined(t) for t in (grad_k, grad_v)))


_HEADS = Executor(heads_forward, heads_backward)
_AT_ONCE = Executor(at_once_forward, at_once_backward)
_LOCAL = Executor(local_forward, local_backward)
_GATHER = Executor(gather_forward, gather_backward)
_RING = Executor(ring_forward, ring_backward)


def _by_units(
    call: AttentionCall,
    plan: HeadsPlan,
    streams: UnitStreams,
    arriving: "_UnitPrefetch",
    work: Callable[[int, Tensor], None],
    targets: tuple[Tensor, ...],
    *,
    is_recorded: bool,
) -> None:
    """Attend unit by unit and return the results to their owners.

    Args:
        call: The attention.
        plan: The transfers.
        streams: The streams of the units' kernels.
        arriving: The units' inputs.
        work: Attends with unit i and writes its results to an outbox.
        targets: Tensors for the results of this rank's tokens.
        is_recorded: Whether kernels run as CUDA graphs.
    """
    # In backward the kernel pads its temporary memory for each document.
    is_varying = is_recorded and plan.backward and bool(call.mask.starts)
    going_home: list[Transfer] = []
    for i, results in enumerate(plan.outbound):
        with streams.turn(i):
            arriving.wait(i)
            outbox = call.comm.outbox(results.exchange.nbytes, _OUT)
            with working(call.comm):
                if is_recorded:
                    stream = current_stream(outbox.device.index)
                    places = arriving.inbox.data_ptr(), outbox.data_ptr(), stream
                    recording = RECORDINGS.get(call, plan.backward, i, *places)
                    recording.run(partial(work, i, outbox), plan.taken_nbytes(i) if is_varying else 0)
                else:
                    work(i, outbox)
        arriving.start(i + 1)
        with streams.turn(i):
            going_home.append(call.comm.pull(results.exchange, outbox, targets, _OUT))
    streams.join()
    for transfer in going_home:
        transfer.wait()


def _is_recorded(call: AttentionCall, plan: HeadsPlan) -> bool:
    """Return whether the kernels run as CUDA graphs: memory must stay in place, without transfers between kernels."""
    is_local = call.outer.comm.size == 1
    return is_local and call.kernel.recordable and records_kernels(call.comm.transport == "peer", plan.sums_nbytes)


def _streams(call: AttentionCall, plan: HeadsPlan, q: Tensor) -> UnitStreams:
    """Return the streams of the units' kernels: one if transfers occupy multiprocessors or run between the kernels.

    Also one if torch fills new memory, as its deterministic algorithms do: results are allocated after the streams have
    forked, and the fill could overwrite results that arrived on another stream.
    """
    is_free = call.comm.transport == "peer" and call.outer.comm.size == 1
    is_free = is_free and not torch.are_deterministic_algorithms_enabled()
    return UnitStreams(q.device, len(plan.units) if is_free and plan.shapes.tokens <= _SHORT else 1)


class _UnitPrefetch:
    """Prefetches the tensors of each unit over all tokens. The first transfer starts at construction.

    Queries, dO and statistics arrive for the unit's query heads, keys and values for its KV heads.
    """

    def __init__(self, call: AttentionCall, plan: HeadsPlan, brought: Sequence[Tensor], streams: UnitStreams) -> None:
        self._comm, self._plan, self._brought, self._streams = call.comm, plan, brought, streams
        self.inbox = call.comm.inbox(plan.nbytes, _IN)
        self._under_way: list[Transfer] = []
        self.start(0)

    def start(self, i: int) -> None:
        """Start the transfer of unit i, if there is one, right after a kernel launch: the kernel hides the host work.

        The results of that kernel are sent afterwards, so that the next unit does not wait for them.
        """
        if i < len(self._plan.units):
            with self._streams.turn(i):
                self._under_way.append(self._comm.push(self._plan.inbound[i], self._brought, self.inbox, _IN))

    def wait(self, i: int) -> None:
        """Make the current stream wait until the tensors of unit i are in the inbox; called in the unit's turn."""
        self._under_way[i].wait()


def _token_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with the heads of each token contiguous; a copy only if they are not.

    Strides may differ between ranks, but transfers must be cut into the same blocks on all of them.
    """
    _, _, heads, head_dim = tensor.shape
    _, token, head, feature = tensor.stride()
    if feature == 1 and (head == head_dim or heads == 1) and token >= heads * head_dim:
        return tensor
    return tensor.contiguous()


def _tensors(buffer: Tensor, views: Sequence[StridedView], dtype: torch.dtype) -> list[Tensor]:
    """Return views of a buffer as tensors; statistics are in the accumulation dtype of `dtype`."""
    whole, first = {4: buffer.view(dtype)}, buffer.storage_offset()
    if len(views[-1].size) == 3:
        whole[3] = buffer.view(accumulation_dtype(dtype))
    return [
        at.as_strided(view.size, view.strides, first // at.element_size() + view.start)
        for view, at in ((view, whole[len(view.size)]) for view in views)
    ]


def _joined(replicas: Tensor) -> Tensor:
    """Sum the shares of the ranks that hold the same KV head."""
    if replicas.shape[0] == 1:
        return replicas[0]
    return replicas.sum(0, dtype=accumulation_dtype(replicas.dtype))
