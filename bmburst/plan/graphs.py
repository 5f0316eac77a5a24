"""Whether the blocks of a run are CUDA graphs (`bmburst.blocks.graphed`), their memory, and the host's time."""

from bmburst.blocks.config import AT_ONCE
from bmburst.plan.candidates import Candidate, Offload
from bmburst.plan.counts import block_matrices, table
from bmburst.recompute.policy import BlockBytes, Policy
from bmburst.schedule.hardware import HOST, Hardware, hardware_like, sustained

_RANKS = 4  # over which the host's time of ZeRO was measured; more are taken for as many
_OUTSIDE = 2  # host time of embedding, head and optimizer, in blocks
_PER_KEPT = 0.8  # bytes that graphs keep beside the activations, for each byte of them: measured from 1K to 8K tokens


def _can_run_graphs(candidate: Candidate) -> bool:
    """Return whether the blocks can be CUDA graphs; see `bmburst.blocks.model.Llama`."""
    task = candidate.task
    is_plain = task.lora is None or not (task.lora.is_4bit or task.lora.dropout)
    is_kept = Policy.parse(candidate.recompute).name == "none" and candidate.offload is not Offload.WEIGHTS
    return candidate.block_graphs and is_kept and is_plain and candidate.tensor == candidate.pipe == 1


def runs_graphs(candidate: Candidate, hardware: Hardware) -> bool:
    """Return whether the blocks should be CUDA graphs: if they can, and a GPU would wait for the host in forward."""
    if not _can_run_graphs(candidate) or hardware.name == hardware_like(HOST).name:
        return False
    model, rows = candidate.task.model, candidate.rows
    matrices = model.num_layers * block_matrices(model) + table(model)
    products = sustained(hardware).matmul_seconds(2.0 * rows * matrices, rows)
    return issuing_seconds(candidate, hardware, graphs=False) / 2 > products


def issuing_seconds(candidate: Candidate, hardware: Hardware, *, graphs: bool) -> float:
    """Return the host's seconds for forward and backward of a micro-batch, without its time of attention over ranks.

    With graphs, `Hardware.layer_graph_host` has that too.

    Args:
        candidate: The way to train.
        hardware: The machine.
        graphs: Whether the blocks are CUDA graphs.
    """
    ranks = min(candidate.shards // candidate.tensor, candidate.task.gpus_per_node, _RANKS)
    of_block = (hardware.layer_graph_host if graphs else hardware.layer_host) + hardware.zero_host * (ranks - 1)
    return candidate.task.model.num_layers * of_block + hardware.layer_host * _OUTSIDE


def graph_bytes(candidate: Candidate, block: BlockBytes) -> float:
    """Return the bytes of a GPU that graphs of the blocks keep, beside the activations that a step has without them.

    They are inputs and results of the parts, gaps of the pool, and memory for the gradients of two blocks.

    Args:
        candidate: The way to train.
        block: The bytes of a block's tensors.
    """
    task = candidate.task
    gradients = AT_ONCE * task.trained_in_blocks / task.model.num_layers * task.itemsize
    return gradients + _PER_KEPT * task.model.num_layers * (block.input + block.attended + block.rest)
