"""Parameters and FLOPs of a model, as every part of the planner counts them."""

from bmburst.blocks.config import LlamaConfig
from bmburst.plan.task import Task

BACKWARD = 2.0  # products with each weight in backward over those in forward: its gradient and its input's
ATTENTION_BACKWARD = 2.5  # of the kernel: five products against two (arXiv:2307.08691, section 4.1)
BLOCK_NORMS = 2


def block_matrices(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the numbers in a tensor rank's matrices of a block; KV heads are held by several ranks where few."""
    query = model.num_heads // tensor * model.head_dim
    kv = max(1, model.num_kv_heads // tensor) * model.head_dim
    return model.hidden_size * (2 * query + 2 * kv + 3 * (model.intermediate_size // tensor))


def mlp_matrix(model: LlamaConfig, tensor: int = 1) -> int:
    """Return the numbers in a tensor rank's part of one of an MLP's three matrices."""
    return model.hidden_size * (model.intermediate_size // tensor)


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
    """Return the FLOPs of causal attention forward, of one layer and sequence: 4 S^2 H D, half of it."""
    return 2.0 * sequence**2 * model.num_heads * model.head_dim


def multiplied(model: LlamaConfig) -> int:
    """Return the numbers that every token is multiplied with: all but an embedding, which is looked up."""
    return model.num_parameters - (table(model) if tables(model) == 2 else 0)


def model_flops(task: Task, *, attention_backward: float = 2.0) -> float:
    """Return the FLOPs of a step as utilisation counts them.

    6 N a token, N without the embedding, which is looked up; causal attention counted as half; recomputation not.

    Args:
        task: The step.
        attention_backward: What attention's backward counts over its forward: 2 as usual, 2.5 as the kernel does.
    """
    model = task.model
    attention = model.num_layers * attention_flops(model, task.sequence) * (1 + attention_backward)
    return task.batch * (6.0 * multiplied(model) * task.sequence + attention)
