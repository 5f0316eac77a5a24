"""Bytes of a training step at the moments at which memory can peak, for blocks computed by autograd: `StepMoments`.

`LeanMoments` of `bmburst.plan.memory` is for the memory-saving blocks of `bmburst.blocks.lean`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bmburst.blocks.config import AT_ONCE, TARGETS
from bmburst.plan.buffers import Buffers, attention_memory
from bmburst.plan.candidates import Candidate, Offload
from bmburst.plan.counts import (
    WIDE,
    Operators,
    adam_bytes,
    adapter_elements,
    block_matrices,
    block_parameters,
    four_bit_saving,
    held_block,
    mlp_matrix,
    table,
)
from bmburst.recompute.policy import BlockBytes

Lines = dict[str, float]
Moments = dict[str, Callable[[], Lines]]
_IDS = 8  # bytes of a token id, position or label
_VISITING = 2  # blocks whose weight shards are on the GPU, with offloaded weights


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherBlocks:
    """Bytes on the GPU that belong to other blocks when memory peaks in one block.

    Attributes:
        before: Tensors kept by the blocks before it.
        fetched: Offloaded tensors of a block before it that are being fetched.
        segment: Inputs, including its own, and attention's results that its segment has recomputed.
    """

    before: float = 0.0
    fetched: float = 0.0
    segment: float = 0.0

    @property
    def total(self) -> float:
        """All these bytes."""
        return self.before + self.fetched + self.segment


class StepMoments:
    """Bytes of a step's tensors at the moments in which one block runs, mostly the last block.

    Names are those of `bmburst/blocks`; `own` tokens are those of a tensor rank.

    Args:
        candidate: How the block is computed.
        operators: The operators between matrix products.
        others: Bytes of other blocks.
    """

    def __init__(self, candidate: Candidate, operators: Operators, others: OtherBlocks = OtherBlocks()) -> None:
        task, model = candidate.task, candidate.task.model
        self.others = others
        self.candidate, self.operators, self.task, self.model = candidate, operators, task, model
        self.attends = attention_memory(candidate.at_once(operators))
        self.rows = float(candidate.rows)
        self.own_rows = -(-candidate.rows // candidate.tensor)
        item = task.itemsize
        self.hidden = self.own_rows * model.hidden_size * item
        self.whole_hidden = self.rows * model.hidden_size * item  # for all tokens of a tensor group
        self.query = self.rows * candidate.own_heads * model.head_dim * item
        self.key = self.rows * candidate.own_kv_heads * model.head_dim * item
        self.statistics = self.rows * candidate.own_heads * WIDE
        self.inner = self.rows * (model.intermediate_size // candidate.tensor) * item
        # The gradient of the MLP's result is the stream's gradient itself, unless residual updates have a factor.
        self.scaled = 0.0 if model.residual_scale == 1 else self.hidden
        # A tensor group gathers the gradient of the MLP's result for all tokens, in addition to the stream's gradient.
        self.gathered_grad = self.whole_hidden if candidate.tensor > 1 else 0.0
        self.norm_statistic = float(self.own_rows * WIDE)
        # In a tensor group, a norm's result for own tokens and the gathered one are two tensors.
        self.normed = self.whole_hidden
        self.attended = self.query + self.statistics
        # A per-head norm keeps its input, and attention gets another tensor.
        of_heads = self.query + self.key + self.rows * (candidate.own_heads + candidate.own_kv_heads) * WIDE
        self.normed_heads = of_heads if model.qk_norm else 0.0
        self.is_cut = candidate.mlp_rows < candidate.rows
        self.projected_input, self.mlp_input, self.activation = self._factors_of_trained()
        self.chunk_inner = self.inner * candidate.mlp_rows / candidate.rows
        self.policy = candidate.policy
        self.block = BlockBytes(self.hidden, self.attended, self._recomputed(), 2 * self.inner)

    def states(self) -> Lines:
        """Tensors that are alive throughout the step."""
        task, model, candidate = self.task, self.model, self.candidate
        share, trained = task.parameters / candidate.shards, task.trained / candidate.shards
        is_hosted = candidate.offload is Offload.WEIGHTS
        blocks = block_parameters(model, task.lora) / candidate.shards if is_hosted else 0.0
        of_blocks = task.trained_in_blocks / candidate.shards if is_hosted else 0.0  # those with gradients
        saved = task.four_bit_saving / candidate.shards
        visiting = _VISITING * (blocks * task.itemsize - saved) if is_hosted else 0.0
        return {
            "weights": (share - blocks) * task.itemsize - (0.0 if is_hosted else saved),
            "gradients": (trained - of_blocks) * task.itemsize,
            "shards on their way": (visiting + of_blocks * task.itemsize) / model.num_layers,
            "optimizer": trained * adam_bytes(task.dtype, task.state) if candidate.offload is Offload.NOTHING else 0.0,
            "reference's weights": self._reference(is_hosted),
            "whole weights (ZeRO-2)": self._gathered_bytes() * model.num_layers if candidate.zero == 2 else 0.0,
            "token ids, angles": self._ids(),
        }

    def _reference(self, is_hosted: bool) -> float:
        """Bytes of a second model: shards in any ZeRO stage, because BMTrain keeps no frozen block whole."""
        if not self.task.second_model:
            return 0.0
        away = block_parameters(self.model) * (1 - _VISITING / self.model.num_layers) if is_hosted else 0.0
        return (self.model.num_parameters - away) / self.candidate.shards * self.task.itemsize

    def left_for_later(self) -> float:
        """Return the bytes of what a block's linear layers keep for gradients of weights that come later.

        These are their inputs and the gradients of their outputs. An MLP in chunks computes its gradients at once.
        """
        attention = self.normed + 2 * self.query + 2 * self.key + self.whole_hidden
        mlp = 0.0 if self.is_cut else self.normed + 3 * self.inner + self.whole_hidden
        return attention + mlp

    def moments(self) -> Moments:
        """The moments at which memory can peak."""
        return {
            "attention forward": self._attention_forward,
            "MLP forward": self._mlp_forward,
            "loss": self._loss,
            "last norm backward": self._last_norm,
            **self.in_backward(),
            "from block to block": self._from_block_to_block,
        }

    def in_backward(self) -> Moments:
        """The moments in the block's backward."""
        in_chunks = {"MLP backward": self._cut_mlp_backward, "MLP gradients": self._rounded_sums}
        whole = {
            "MLP backward": self._activation_backward,
            "down projection backward": self._down_backward,
            "gate and up backward": self._gate_up_backward,
        }
        return {**(in_chunks if self.is_cut else whole), "attention backward": self._attention_backward}

    def kept(self) -> float:
        """Bytes that the block keeps on the GPU for its backward."""
        return self.policy.kept(self.block)

    def hosted(self) -> float:
        """Bytes that the block keeps in host memory."""
        return self.policy.hosted(self.block)

    def mlp_in_host(self) -> float:
        """Bytes of them that are outputs of the MLP's gate and up matrices."""
        return self.block.mlp if self.policy.offloads_mlp else 0.0

    def again(self) -> float:
        """Bytes of attention's results that its segment recomputes, or fetches, before the block's backward."""
        return self.block.attended * (1.0 if self.policy.offload == "all" else 1.0 - self.policy.attention)

    def _factors_of_trained(self) -> tuple[float, float, float]:
        """Return the bytes that are kept of the inputs of q, k, v, of gate and up, and of down.

        The input of a matrix is kept for the weight gradient. A frozen matrix without an adapter has no gradient, so
        its input is not kept. An MLP in chunks always keeps its input.
        """
        trained = self.task.lora.matrices if self.task.lora else TARGETS

        def kept(nbytes: float, *names: str) -> float:
            return nbytes if any(name in trained for name in names) else 0.0

        mlp_input = self.normed if self.is_cut else kept(self.normed, "gate_proj", "up_proj")
        return kept(self.normed, "q_proj", "k_proj", "v_proj"), mlp_input, kept(self.inner, "down_proj")

    def _recomputed(self) -> float:
        """Activations other than input and attention's results: norms, q, k, v, stream, gate, up, activation.

        An MLP in chunks keeps only its input.
        """
        inner = 0.0 if self.is_cut else 2 * self.inner + self.activation
        return self._kept_before_attention() + self.hidden + self.norm_statistic + self.mlp_input + inner

    def _kept_before_attention(self) -> float:
        return self.norm_statistic + self.projected_input + self.query + 2 * self.key + self.normed_heads

    def _all_kept(self, less: float = 0.0) -> float:
        return self.others.before + self.kept() - less

    def _block_bytes(self) -> float:
        return held_block(self.model, self.candidate.tensor) * self.task.itemsize + self._adapter_bytes()

    def _gathered_bytes(self) -> float:
        """A block as ZeRO gathers it: its matrices may be in 4 bits."""
        return self._block_bytes() - four_bit_saving(self.model, self.task.lora, self.task.itemsize)

    def _dequantized_bytes(self) -> float:
        """A block's matrices in the run's dtype, beside those in 4 bits."""
        is_4bit = self.task.lora is not None and self.task.lora.is_4bit
        return float(block_matrices(self.model) * self.task.itemsize) if is_4bit else 0.0

    def _adapter_bytes(self) -> float:
        return float(adapter_elements(self.model, self.task.lora, self.candidate.tensor) * self.task.itemsize)

    def _of_matrices(self, nbytes: float) -> float:
        """Return `nbytes`, the bytes of weight gradients of matrices, or 0 if the matrices are frozen."""
        return 0.0 if self.task.lora else nbytes

    def _of_head(self, nbytes: float) -> float:
        """Return `nbytes`, the bytes of the head's gradient, or 0 if the head is frozen."""
        return 0.0 if self.task.lora and not self.task.lora.trains_head else nbytes

    def _weights(self) -> float:
        """Weights of the blocks that ZeRO-3 has gathered at a time, and of one block that is dequantized.

        With ZeRO-2 all blocks are on the GPU and counted elsewhere.
        """
        return self._slots() + self._dequantized_bytes()

    def _slots(self) -> float:
        """The memory in which ZeRO-3 gathers weights; it is kept from forward to backward."""
        return self._gathered_bytes() * min(AT_ONCE, self.model.num_layers) if self.candidate.zero == 3 else 0.0

    def _gradients(self) -> float:
        return self._adapter_bytes() if self.task.lora else self._block_bytes()

    def _weights_and_gradients(self, *, own: bool) -> float:
        """Also the memories in which gradients are put together, which take turns once they are allocated.

        One is for the gradients of the block after this one, which are scattered. With `own` another one is for those
        of this block.
        """
        return self._weights() + min(self._memories(), self.model.num_layers - (not own)) * self._gradients()

    def _memories(self) -> int:
        """Return how many memories of gradients there are: one, if backward writes gradients elsewhere at first."""
        return 1 if self.task.lora else AT_ONCE

    def _ids(self) -> float:
        angles = self.rows * self.model.head_dim * WIDE
        labels = self.task.micro_batch * self.candidate.tokens * 4.0 * _IDS
        passes = self.candidate.micro_steps * self.task.micro_batch
        return angles + labels + passes * (self.task.sequence + 1.0) * _IDS

    def _table(self) -> float:
        return float(table(self.model) * self.task.itemsize)

    def _elements(self, alive: float, tensor: float) -> float:
        """Bytes alive inside an operator that holds `alive` bytes per element of a tensor."""
        return alive * tensor / self.task.itemsize

    def _attention_forward(self) -> Lines:
        """Attention of the last block: all blocks before it keep their activations."""
        return {
            "kept for backward": self._kept_before(),
            "gathered weights, gradients": self._weights(),
            "embedding and head": self._table(),
            "block in work": self.norm_statistic + self.normed + self.query + 2 * self.key + self.normed_heads,
            "attention": self._attention(self.attends.forward),
        }

    def _mlp_forward(self) -> Lines:
        itemsize = self.task.itemsize
        others, attention = (
            (0.0, self.policy.attention) if self.policy.recomputes else (self._kept_before_attention(), 1.0)
        )
        result = self.whole_hidden if self.is_cut else 0.0
        return {
            "kept for backward": self._kept_before() + attention * self.attended,
            "gathered weights, gradients": self._weights(),
            "embedding and head": self._table(),
            "block in work": others + self.hidden + self.norm_statistic + self.normed + result,
            "MLP chunk" if self.is_cut else "MLP": 2 * self.chunk_inner,
            "elementwise": self._elements(self.operators.swiglu_forward_alive(itemsize), self.chunk_inner),
        }

    def _loss(self) -> Lines:
        """The last hidden state, its norm and gradient, the head and its gradient in fp32, one chunk of logits.

        Also the collected logit gradients, and the hidden states to multiply them with.
        """
        task, model, operators = self.task, self.model, self.operators
        chunk = min(task.loss_chunk, self.own_rows)
        logits = model.vocab_size * operators.loss_alive(task.itemsize, chunk, self.own_rows)
        states = min(self.own_rows, chunk * operators.gathered_chunks(task.itemsize)) * model.hidden_size
        return {
            "kept for backward": self._all_kept() + self.hidden + self.norm_statistic,
            "not yet let go to host memory": self._visiting(backward=False),
            "gathered weights, gradients": self._slots(),
            "embedding and head": self._table() + self._of_head(table(model) * float(WIDE)),
            "gradients in flight": 2 * self.hidden,
            "loss chunk": logits + states * float(task.itemsize),
        }

    def _last_norm(self) -> Lines:
        inside = self._elements(self.operators.norm_backward_alive(self.task.itemsize), self.hidden)
        return {
            "kept for backward": self._all_kept() + self.hidden + self.norm_statistic,
            "not yet let go to host memory": self._visiting(backward=False),
            "gathered weights, gradients": self._slots(),
            "gradients in flight": self.hidden,
            "elementwise": inside,
        }

    def _activation_backward(self) -> Lines:
        """All tensors of the block except the activation, the copies that its backward makes, the gradient of down."""
        inside = self._elements(self.operators.swiglu_backward_alive(self.task.itemsize), self.inner)
        return {
            **self._block_in_backward(gone=self.activation, own=True),
            "gradients in flight": self.hidden + self.gathered_grad + self.inner,
            "elementwise": inside,
        }

    def _down_backward(self) -> Lines:
        """The activation is alive, its gradient, and the gradient of the down projection."""
        return {
            **self._block_in_backward(own=True),
            "gradients in flight": self.hidden + self.gathered_grad + self.inner,
        }

    def _gate_up_backward(self) -> Lines:
        """Gradients of gate and up, of their input, and of all three matrices."""
        return {
            **self._block_in_backward(gone=2 * self.inner + self.activation, own=True),
            "gradients in flight": self.hidden + self.scaled + self.whole_hidden + 2 * self.inner,
        }

    def _from_block_to_block(self) -> Lines:
        """The gradients of a block are ready to be scattered; its activations are already freed."""
        copied = self._gradients() if self._memories() == 1 else 0.0
        return {
            "kept for backward": self._all_kept(self.kept()) + self.others.segment,
            "back from host memory": self._visiting(backward=True),
            "gathered weights, gradients": copied + self._weights_and_gradients(own=True),
            "gradients in flight": self.hidden,
        }

    def _cut_mlp_backward(self) -> Lines:
        """Gate, up, activation and its gradient for a chunk; accumulated weight gradients; the input's gradient."""
        inside = self._elements(self.operators.swiglu_backward_alive(self.task.itemsize), self.chunk_inner)
        return {
            **self._block_in_backward(),
            "gradients in flight": self.hidden + self.gathered_grad + self.whole_hidden + self.scaled,
            "sums of gradients in fp32": self._mlp_sums(),
            "MLP chunk": 4 * self.chunk_inner,
            "elementwise": inside,
        }

    def _rounded_sums(self) -> Lines:
        """The weight gradients of an MLP in chunks are rounded to where they are scattered."""
        return {
            **self._block_in_backward(own=True),
            "gradients in flight": self.hidden + self.gathered_grad + self.whole_hidden + self.scaled,
            "sums of gradients in fp32": self._mlp_sums(),
        }

    def _mlp_sums(self) -> float:
        return self._of_matrices(3.0 * WIDE * mlp_matrix(self.model, self.candidate.tensor))

    def _attention_backward(self) -> Lines:
        return {
            **self._block_in_backward(gone=self._recomputed() - self._kept_before_attention(), own=True),
            "gradients in flight": self.hidden + self.query,
            "attention": self._attention(self.attends.backward),
        }

    def _block_in_backward(self, *, gone: float = 0.0, own: bool = False) -> Lines:
        """Bytes that all blocks keep, and the recomputed tensors of the last one that its backward still needs.

        `own`: whether gradients of its weights exist.
        """
        gathered = {"gathered weights, gradients": self._weights_and_gradients(own=own)}
        if not self.policy.recomputes:
            return {"kept for backward": self._all_kept(gone)} | gathered
        # The whole results of attention exist, in addition to the part that was kept or fetched from the host.
        kept = self.policy.attention
        more = 1.0 - kept if self.policy.offload == "all" or kept == 1 else 1.0
        return {
            "kept for backward": self._all_kept(),
            "back from host memory": self._visiting(backward=True),
            "block in work": more * self.attended + self._recomputed() - gone,
            **gathered,
        }

    def _kept_before(self) -> float:
        """Bytes that all blocks before this one keep, and its input."""
        return self.others.before + self.hidden

    def _visiting(self, *, backward: bool) -> float:
        return self.hosted() + (self.others.fetched if backward else 0.0)

    def _attention(self, buffers: Buffers) -> float:
        inside = buffers.results + buffers.working
        inside += 0.0 if self.attends.outside else buffers.boxes
        return inside + (0.0 if self.attends.in_graphs else buffers.kernel)
