"""What imports BMTrain, by name, as `lazy.Llama`: without GPUs only a rank of BMTrain can import it, inside a test."""

from importlib import import_module
from typing import Any

_MODULES = {
    "bmt": "bmtrain",
    "cpm_live": "bmburst.integrations.cpm_live",
    "optim": "bmburst.optim.adamw",
    "updates": "bmburst.optim.updates",
}
_OWNERS = {
    "AdamW": "bmburst.optim.adamw",
    "BurstAttention": "bmburst.attention.module",
    "GatherMemory": "bmburst.blocks.gathering",
    "HostAdam": "bmburst.optim.updates",
    "Linear": "bmburst.blocks.layers",
    "Llama": "bmburst.blocks.model",
    "Seq2Seq": "bmburst.blocks.seq2seq",
    "build_optimizer": "bmburst.optim.adamw",
    "gather": "bmburst.zero",
    "gradient_of": "bmburst.zero",
    "named_shards": "bmburst.zero",
    "scatter": "bmburst.zero",
    "state_names": "bmburst.optim.adamw",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _OWNERS:
        raise AttributeError(name)
    return getattr(import_module(_OWNERS[name]), name)
