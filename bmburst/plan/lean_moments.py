"""Bytes of a training step at the moments at which memory can peak, for blocks of `bmburst.blocks.lean`."""

from bmburst.plan.buffers import attention_buffers
from bmburst.plan.candidates import Candidate
from bmburst.plan.counts import WIDE, Operators, held_block, mlp_matrix
from bmburst.plan.moments import Lines, Moments, Others, StepMoments


class LeanMoments(StepMoments):
    """`StepMoments` for a block of `bmburst.blocks.lean`; that module's docstring describes the steps."""

    def __init__(self, candidate: Candidate, operators: Operators, others: Others) -> None:
        super().__init__(candidate, operators, others)
        self.part = candidate.mlp_rows / candidate.rows  # fraction of the tokens in one chunk
        self.heads = self.attends.own_heads / candidate.own_heads  # fraction of the heads in one attention call
        self.projected = self.query + 2 * self.key

    def in_backward(self) -> Moments:
        """See `StepMoments.in_backward`."""
        again = {} if self.policy.attention == 1 else {"attention again": self._attention_again}
        return {
            **again,
            "MLP backward": self._mlp_backward,
            "gate and up backward": self._gate_up_backward,
            "attention backward": self._attention_backward,
            **({"head norms backward": self._head_norms_backward} if self.model.qk_norm else {}),
            "projections backward": self._projections_backward,
        }

    def _recomputed(self) -> float:
        return 0.0

    @property
    def _joins(self) -> bool:
        """Whether forward collects the output of all heads in one tensor, which the returned stream overwrites."""
        return not self.policy.attention and self.hidden == self.query

    def _attention_forward(self) -> Lines:
        whole = self.query if self._joins and self.heads < 1 else (1 - self.heads) * self.attended
        return {
            "kept for backward": self._kept_before(),
            "gathered weights, gradients": self._weights(),
            "embedding and head": self._table(),
            "not yet let go to host memory": self._mlp_in_host(),  # of the block before
            "attention's output": whole,
            "heads in work": self.heads * self.projected + self._attention(self._buffers(backward=False)),
        }

    def _mlp_forward(self) -> Lines:
        itemsize = self.task.itemsize
        outputs = self.query if self._joins else self.attended
        return {
            "kept for backward": self._kept_before(),
            "gathered weights, gradients": self._weights(),
            "embedding and head": self._table(),
            "attention's output": outputs + (0.0 if self._joins else self.hidden),
            "not yet let go to host memory": self._mlp_in_host() * (1 - self.part),
            "tokens in work": self.part * (2 * self.hidden + self.norm_statistic) + 2 * self.chunk_inner,
            "elementwise": self._elements(self.operators.swiglu_forward_alive(itemsize), self.chunk_inner),
        }

    def _attention_again(self) -> Lines:
        return {
            **self._block_in_backward(),
            "gradients in flight": self.hidden,
            "attention's output": (1 - self.heads) * self.attended,
            "heads in work": self.heads * self.projected + self._attention(self._buffers(backward=False)),
        }

    def _mlp_backward(self) -> Lines:
        inside = self._elements(self.operators.swiglu_backward_alive(self.task.itemsize), self.chunk_inner)
        streams = 3 * self.hidden + self.scaled + self.norm_statistic
        sums = 0.0 if self.part == 1 else self._sums(3 * mlp_matrix(self.model, 1) + self._output_matrix())
        gone = self.part * self._mlp_in_host()  # when the second chunk begins, which is the first with sums
        return {
            **self._block_in_backward(),
            "gradients in flight": self.hidden,
            "attention's output": self._held_output(),
            "sums of gradients": max(0.0, sums - gone),
            "tokens in work": self.part * streams + (2 if self._mlp_in_host() else 4) * self.chunk_inner,
            "elementwise": inside,
        }

    def _gate_up_backward(self) -> Lines:
        """The input gradient of gate and up is summed in fp32; on a CPU both factors are copied to fp32."""
        numbers = self.part * self.hidden / self.task.itemsize
        copied = (
            mlp_matrix(self.model, 1) + self.chunk_inner / self.task.itemsize if self.operators.wide_copies else 0.0
        )
        return {
            **self._block_in_backward(),
            "gradients in flight": self.hidden,
            "attention's output": self._held_output(),
            "sums of gradients": self._sums(3 * mlp_matrix(self.model, 1)),
            "tokens in work": self.part * (3 * self.hidden + self.scaled)
            + (0 if self._mlp_in_host() else 2) * self.chunk_inner,
            "in fp32": WIDE * (numbers + copied),
        }

    def _held_output(self) -> float:
        """Return the bytes of attention's output, and of its inputs if all heads are in one call."""
        ready = self.projected if self.heads == 1 and self.policy.attention < 1 else 0.0
        return self._output() + ready + (self.part * self.query if self.heads < 1 else 0.0)

    def _attention_backward(self) -> Lines:
        others = 1 - self.heads
        return {
            **self._block_in_backward(gone=others * self._let_go() + self._joined_part(), is_fed=True),
            "gradients in flight": self.hidden,
            "gradients of heads": others * self.projected,
            "sums of gradients": self._sums(3 * mlp_matrix(self.model, 1) + self._output_matrix()),
            "heads in work": self.heads * (self.projected + self.query + (self.attended if self._output() else 0.0))
            + self._attention(self._buffers(backward=True)),
        }

    def _head_norms_backward(self) -> Lines:
        """Queries are projected again and normed, and their norm is differentiated; then the same for keys."""
        again = max(2 * self.query, self.query + 2 * self.key)
        before_projections = 3 * mlp_matrix(self.model, 1) + self._output_matrix()
        return {
            **self._block_in_backward(gone=self._let_go() + self._joined_part(), is_fed=True),
            "gradients in flight": self.hidden,
            "gradients of heads": self.projected,
            "sums of gradients": self._sums(before_projections if self.part == 1 else held_block(self.model, 1)),
            "tokens in work": self.part
            * (self._turned_gradients() + again + self.statistics + self.hidden + self.norm_statistic),
            "elementwise": self._elements(
                self.operators.norm_backward_alive(self.task.itemsize), self.part * self.query
            ),
        }

    def _turned_gradients(self) -> float:
        """Return the bytes of the gradients of all heads, concatenated if they come in groups, and rotated back."""
        return (self.projected if self.heads < 1 else 0.0) + self.query + self.key

    def _projections_backward(self) -> Lines:
        return {
            **self._block_in_backward(gone=self._let_go() + self._joined_part(), is_fed=True),
            "gradients in flight": self.hidden,
            "gradients of heads": self.projected,
            "sums of gradients": self._sums(held_block(self.model, 1)),
            "tokens in work": self.part * (self._turned_gradients() + 2 * self.hidden + self.norm_statistic),
            "elementwise": self._elements(
                self.operators.norm_backward_alive(self.task.itemsize), self.part * self.hidden
            ),
        }

    def _block_in_backward(self, *, gone: float = 0.0, is_fed: bool = False) -> Lines:
        """`is_fed`: whether the MLP's backward is done, which frees what was kept of it."""
        return {
            "kept for backward": self._all_kept(gone),
            "computed again by its segment": self.others.segment,
            "back from host memory": self._visiting(backward=True) - (self._mlp_in_host() if is_fed else 0.0),
            "gathered weights, gradients": self._weights_and_gradients(),
        }

    def _mlp_in_host(self) -> float:
        """Return the bytes of the outputs of gate and up that are kept in host memory."""
        return self.block.mlp if self.policy.offloads_mlp else 0.0

    def _let_go(self) -> float:
        """Return the bytes of attention's output, kept or fetched, that backward frees by groups of heads."""
        lets_go = self.policy.in_segment or self.policy.offload == "all"
        return self.attended if self.policy.attention == 1 and lets_go else 0.0

    def _joined_part(self) -> float:
        """Return the bytes of the part of attention's output that is fetched from the host and joined with the rest."""
        kept = self.policy.attention
        return kept * self.attended if self.policy.offload == "all" and kept < 1 else 0.0

    def _output(self) -> float:
        """Return the bytes of attention's output in backward, in addition to the kept or fetched part."""
        kept = self.policy.attention
        return self.attended * (1.0 - kept if self.policy.offload == "all" or kept == 1 else 1.0)

    def _output_matrix(self) -> float:
        return float(self.model.num_heads * self.model.head_dim * self.model.hidden_size)

    def _sums(self, numbers: float) -> float:
        return self._of_matrices(numbers * (self.task.itemsize if self.part == 1 else WIDE))

    def _buffers(self, *, backward: bool) -> tuple[float, float, float, float]:
        return attention_buffers(self.attends, backward=backward)
