"""Parameters and FLOPs of a model, as every part of the planner counts them."""

from collections.abc import Iterable

from bmburst.blocks.config import LlamaConfig
from bmburst.plan.operators import WIDE
from bmburst.plan.task import Task
from bmburst.recompute.policy import Policy
from bmburst_ops.constants import ATTENTION_BACKWARD

BACKWARD = 2.0  # products with each weight in backward over those in forward: its gradient and its input's
BLOCK_NORMS = 2


def block_matrices(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the numbers in a tensor rank's matrices of a block; KV heads are held by several ranks where few."""
    query = model.num_heads // tensor * model.head_dim
    kv = max(1, model.num_kv_heads // tensor) * model.head_dim
    return model.hidden_size * (2 * query + 2 * kv + 3 * (model.intermediate_size // tensor))


def mlp_matrix(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the numbers in a tensor rank's part of one of an MLP's three matrices."""
    return model.hidden_size * (model.intermediate_size // tensor)


def adam_bytes(itemsize: int) -> int:
    """Return the bytes of AdamW's state of a weight: two moments, and an fp32 master where `itemsize` is less."""
    return 2 * WIDE + (WIDE if itemsize < WIDE else 0)


def held_block(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the numbers that a tensor rank holds of a gathered block.

    BMTrain keeps the whole of a K or V projection that has fewer heads than there are tensor ranks.
    """
    query = model.num_heads // tensor * model.head_dim
    kv = model.num_kv_heads * model.head_dim // (tensor if model.num_kv_heads % tensor == 0 else 1)
    matrices = model.hidden_size * (2 * query + 2 * kv + 3 * (model.intermediate_size // tensor))
    return matrices + BLOCK_NORMS * model.hidden_size


def table(model: LlamaConfig) -> int:
    """Return the numbers in the embedding, and in the head."""
    return model.vocab_size * model.hidden_size


def tables(model: LlamaConfig) -> int:
    """Return how many such tables there are."""
    return 1 if model.tie_embeddings else 2


def attention_flops(model: LlamaConfig, sequence: int) -> float:
    """Return the FLOPs of causal attention forward, of one layer and sequence: half of 4 S^2 H D, or a window's."""
    return _forward(model, causal_pairs([sequence], model.sliding_window))


def multiplied(model: LlamaConfig) -> int:
    """Return the numbers that every token is multiplied with: all but an embedding, which is looked up."""
    return model.num_parameters - (table(model) if tables(model) == 2 else 0)


def causal_pairs(lengths: Iterable[int], window: int | None = None) -> float:
    """Return how many scores causal attention of texts counts: of each half of its square, or what its window shows.

    Args:
        lengths: Tokens of each text: of a sequence, or of each document packed into one.
        window: Keys that a query sees at most, itself among them.
    """
    reach = ((n, n if window is None else min(n, window)) for n in lengths)
    return float(sum(n * seen - seen**2 / 2 for n, seen in reach))


def step_flops(model: LlamaConfig, tokens: float, pairs: float, *, attention_backward: float = 2.0) -> float:
    """Return the FLOPs of a step as utilisation counts them.

    6 N a token, N without the embedding, which is looked up; 4 H D a score forward; recomputation not.

    Args:
        model: The shape.
        tokens: Of all sequences.
        pairs: Scores of all sequences, of one head and layer: `causal_pairs`.
        attention_backward: What attention's backward counts over its forward: 2 as usual, 2.5 as the kernel does.
    """
    return 6.0 * multiplied(model) * tokens + model.num_layers * _forward(model, pairs) * (1 + attention_backward)


def hardware_flops(model: LlamaConfig, tokens: float, pairs: float, recompute: str) -> float:
    """Return the FLOPs that are computed in a step: attention's backward as the kernel does it, and recomputation.

    Args:
        model: See `step_flops`, as `tokens` and `pairs`.
        tokens: See above.
        pairs: See above.
        recompute: One of `bmburst.recompute.policy`. A block's last product, of which backward reads nothing, is not
            computed again; of a kept fraction of attention the beginning is, as if heads are exchanged.
    """
    policy, last = Policy.parse(recompute), model.hidden_size * model.intermediate_size
    again = 2.0 * (block_matrices(model) - last) * tokens if policy.recomputes else 0.0
    again += (1 - policy.attention) ** 2 * _forward(model, pairs) if policy.recomputes else 0.0
    done = step_flops(model, tokens, pairs, attention_backward=ATTENTION_BACKWARD)
    layers = sum(count for kind, count in policy.kinds(model.num_layers) if kind.recomputes)
    return done + layers * again


def model_flops(task: Task, *, attention_backward: float = 2.0) -> float:
    """Return the FLOPs of a task's step: `step_flops`, causal attention over whole sequences or the model's window."""
    pairs = task.batch * causal_pairs([task.sequence], task.model.sliding_window)
    return step_flops(task.model, task.batch * task.sequence, pairs, attention_backward=attention_backward)


def _forward(model: LlamaConfig, pairs: float) -> float:
    return 4.0 * pairs * model.num_heads * model.head_dim
