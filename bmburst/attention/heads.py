"""Attention by head exchange (DeepSpeed Ulysses): every rank attends with its own heads over the whole sequence.

No partial results, no merge, no sum over ranks: outputs and gradients are those of one device's kernel. While a kernel
works on some heads, the next ones come in and the last ones go home. Tensors are moved from where they lie to where
they are needed; nothing is packed.

Memory beside the results, on each rank: the inbox, `q + k + v` bytes of the local tensors forward and
`2 q + k + v` backward (with KV heads repeated where there are fewer than ranks), and two outboxes for the results of a
unit each. Over the peer transport they stay allocated for the next call. There the kernels of short sequences are
recorded as CUDA graphs, which keep what a backward takes for itself: sums in fp32, at most 512 MiB, with GQA those of
keys and values, and under a mask of several tiles the gradients of each and their sums (`bmburst.attention.graphs`).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall, Executor
from bmburst.attention.gather import gather_backward, gather_forward
from bmburst.attention.graphs import RECORDINGS, UnitStreams
from bmburst.attention.local import empty_partial, local_backward, local_forward
from bmburst.attention.ring import ring_backward, ring_forward
from bmburst.comm.meter import working
from bmburst.comm.protocol import Transfer
from bmburst.comm.streams import current_stream
from bmburst.schedule.heads_plan import HeadsPlan, StridedView
from bmburst.schedule.tiles import Span
from bmburst.schedule.units import records_kernels
from bmburst_ops.flash import BackwardInputs, Gradients, Partial
from bmburst_ops.merge import accumulation_dtype

_IN, _OUT = 0, 1  # lanes: what comes in does not queue behind what goes home
_SHORT = 1 << 19  # tokens; beyond, kernels take so long that their tails are not worth each stream's scratch memory


def executor_of(call: AttentionCall) -> Executor:
    """Return what runs a call: a head exchange, and between groups that exchanged heads a gather or a ring."""
    if call.strategy.ulysses_degree > 1:
        return _HEADS
    if call.comm.size == 1:
        return _LOCAL
    return _GATHER if call.strategy.outer == "gather" else _RING


Attend = Callable[[AttentionCall, Span, Tensor, Tensor, Tensor, Partial], object]
"""Attends with some KV heads of a rank: `(call, kv_heads, q, k, v, into)`, where q, k and v hold these heads alone."""


def spread_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Partial:
    """Return attention of this rank's queries by a given function, behind the head exchange of the call's strategy.

    Inference uses it: what attends also keeps keys and values, and looks at those of earlier tokens.

    Args:
        call: The attention.
        q: `[batch, local_tokens, heads, head_dim]`.
        k: `[batch, local_tokens, kv_heads, head_dim]`.
        v: Shaped as k.
        attend: Called for the KV heads of a unit, in one order on all ranks, with the call that remains between groups
            that exchanged heads. It writes its results into the last argument.
    """
    if call.strategy.ulysses_degree > 1:
        return heads_forward(call, q, k, v, attend)
    into = empty_partial(q)
    attend(call, Span(0, k.shape[2]), q, k, v, into)
    return into


def heads_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, attend: Attend | None = None) -> Partial:
    """Return attention of this rank's queries over the whole sequence; see `ring_forward`.

    `attend` is that of `spread_forward`; by default the executor of the call that remains.
    """
    brought = [_token_rows(t) for t in (q, k, v)]
    plan = call.heads_plan(q, k, brought, backward=False)
    streams = _streams(call, plan, q)
    arriving = _UnitPrefetch(call, plan, brought, streams)  # first: the host's time for all else is hidden
    delivered = empty_partial(q)
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
    plan = call.heads_plan(q, k, brought, backward=True)
    streams = _streams(call, plan, q)
    arriving = _UnitPrefetch(call, plan, brought, streams)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = (t.new_empty((plan.shapes.replicas, *t.shape)) for t in (k, v))
    inbox, outer = arriving.inbox, call.outer
    differentiate = executor_of(outer).backward

    def work(i: int, outbox: Tensor) -> None:
        queries, keys, values, *statistics = _tensors(inbox, plan.views[i], q.dtype)
        grads, own_lse, own_delta = statistics
        results = _tensors(outbox, plan.outbound[i].views, q.dtype)
        differentiate(outer, BackwardInputs(grads, queries, keys, values, own_lse, own_delta), Gradients(*results))

    targets = (grad_q, grad_k, grad_v)
    _by_units(call, plan, streams, arriving, work, targets, is_recorded=_is_recorded(call, plan))
    return Gradients(grad_q, *(_joined(t) for t in (grad_k, grad_v)))


_HEADS = Executor(heads_forward, heads_backward)
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
    """Attend unit by unit and bring the results home to their targets.

    Args:
        call: The attention.
        plan: What moves.
        streams: On which each unit's kernels run.
        arriving: The units' inputs.
        work: Attends with unit i and writes its results to an outbox.
        targets: Where the results of this rank's tokens go.
        is_recorded: Whether kernels run as CUDA graphs.
    """
    is_varying = plan.backward and bool(call.mask.starts)  # what it takes is padded by documents
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
    """Return whether the kernels of units run as CUDA graphs: their memory stays, and nothing moves between them."""
    is_local = call.outer.comm.size == 1
    return is_local and call.kernel.recordable and records_kernels(call.comm.transport, plan.sums_nbytes)


def _streams(call: AttentionCall, plan: HeadsPlan, q: Tensor) -> UnitStreams:
    """Return the streams of the units' kernels: one where transfers hold multiprocessors or are between them.

    And one where torch fills new memory, as its deterministic algorithms do: results are made after the streams have
    parted, and what came home on another one might be filled over.
    """
    is_free = call.comm.transport == "peer" and call.outer.comm.size == 1
    is_free = is_free and not torch.are_deterministic_algorithms_enabled()
    return UnitStreams(q.device, len(plan.units) if is_free and plan.shapes.tokens <= _SHORT else 1)


class _UnitPrefetch:
    """The tensors of one unit after another over all tokens. The first is under way from the start.

    Queries and what belongs to them come with the unit's heads, keys and values with its KV heads.
    """

    def __init__(self, call: AttentionCall, plan: HeadsPlan, brought: Sequence[Tensor], streams: UnitStreams) -> None:
        self._comm, self._plan, self._brought, self._streams = call.comm, plan, brought, streams
        self.inbox = call.comm.inbox(plan.nbytes, _IN)
        self._under_way: list[Transfer] = []
        self.start(0)

    def start(self, i: int) -> None:
        """Start unit i, if there is one: right behind a kernel, which hides the host's time too.

        Results of that kernel go home after it, so that nothing of the next unit waits for them.
        """
        if i < len(self._plan.units):
            with self._streams.turn(i):
                self._under_way.append(self._comm.push(self._plan.inbound[i], self._brought, self.inbox, _IN))

    def wait(self, i: int) -> None:
        """Let the current stream wait until the tensors of unit i are in the inbox; called in its turn."""
        self._under_way[i].wait()


def _token_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with the heads of a token one after another, a copy only where they are not.

    Ranks may hold tensors of different strides: what moves is then cut into the same blocks on all of them.
    """
    _, _, heads, head_dim = tensor.shape
    _, token, head, feature = tensor.stride()
    if feature == 1 and (head == head_dim or heads == 1) and token >= heads * head_dim:
        return tensor
    return tensor.contiguous()


def _tensors(buffer: Tensor, views: Sequence[StridedView], dtype: torch.dtype) -> list[Tensor]:
    """Return views of a buffer as tensors; the statistics among them are as wide as sums of `dtype`."""
    whole, first = {4: buffer.view(dtype)}, buffer.storage_offset()
    if len(views[-1].size) == 3:
        whole[3] = buffer.view(accumulation_dtype(dtype))
    return [
        at.as_strided(view.size, view.strides, first // at.element_size() + view.start)
        for view, at in ((view, whole[len(view.size)]) for view in views)
    ]


def _joined(replicas: Tensor) -> Tensor:
    """Add up the shares of the ranks that hold the same KV head."""
    if replicas.shape[0] == 1:
        return replicas[0]
    return replicas.sum(0, dtype=accumulation_dtype(replicas.dtype))
