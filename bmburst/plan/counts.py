"""Counts of a model: parameters, FLOPs, and the bytes that operators between matrix products move and hold.

`PLAIN` are bmburst_ops' functions as plain torch computes them, operation by operation: `rms_norm`, `rotary`,
`swiglu`, `linear_cross_entropy`. `FUSED` read their inputs and write their results once. `OURS` are the kernels that
bmburst_ops runs on GPUs. All are for 16-bit tensors with fp32 inside. In fp32 there are no conversions: the memory
that an operator holds takes that into account, its time does not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.lora import LoRAConfig
from bmburst.recompute.policy import Policy
from bmburst_ops.constants import ATTENTION_BACKWARD, GATHERED_CHUNKS

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a weight and of an element of an activation, by dtype."""
WIDE = 4  # bytes of what is fp32: inside operators, AdamW's state, log-sum-exp and delta, and what a ring adds up


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators:
    """Bytes that a set of operators moves for each element of its input.

    Attributes:
        name: Name of the set.
        norm_forward: Of the hidden state.
        norm_backward: Likewise.
        swiglu_forward: Of one of the two halves.
        swiglu_backward: Likewise.
        rotary: Of queries and keys, either way.
        loss: Of the logits.
        stream_forward: Of the hidden state: the two additions to the stream, beyond what norms read and write.
        stream_backward: Likewise: the stream's gradient, to which each norm adds its own.
        gradient_sums: Of the hidden state: gradients of what q, k, v and gate, up read, added.
        wide_copies: Whether norm and activation make fp32 copies of what they work on.
        wide_loss: Whether the loss does.
        gathered: Chunks of tokens whose gradients of logits a 16-bit model's loss keeps at once.
        repeats_last: Whether a block's recomputation forms its last product, of which backward reads nothing, again.
        swiglu_overwrites: Whether one gradient of the activation's inputs takes the place of its result's.
        lean: Whether recomputed blocks are those of `bmburst.blocks.lean`.
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
        """Return the bytes that live at once inside a norm's backward, beside its input.

        The gradient, normed, its gradient, two terms of the input's.
        """
        return 4.0 * WIDE + _copy(itemsize) if self.wide_copies else itemsize

    def swiglu_forward_alive(self, itemsize: int) -> float:
        """Return the same for the gated activation: silu, up, their product."""
        return 2.0 * WIDE + _copy(itemsize) if self.wide_copies else itemsize

    def swiglu_backward_alive(self, itemsize: int) -> float:
        """Return the same backward, results included: gradient, gate, sigmoid, gate's gradient, two terms of up's."""
        if not self.wide_copies:
            return (1.0 if self.swiglu_overwrites else 2.0) * itemsize
        return 4.0 * WIDE + 2 * _copy(itemsize) + (itemsize if itemsize < WIDE else 0)

    def gathered_chunks(self, itemsize: int) -> int:
        """Return how many chunks' gradients of logits are multiplied with their states at once."""
        return self.gathered if itemsize < WIDE else 1

    def loss_alive(self, itemsize: int, chunk: float, rows: float) -> float:
        """Return the bytes of each word that live at once: a chunk's logits, gradients of as many as are gathered.

        In fp32 one is the other. Plain torch has a logit's exponential beside it, inside of logsumexp.
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
    loss=14,  # written in fp32, read, written in 16 bits, read by two products
    stream_forward=12,
    stream_backward=12,
    gradient_sums=18,
    wide_copies=False,
    wide_loss=False,
)
OURS = replace(
    FUSED,
    name="ours",
    norm_backward=6,  # gradient and input in, input's gradient out; the weight's shares are 0.3 % of 128K rows
    stream_forward=10,  # the norm reads both terms in place of their sum, and writes that too
    stream_backward=4,  # each norm reads one gradient more
    gradient_sums=6,  # each product but the first reads the sum so far
    gathered=GATHERED_CHUNKS,
    repeats_last=False,
    swiglu_overwrites=True,
)
LEAN = replace(OURS, name="lean", lean=True)
OPERATORS = {each.name: each for each in (PLAIN, FUSED, OURS, LEAN)}
"""By the names that recorded runs give them."""
CURRENT = LEAN
"""What `bmburst train` runs on NVIDIA GPUs with Triton; elsewhere it runs `PLAIN` operators in the same blocks."""
SCALED = 8  # bytes an element of the hidden state, backward: the two factors, where what is added to the stream has one
DELTA = 4  # bytes an element of attention's output: rowsum(dO * O)
BACKWARD = 2.0  # products with each weight in backward over those in forward: its gradient and its input's
BLOCK_NORMS = 2


def block_matrices(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the elements of a block's matrices on a tensor rank; ranks share KV heads where there are few."""
    query = model.num_heads // tensor * model.head_dim
    kv = max(1, model.num_kv_heads // tensor) * model.head_dim
    return model.hidden_size * (2 * query + 2 * kv + 3 * (model.intermediate_size // tensor))


def projections(model: LlamaConfig) -> int:
    """Return the elements of the matrices that project queries, keys and values."""
    return model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim


def mlp_matrix(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the elements of one of an MLP's three matrices on a tensor rank."""
    return model.hidden_size * (model.intermediate_size // tensor)


def adam_bytes(itemsize: int) -> int:
    """Return the bytes of AdamW's state of a weight: two moments, and an fp32 master where `itemsize` is less."""
    return 2 * WIDE + (WIDE if itemsize < WIDE else 0)


def host_adam_bytes(dtype: str) -> int:
    """Return the bytes of AdamW's state of a weight of a dtype that lives in host memory itself.

    A bfloat16 weight is a half of its master, a float16 weight is not: `bmburst.optim.host_adam`.
    """
    return 2 * WIDE + {"float32": 0, "bfloat16": WIDE - 2, "float16": WIDE}[dtype]


def block_parameters(model: LlamaConfig, lora: LoRAConfig | None = None) -> int:
    """Return the parameters of all blocks, adapters included."""
    return model.num_layers * (held_block(model) + adapter_elements(model, lora))


def adapter_elements(model: LlamaConfig, lora: LoRAConfig | None, tensor: int = 1) -> int:
    """Return the elements of a block's adapters on a tensor rank; 0 for None."""
    return lora.elements(model, tensor) if lora else 0


def held_block(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the elements that a tensor rank holds of a gathered block.

    BMTrain keeps the whole of a K or V projection that has fewer heads than there are tensor ranks.
    """
    query = model.num_heads // tensor * model.head_dim
    kv = model.num_kv_heads * model.head_dim // (tensor if model.num_kv_heads % tensor == 0 else 1)
    matrices = model.hidden_size * (2 * query + 2 * kv + 3 * (model.intermediate_size // tensor))
    return matrices + BLOCK_NORMS * model.hidden_size


def table(model: LlamaConfig) -> int:
    """Return the elements of the embedding, which are those of the head."""
    return model.vocab_size * model.hidden_size


def vocabulary_matrices(model: LlamaConfig) -> int:
    """Return 2 for embedding and head, 1 where they are tied."""
    return 1 if model.tie_embeddings else 2


def attention_flops(model: LlamaConfig, sequence: int) -> float:
    """Return the FLOPs of causal attention forward, of one layer and sequence: half of 4 S^2 H D, or a window's."""
    return _forward(model, causal_pairs([sequence], model.sliding_window))


def multiplied(model: LlamaConfig) -> int:
    """Return the parameters in matrix products: all but the embedding, which is a lookup."""
    return model.num_parameters - (table(model) if vocabulary_matrices(model) == 2 else 0)


def causal_pairs(lengths: Iterable[int], window: int | None = None) -> float:
    """Return the query-key pairs of causal attention over texts: half of each square, or those inside the window.

    Args:
        lengths: Tokens of each text: of a sequence, or of each document packed into one.
        window: Keys that a query sees at most, itself among them.
    """
    reach = ((n, n if window is None else min(n, window)) for n in lengths)
    return float(sum(n * seen - seen**2 / 2 for n, seen in reach))


def step_flops(model: LlamaConfig, tokens: float, query_key_pairs: float, *, attention_backward: float = 2.0) -> float:
    """Return the FLOPs of a step as utilisation counts them.

    6 N a token, N without the embedding, which is looked up; 4 H D a score forward; recomputation not.

    Args:
        model: The shape.
        tokens: Of all sequences.
        query_key_pairs: Of all sequences, in one head and layer; see `causal_pairs`.
        attention_backward: What attention's backward counts over its forward: 2 as usual, 2.5 as the kernel does.
    """
    return 6.0 * multiplied(model) * tokens + model.num_layers * _forward(model, query_key_pairs) * (
        1 + attention_backward
    )


def forward_flops(model: LlamaConfig, tokens: float, query_key_pairs: float) -> float:
    """Return the FLOPs of a forward pass, for the arguments of `step_flops`: a third of a step's."""
    return 2.0 * multiplied(model) * tokens + model.num_layers * _forward(model, query_key_pairs)


def frozen_flops(model: LlamaConfig, tokens: float, adapters: int) -> float:
    """Return the FLOPs that a step lacks where adapters are trained: frozen weights have no gradients, adapters do.

    Args:
        model: The shape.
        tokens: Of all sequences.
        adapters: Parameters of the adapters; 0 where the weights are trained.
    """
    return (2.0 * multiplied(model) - 6.0 * adapters) * tokens if adapters else 0.0


def hardware_flops(model: LlamaConfig, tokens: float, query_key_pairs: float, recompute: str) -> float:
    """Return the FLOPs that are computed in a step: attention's backward as the kernel does it, and recomputation.

    Args:
        model: See `step_flops`, as `tokens` and `query_key_pairs`.
        tokens: See above.
        query_key_pairs: See above.
        recompute: One of `bmburst.recompute.policy`. A block's last product, of which backward reads nothing, is not
            computed again; of a kept fraction of attention the beginning is, as if heads are exchanged.
    """
    policy, last = Policy.parse(recompute), model.hidden_size * model.intermediate_size
    again = 2.0 * (block_matrices(model) - last) * tokens if policy.recomputes else 0.0
    again += (1 - policy.attention) ** 2 * _forward(model, query_key_pairs) if policy.recomputes else 0.0
    done = step_flops(model, tokens, query_key_pairs, attention_backward=ATTENTION_BACKWARD)
    layers = sum(count for kind, count in policy.kinds(model.num_layers) if kind.recomputes)
    return done + layers * again


def _forward(model: LlamaConfig, query_key_pairs: float) -> float:
    return 4.0 * query_key_pairs * model.num_heads * model.head_dim
