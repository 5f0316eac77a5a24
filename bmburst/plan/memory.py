"""Predicts the peak memory of a training step, line by line.

A step has few moments at which memory can peak: inside the last block forward, where all activations are alive; the
head and its loss; the backward of the last norm; inside the last block backward, at the activation, at the products of
its MLP and at its attention; and where backward passes to the next block. Each moment is summed up; the largest is the
peak. The step is the second or a later one: gradients and optimizer states exist.

Where the first layers are recomputed and the last ones keep everything, the last block is one of the latter. When
backward reaches the recomputed layers, the others have freed what they kept, so memory does not peak again. This is why
policies recompute the first layers (`bmburst.recompute.policy`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from bmburst.plan.buffers import attention_buffers, held_by_graphs, held_outside
from bmburst.plan.candidates import Candidate, Task
from bmburst.plan.counts import CURRENT, WIDE, Operators, adam_bytes, held_block, mlp_matrix, table
from bmburst.recompute.policy import BlockBytes
from bmburst.schedule.hardware import Hardware

Lines = dict[str, float]
HOST_SHARE = 0.9  # of a host's memory; the rest is the system's and the processes' own
_IDS = 8  # bytes of a token id, position or label


@dataclass(frozen=True)
class Memory:
    """Peak memory of a step on a rank.

    Attributes:
        moment: The moment of the peak.
        lines: Bytes of torch's allocator at that moment, by use.
        outside: Bytes outside of torch's allocator, by use.
        capacity: Bytes of the GPU.
        moments: Bytes of torch's allocator at each moment.
        host: Bytes of a node's host memory, by use.
        host_capacity: Bytes that the host has for them.
    """

    moment: str
    lines: Mapping[str, float]
    outside: Mapping[str, float]
    capacity: float
    moments: Mapping[str, float]
    host: Mapping[str, float]
    host_capacity: float

    @cached_property
    def allocated(self) -> float:
        """Bytes of torch's allocator: `torch.cuda.max_memory_allocated`."""
        return sum(self.lines.values())

    @cached_property
    def total(self) -> float:
        """All bytes of the GPU."""
        return self.allocated + sum(self.outside.values())

    @cached_property
    def in_host(self) -> float:
        """All bytes of the host."""
        return sum(self.host.values())

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the GPU and the host."""
        return self.total <= self.capacity and self.in_host <= self.host_capacity


def memory_of(candidate: Candidate, hardware: Hardware, *, operators: Operators = CURRENT) -> Memory:
    """Return the peak memory of a step.

    Args:
        candidate: The way to train.
        hardware: The machine.
        operators: The operators between matrix products.
    """
    parts = _parts(candidate, operators)
    first, last = parts[0], parts[-1]
    held = last.states() | {"workspace": hardware.workspace}
    found = {name: held | moment() for name, moment in last.moments().items()}
    totals = {name: sum(lines.values()) for name, lines in found.items()}
    moment = max(totals, key=lambda name: totals[name])
    outside = {
        "boxes that peers read": held_outside(candidate),
        "kept by CUDA graphs": held_by_graphs(candidate),
        **_libraries(candidate.task, hardware),
    }
    return Memory(
        moment,
        _used(found[moment]),
        _used(outside),
        hardware.memory,
        totals,
        _used(first.in_host()),
        HOST_SHARE * hardware.host_memory,
    )


def reserved_memory(task: Task, hardware: Hardware) -> float:
    """Return the bytes of a GPU that tensors of a run cannot have: CUDA context, libraries, NCCL."""
    return sum(_libraries(task, hardware).values())


def _libraries(task: Task, hardware: Hardware) -> Lines:
    """Return the bytes of CUDA context, libraries and NCCL; NCCL's buffers for other nodes were not measured."""
    ranks = task.gpus_per_node if task.gpus > 1 else 0
    return {"context and libraries": hardware.reserved, "NCCL": hardware.nccl_memory * ranks}


def block_bytes(candidate: Candidate) -> BlockBytes:
    """Return the bytes of a block's tensors by how policies treat them."""
    return _Parts(candidate, CURRENT, layers=1).block


def _parts(candidate: Candidate, operators: Operators) -> "list[_Parts]":
    """Return each kind of layer, the first layers first, linked to the kind before it."""
    found: list[_Parts] = []
    for kind, layers in candidate.kinds:
        found.append(_Parts(kind, operators, layers=layers, before=found[-1] if found else None))
    return found


def _used(lines: Mapping[str, float]) -> Lines:
    return {name: nbytes for name, nbytes in lines.items() if nbytes}


class _Parts:
    """Bytes of a step's tensors where the last block is of one kind.

    Names as in `bmburst/blocks`; `own` tokens are those of a tensor rank.

    Args:
        candidate: How the blocks of this kind are computed.
        operators: The operators between matrix products.
        layers: Blocks of this kind.
        before: The blocks of another kind before them.
    """

    def __init__(
        self, candidate: Candidate, operators: Operators, *, layers: int, before: "_Parts | None" = None
    ) -> None:
        task, model = candidate.task, candidate.task.model
        self.layers, self.before = layers, before
        self.candidate, self.operators, self.task, self.model = candidate, operators, task, model
        self.rows = float(candidate.rows)
        self.own_rows = -(-candidate.rows // candidate.tensor)
        item = task.itemsize
        self.hidden = self.own_rows * model.hidden_size * item
        self.whole_hidden = self.rows * model.hidden_size * item  # all of a tensor group's tokens
        self.query = self.rows * candidate.own_heads * model.head_dim * item
        self.key = self.rows * candidate.own_kv_heads * model.head_dim * item
        self.statistics = self.rows * candidate.own_heads * WIDE
        self.inner = self.rows * (model.intermediate_size // candidate.tensor) * item
        # The gradient of what the MLP adds to the stream is the stream's own, unless it has a factor.
        self.scaled = 0.0 if model.residual_scale == 1 else self.hidden
        self.norm_statistic = float(self.own_rows * WIDE)
        # Where a tensor group gathers, each norm's own tokens and all tokens are two tensors.
        self.normed = self.whole_hidden
        self.attended = self.query + self.statistics
        self.is_cut = candidate.mlp_rows < candidate.rows
        self.chunk_inner = self.inner * candidate.mlp_rows / candidate.rows
        self.policy = candidate.policy
        self.block = BlockBytes(self.hidden, self.attended, self._recomputed())

    def states(self) -> Lines:
        """Tensors that are alive throughout the step."""
        task, model, candidate = self.task, self.model, self.candidate
        share = model.num_parameters / task.gpus
        return {
            "weights": share * task.itemsize,
            "gradients": share * task.itemsize,
            "optimizer": 0.0 if task.host_optimizer else share * adam_bytes(task.itemsize),
            "whole weights (ZeRO-2)": self._block_bytes() * model.num_layers if candidate.zero == 2 else 0.0,
            "token ids, angles": self._ids(),
        }

    def moments(self) -> dict[str, Callable[[], Lines]]:
        """The moments at which memory can peak."""
        in_chunks = {"MLP backward": self._cut_mlp_backward}
        whole = {
            "MLP backward": self._activation_backward,
            "down projection backward": self._down_backward,
            "gate and up backward": self._gate_up_backward,
        }
        between = {"from block to block": self._from_block_to_block}
        return {
            "attention forward": self._attention_forward,
            "MLP forward": self._mlp_forward,
            "loss": self._loss,
            "last norm backward": self._last_norm,
            **(in_chunks if self.is_cut else whole),
            "attention backward": self._attention_backward,
            **(between if self.model.num_layers > 1 else {}),
        }

    def kept(self) -> float:
        """Bytes that a block keeps for its backward."""
        return self.policy.kept(self.block)

    def in_host(self) -> Lines:
        """Bytes in a node's host memory."""
        task = self.task
        hosted = self.policy.hosted(self.block) * self.layers * task.gpus_per_node
        state = adam_bytes(task.itemsize) * self.model.num_parameters / task.nodes if task.host_optimizer else 0.0
        return {"what blocks keep": hosted, "optimizer": state}

    def _recomputed(self) -> float:
        """Activations beside input and attention's results: norms, q, k, v, stream, gate, up, activation.

        An MLP in chunks keeps only its input.
        """
        return self._before_attention() + self._before_mlp() + (0.0 if self.is_cut else 3 * self.inner)

    def _before_attention(self) -> float:
        return self.norm_statistic + self.normed + self.query + 2 * self.key

    def _before_mlp(self) -> float:
        return self.hidden + self.norm_statistic + self.normed

    def _all_kept(self, less: float = 0.0) -> float:
        return self._kept_in_front() + self.kept() * self.layers - less

    def _kept_in_front(self) -> float:
        """Bytes that the blocks before these keep, with the last one's that are on their way to host memory."""
        return 0.0 if self.before is None else self.before._all_kept() + self.before._visiting(backward=False)

    def _block_bytes(self) -> float:
        return float(held_block(self.model, self.candidate.tensor) * self.task.itemsize)

    def _weights(self) -> float:
        """A block's weights as ZeRO-3 gathers them; ZeRO-2 has them all the time."""
        return self._block_bytes() if self.candidate.zero == 3 else 0.0

    def _weights_and_gradients(self) -> float:
        return self._weights() + self._block_bytes()

    def _ids(self) -> float:
        angles = self.rows * self.model.head_dim * WIDE
        labels = self.task.micro_batch * self.candidate.tokens * 4.0 * _IDS
        passes = self.candidate.micro_steps * self.task.micro_batch
        return angles + labels + passes * (self.task.sequence + 1.0) * _IDS

    def _table(self) -> float:
        return float(table(self.model) * self.task.itemsize)

    def _mlp_matrix(self) -> float:
        return float(mlp_matrix(self.model, self.candidate.tensor) * self.task.itemsize)

    def _elements(self, alive: float, tensor: float) -> float:
        """Bytes alive inside an operator that holds `alive` bytes for each element of a tensor."""
        return alive * tensor / self.task.itemsize

    def _attention_forward(self) -> Lines:
        """Attention of the last block: all blocks before it keep their activations."""
        buffers = attention_buffers(self.candidate, backward=False)
        return {
            "kept for backward": self._kept_before(),
            "gathered weights, gradients": self._weights(),
            "embedding and head": self._table(),
            "block in work": self._before_attention(),
            "attention": self._attention(buffers),
        }

    def _mlp_forward(self) -> Lines:
        itemsize = self.task.itemsize
        others, attention = (0.0, self.policy.attention) if self.policy.recomputes else (self._before_attention(), 1.0)
        result = self.whole_hidden if self.is_cut else 0.0
        return {
            "kept for backward": self._kept_before() + attention * self.attended,
            "gathered weights, gradients": self._weights(),
            "embedding and head": self._table(),
            "block in work": others + self._before_mlp() + result,
            "MLP chunk" if self.is_cut else "MLP": 2 * self.chunk_inner,
            "elementwise": self._elements(self.operators.swiglu_forward_alive(itemsize), self.chunk_inner),
        }

    def _loss(self) -> Lines:
        """The last hidden state, its norm and gradient, the head and its gradient in fp32, one chunk of logits.

        Also the gathered gradients of logits and the hidden states that they will be multiplied with.
        """
        task, model, operators = self.task, self.model, self.operators
        chunk = min(task.loss_chunk, self.own_rows)
        logits = model.vocab_size * operators.loss_alive(task.itemsize, chunk, self.own_rows)
        states = min(self.own_rows, chunk * operators.gathered_chunks(task.itemsize)) * model.hidden_size
        return {
            "kept for backward": self._all_kept() + self.hidden + self.norm_statistic,
            "not yet let go to host memory": self._visiting(backward=False),
            "embedding and head": self._table() + table(model) * float(WIDE),
            "gradients in flight": 2 * self.hidden,
            "loss chunk": logits + states * float(task.itemsize),
        }

    def _last_norm(self) -> Lines:
        inside = self._elements(self.operators.norm_backward_alive(self.task.itemsize), self.hidden)
        return {
            "kept for backward": self._all_kept() + self.hidden + self.norm_statistic,
            "not yet let go to host memory": self._visiting(backward=False),
            "gradients in flight": self.hidden,
            "elementwise": inside,
        }

    def _activation_backward(self) -> Lines:
        """All tensors of the block but the activation are alive, and the copies that its backward makes."""
        inside = self._elements(self.operators.swiglu_backward_alive(self.task.itemsize), self.inner)
        return {
            **self._block_in_backward(gone=self.inner),
            "gradients in flight": self.hidden + self.inner,
            "elementwise": inside,
        }

    def _down_backward(self) -> Lines:
        """The activation is alive beside its gradient and the gradient of the down projection."""
        return {
            **self._block_in_backward(),
            "gradients in flight": self.hidden + self.inner,
            "gradients of matrices": self._mlp_matrix(),
        }

    def _gate_up_backward(self) -> Lines:
        """Gradients of gate and up, of their input, and of both matrices."""
        return {
            **self._block_in_backward(gone=3 * self.inner),
            "gradients in flight": self.hidden + self.scaled + self.whole_hidden + 2 * self.inner,
            "gradients of matrices": 2 * self._mlp_matrix(),
        }

    def _from_block_to_block(self) -> Lines:
        """Weights and gradients of two blocks are alive; the activations of the first one are freed already."""
        return {
            "kept for backward": self._all_kept(self.kept()),
            "back from host memory": self._visiting(backward=True),
            "gathered weights, gradients": 2 * self._weights_and_gradients(),
            "gradients in flight": self.hidden,
        }

    def _cut_mlp_backward(self) -> Lines:
        """Gate, up, activation and its gradient of a chunk; sums of the weights' gradients; the input's gradient."""
        sums = 3.0 * WIDE * mlp_matrix(self.model, self.candidate.tensor)
        inside = self._elements(self.operators.swiglu_backward_alive(self.task.itemsize), self.chunk_inner)
        return {
            **self._block_in_backward(),
            "gradients in flight": self.hidden + self.whole_hidden + self.scaled,
            "sums of gradients in fp32": sums,
            "MLP chunk": 4 * self.chunk_inner,
            "elementwise": inside,
        }

    def _attention_backward(self) -> Lines:
        buffers = attention_buffers(self.candidate, backward=True)
        return {
            **self._block_in_backward(gone=self._recomputed() - self._before_attention()),
            "gradients in flight": self.hidden + self.query,
            "attention": self._attention(buffers),
        }

    def _block_in_backward(self, *, gone: float = 0.0) -> Lines:
        """Bytes that all blocks keep, and the recomputed tensors of the last one that its backward still needs."""
        gathered = {"gathered weights, gradients": self._weights_and_gradients()}
        if not self.policy.recomputes:
            return {"kept for backward": self._all_kept(gone)} | gathered
        # The results of attention are whole again, beside the part that is kept of them or has come from the host.
        kept = self.policy.attention
        more = 1.0 - kept if self.policy.offload == "all" or kept == 1 else 1.0
        return {
            "kept for backward": self._all_kept(),
            "back from host memory": self._visiting(backward=True),
            "block in work": more * self.attended + self._recomputed() - gone,
            **gathered,
        }

    def _kept_before(self) -> float:
        """Bytes that all blocks before the last keep, and the input of the last."""
        return self._kept_in_front() + self.kept() * (self.layers - 1) + self.hidden

    def _visiting(self, *, backward: bool) -> float:
        return self.policy.visiting(self.block, self.layers, backward=backward)

    def _attention(self, buffers: tuple[float, float, float, float]) -> float:
        results, kernel, working, boxes = buffers
        inside = results + working
        inside += 0.0 if held_outside(self.candidate) else boxes
        return inside + (0.0 if held_by_graphs(self.candidate) else kernel)
