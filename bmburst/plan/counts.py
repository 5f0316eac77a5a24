"""Counts of a model: parameters, FLOPs, and the memory traffic and memory of operators between matrix products.

`PLAIN` are the functions of bmburst_ops in plain torch, operation by operation: `rms_norm`, `rotary`, `swiglu`,
`linear_cross_entropy`. `FUSED` read their inputs and write their results once. `OURS` are the kernels that bmburst_ops
runs on GPUs. All are for 16-bit tensors with fp32 arithmetic. With fp32 tensors there are no conversions: the formulas
for memory take that into account, those for time do not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bmburst.blocks.config import LlamaConfig, LoRAConfig
from bmburst.blocks.dtypes import ITEMSIZE
from bmburst.optim.config import MOMENT_BYTES, State
from bmburst.recompute.policy import Policy
from bmburst_ops import ATTENTION_BACKWARD, GATHERED_CHUNKS, NF4_BLOCK, NF4_GROUP

WIDE = 4  # bytes of fp32: inside operators, AdamW's state, log-sum-exp and delta, and sums of a ring


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators:
    """Bytes of memory traffic of a set of operators, per element of a tensor.

    Attributes:
        name: Name of the set.
        norm_forward: Per element of the hidden state.
        norm_backward: Per element of the hidden state.
        swiglu_forward: Per element of one of the two inputs.
        swiglu_backward: Per element of one of the two inputs.
        rotary: Per element of queries and keys, in forward or backward.
        loss: Per element of the logits.
        stream_forward: Per element of the hidden state: the two additions to the stream, beyond the traffic of norms.
        stream_backward: Per element of the hidden state: the stream's gradient, to which each norm adds its own.
        gradient_sums: Per element of the hidden state: adding the input gradients of q, k, v and of gate, up.
        wide_copies: Whether norm and activation make fp32 copies of their tensors.
        wide_loss: Whether the loss makes fp32 copies.
        gathered: Number of chunks whose logit gradients the loss of a 16-bit model holds at once.
        repeats_last: Whether the recomputation of a block repeats its last product, which backward does not read.
        swiglu_overwrites: Whether one gradient of the activation's inputs overwrites that of its result.
        lean: Whether recomputed blocks run as in `bmburst.blocks.lean`.
    """

    name: str
    norm_forward: float
    norm_backward: float
    swiglu_forward: float
    swiglu_backward: float
    rotary: float
    loss: float
    stream_forward: float
    stream_backward: float
    gradient_sums: float
    wide_copies: bool
    wide_loss: bool
    gathered: int = 1
    repeats_last: bool = True
    swiglu_overwrites: bool = False
    lean: bool = False

    def norm_backward_alive(self, itemsize: int) -> float:
        """Return the bytes per element alive at the peak of a norm's backward, without its input.

        These are the gradient, the normed input and its gradient, and two terms of the input's gradient.
        """
        return 4.0 * WIDE + _copy(itemsize) if self.wide_copies else itemsize

    def swiglu_forward_alive(self, itemsize: int) -> float:
        """Return the same for the forward of the gated activation: silu, up, their product."""
        return 2.0 * WIDE + _copy(itemsize) if self.wide_copies else itemsize

    def swiglu_backward_alive(self, itemsize: int) -> float:
        """Return the same for its backward: gradient, gate, sigmoid, gate's gradient, two terms of up's gradient."""
        if not self.wide_copies:
            return (1.0 if self.swiglu_overwrites else 2.0) * itemsize
        return 4.0 * WIDE + 2 * _copy(itemsize) + (itemsize if itemsize < WIDE else 0)

    def gathered_chunks(self, itemsize: int) -> int:
        """Return the number of chunks whose logit gradients are multiplied with the hidden states at once."""
        return self.gathered if itemsize < WIDE else 1

    def loss_alive(self, itemsize: int, chunk: float, rows: float) -> float:
        """Return the bytes per vocabulary entry alive in the loss: logits of a chunk, gradients of gathered chunks.

        In fp32 the gradient overwrites the logits. Plain torch also holds the exponentials inside logsumexp.
        """
        logits = chunk * (2.0 * WIDE if self.wide_loss else WIDE)
        kept = min(rows, chunk * self.gathered_chunks(itemsize)) * itemsize
        return logits if self.wide_loss or itemsize == WIDE else logits + kept


def _copy(itemsize: int) -> int:
    return WIDE if itemsize < WIDE else 0


PLAIN = Operators(
    name="plain",
    norm_forward=40,  # convert 6, square 8, mean 4, scale 8, weight 8, convert 6
    norm_backward=94,  # convert 12, normed 8, weighted 8, product 12, mean 4, input's 28, convert 6, own 16
    swiglu_forward=38,  # convert 12, silu 8, product 12, convert 6
    swiglu_backward=126,  # convert 18, sigmoid 8, six products and sums 64, convert 12, two products 24
    rotary=48,  # convert 6, four products and two sums of halves 28, join 8, convert 6
    loss=54,  # logits 4, logsumexp 24, softmax 16, mask 4, convert 6
    stream_forward=12,
    stream_backward=12,
    gradient_sums=18,
    wide_copies=True,
    wide_loss=True,
)
FUSED = Operators(
    name="fused",
    norm_forward=4,
    norm_backward=8,
    swiglu_forward=6,
    swiglu_backward=10,
    rotary=4,
    loss=14,  # logits written in fp32 and read; gradient written in 16 bits and read by two products
    stream_forward=12,
    stream_backward=12,
    gradient_sums=18,
    wide_copies=False,
    wide_loss=False,
)
OURS = replace(
    FUSED,
    name="ours",
    norm_backward=6,  # read gradient and input, write the input's gradient; the weight's partial sums are 0.3 %
    stream_forward=10,  # the norm reads both terms instead of their sum, and also writes the sum
    stream_backward=4,  # each norm reads one more gradient
    gradient_sums=6,  # each product but the first reads the sum so far
    gathered=GATHERED_CHUNKS,
    repeats_last=False,
    swiglu_overwrites=True,
)
LEAN = replace(OURS, name="lean", lean=True)
OPERATORS = {each.name: each for each in (PLAIN, FUSED, OURS, LEAN)}
"""Sets of operators by their names in recorded runs."""
CURRENT = LEAN
"""The operators of `bmburst train` on NVIDIA GPUs with Triton; elsewhere it runs `PLAIN` in the same blocks."""
SCALED = 8  # bytes per element of the hidden state in backward, for factors on the two residual updates
FOUR_BIT_BYTES = 1 / 2 + 1 / NF4_BLOCK + WIDE / (NF4_BLOCK * NF4_GROUP)
"""Bytes of a weight in 4 bits: its code, and its shares of the scale of a block and of the factor of a group."""
DELTA = 4  # bytes per element of attention's output: rowsum(dO * O)
BACKWARD = 2.0  # products per weight in backward divided by those in forward: weight gradient and input gradient
BLOCK_NORMS = 2


def block_matrices(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the elements of a block's matrices on a tensor rank. Ranks share a KV head if there are more ranks."""
    query = model.num_heads // tensor * model.head_dim
    kv = max(1, model.num_kv_heads // tensor) * model.head_dim
    return model.hidden_size * (2 * query + 2 * kv + 3 * (model.intermediate_size // tensor))


def projections(model: LlamaConfig) -> int:
    """Return the elements of the query, key and value projections."""
    return model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim


def mlp_matrix(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the elements of one of an MLP's three matrices on a tensor rank."""
    return model.hidden_size * (model.intermediate_size // tensor)


def adam_bytes(dtype: str, state: State, *, with_weights: bool = False) -> float:
    """Return the bytes of AdamW's state per weight: two moments and the fp32 master of a 16-bit weight.

    A bfloat16 weight is the upper half of its master, and 2 bytes are the rest of it, a float16 weight is not: see
    `bmburst.optim.states`.

    Args:
        dtype: dtype of the weights.
        state: Type of the moments.
        with_weights: Whether the weights are in host memory too.
    """
    has_remainder = dtype == "bfloat16" and (with_weights or state != "float32")
    return MOMENT_BYTES[state] + (2 if has_remainder else saved_master(dtype))


def saved_master(dtype: str) -> int:
    """Return the bytes of a weight's fp32 master in a checkpoint."""
    return WIDE if ITEMSIZE[dtype] < WIDE else 0


def block_parameters(model: LlamaConfig, lora: LoRAConfig | None = None) -> int:
    """Return the number of parameters of all blocks, including adapters."""
    return model.num_layers * held_block(model) + (lora.parameters(model) if lora else 0)


def four_bit_saving(model: LlamaConfig, lora: LoRAConfig | None, itemsize: int) -> float:
    """Return the bytes by which the shards of a block are smaller because its matrices are in 4 bits."""
    if lora is None or not lora.is_4bit:
        return 0.0
    return block_matrices(model) * (itemsize - FOUR_BIT_BYTES)


def adapter_elements(model: LlamaConfig, lora: LoRAConfig | None, tensor: int = 1) -> int:
    """Return the elements of a block's adapters on a tensor rank, the most of any block; 0 for None."""
    return lora.elements(model, tensor) if lora else 0


def held_block(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the elements that a tensor rank holds of a gathered block.

    If there are fewer KV heads than tensor ranks, each rank gathers the whole K and V projections.
    """
    query = model.num_heads // tensor * model.head_dim
    kv = model.num_kv_heads * model.head_dim // (tensor if model.num_kv_heads % tensor == 0 else 1)
    matrices = model.hidden_size * (2 * query + 2 * kv + 3 * (model.intermediate_size // tensor))
    return matrices + BLOCK_NORMS * model.hidden_size


def table(model: LlamaConfig) -> int:
    """Return the elements of the embedding; the head has as many."""
    return model.vocab_size * model.hidden_size


def vocabulary_matrices(model: LlamaConfig) -> int:
    """Return 2 for embedding and head, 1 where they are tied."""
    return 1 if model.tie_embeddings else 2


def attention_flops(model: LlamaConfig, sequence: int) -> float:
    """Return the forward FLOPs of causal attention for one layer and sequence: half of 4 S^2 H D, or a window's."""
    return _forward(model, causal_pairs([sequence], model.sliding_window))


def head_layers(model: LlamaConfig, sequence: int) -> float:
    """Return the FLOPs of the head divided by those of a layer, of whole sequences: how stages of a pipeline differ.

    All passes and recomputation policies count alike, so that the same run always has the same stages.
    """
    layer = 2.0 * block_matrices(model) * sequence + attention_flops(model, sequence)
    return 2.0 * table(model) * sequence / layer


def multiplied(model: LlamaConfig) -> int:
    """Return the number of parameters in matrix products: all but the embedding, which is a lookup."""
    return model.num_parameters - (table(model) if vocabulary_matrices(model) == 2 else 0)


def causal_pairs(lengths: Iterable[int], window: int | None = None) -> float:
    """Return the number of query-key pairs of causal attention: half of each square, or the pairs inside a window.

    Args:
        lengths: Tokens of each sequence, or of each packed document.
        window: Most keys that a query sees, including itself.
    """
    reach = ((n, n if window is None else min(n, window)) for n in lengths)
    return float(sum(n * seen - seen**2 / 2 for n, seen in reach))


def step_flops(model: LlamaConfig, tokens: float, query_key_pairs: float, *, attention_backward: float = 2.0) -> float:
    """Return the FLOPs of a step for the model FLOPs utilisation.

    They are 6 N per token, with N the parameters without the embedding, and 4 H D per score in forward. Recomputation
    does not count.

    Args:
        model: The model's configuration.
        tokens: Tokens of all sequences.
        query_key_pairs: Pairs of all sequences, in one head and layer; see `causal_pairs`.
        attention_backward: FLOPs of attention's backward divided by those of forward: 2 by convention, 2.5 in kernels.
    """
    return 6.0 * multiplied(model) * tokens + model.num_layers * _forward(model, query_key_pairs) * (
        1 + attention_backward
    )


def forward_flops(model: LlamaConfig, tokens: float, query_key_pairs: float) -> float:
    """Return the FLOPs of a forward pass, a third of those of `step_flops`, with the same arguments."""
    return 2.0 * multiplied(model) * tokens + model.num_layers * _forward(model, query_key_pairs)


def frozen_flops(model: LlamaConfig, tokens: float, adapters: int, *, trains_head: bool = False) -> float:
    """Return the FLOPs by which training adapters needs less: no gradients of frozen weights, but those of adapters.

    Args:
        model: The model's configuration.
        tokens: Tokens of all sequences.
        adapters: Number of parameters of the adapters; 0 if the weights are trained.
        trains_head: Whether the head is trained beside the adapters.
    """
    frozen = multiplied(model) - (table(model) if trains_head else 0)
    return (2.0 * frozen - 6.0 * adapters) * tokens if adapters else 0.0


def hardware_flops(model: LlamaConfig, tokens: float, query_key_pairs: float, recompute: str) -> float:
    """Return the FLOPs that a step executes: with attention's backward as in kernels, and with recomputation.

    Args:
        model: See `step_flops`.
        tokens: See `step_flops`.
        query_key_pairs: See `step_flops`.
        recompute: A policy of `bmburst.recompute.policy`. The last product of a block is not recomputed, because
            backward does not read it. If a fraction of attention is kept, its prefix is recomputed as with exchanged
            heads.
    """
    policy, last = Policy.parse(recompute), model.hidden_size * model.intermediate_size
    again = 2.0 * (block_matrices(model) - last) * tokens if policy.recomputes else 0.0
    again += (1 - policy.attention) ** 2 * _forward(model, query_key_pairs) if policy.recomputes else 0.0
    done = step_flops(model, tokens, query_key_pairs, attention_backward=ATTENTION_BACKWARD)
    layers = sum(count for kind, count in policy.kinds(model.num_layers) if kind.recomputes)
    return done + layers * again


def _forward(model: LlamaConfig, query_key_pairs: float) -> float:
    return 4.0 * query_key_pairs * model.num_heads * model.head_dim
