"""Makes the models of a run, and compiles their kernels ahead."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from bmburst.blocks.dtypes import dtype_of
from bmburst.blocks.kinds import apart
from bmburst.comm.host_memory import HostMemory
from bmburst.mesh import Mesh
from bmburst.plan.counts import head_layers
from bmburst.train.config import TrainConfig
from bmburst.train.memory_plan import block_graphs_for

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.zero_group import ZeroGroups


def _attention(config: TrainConfig, mesh: Mesh) -> Callable[[], Any]:
    from bmburst.attention.module import BurstAttention

    parallel = config.parallel
    return partial(
        BurstAttention,
        group=mesh.sequence,
        layout=parallel.layout,
        kernel=parallel.kernel,
        strategy=parallel.strategy,
        transport=parallel.transport,
        deterministic=parallel.deterministic,
    )


def compile_kernels(config: TrainConfig, mesh: Mesh, *, on_host: bool) -> Callable[[], object]:
    """Start to compile kernels on a GPU; return the function that waits for them."""
    from bmburst.blocks.transformer import compile_ahead

    if on_host:
        return lambda: None
    dtype = dtype_of(config.dtype)
    return compile_ahead(config.model, dtype, _attention(config, mesh)(), packed=config.pack != "stream").join


def model_maker(config: TrainConfig, mesh: Mesh, memory: HostMemory, groups: "ZeroGroups") -> Callable[..., "Llama"]:
    """Return the constructor of models of a run, sharded over groups; without `seed` their weights are not set."""
    from bmburst.blocks.model import Llama
    from bmburst.blocks.stages import Stage

    level = config.parallel.zero_level
    assert level != "auto", "the trainer chooses it before it makes a model"
    head = head_layers(config.model, config.sequence_length)
    decayed = config.optimizer.weight_decay_on if config.optimizer.weight_decay else ()
    model = partial(
        Llama,
        config.model,
        attention=_attention(config, mesh),
        dtype=dtype_of(config.dtype),
        zero_level=level,
        loss_chunk=config.loss_chunk_tokens,
        mlp_chunk=config.mlp_chunk_tokens,
        offload_weights=config.optimizer.offload_weights,
        host_memory=memory,
        stage=Stage.of_bmtrain(config.model.num_layers, head),
        kept_apart=apart(decayed, plus=config.lora.loraplus_lr_ratio != 1),
    )
    return groups.sharding()(model)


def trained_model(make: Callable[..., "Llama"], config: TrainConfig, ranks: int, per_host: int) -> "Llama":
    """Return the model of a run that is trained, made by the result of `model_maker`; its weights are not set."""
    return make(
        recompute=config.recompute,
        seed=None,
        lora=config.lora if config.lora.is_on else None,
        block_graphs=block_graphs_for(config, ranks, per_host),
    )
