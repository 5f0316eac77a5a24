"""ModelCenter's LLaMA with BurstAttention: `from model_center_ext import Llama, LlamaConfig`.

Names are imported on first use: `Llama` needs BMTrain, which must not be imported before the runtime is set up
(`bmburst.start`, `bmburst launch`). ModelCenter itself is not needed.
"""

from typing import TYPE_CHECKING, Any

from bmburst import public_name

if TYPE_CHECKING:
    from model_center_ext.config import DistributedDataLoader, LlamaConfig, config_files
    from model_center_ext.llama import Llama, LlamaOutput

__all__ = ["DistributedDataLoader", "Llama", "LlamaConfig", "LlamaOutput", "config_files"]

_HOMES = {"config": ("DistributedDataLoader", "LlamaConfig", "config_files"), "llama": ("Llama", "LlamaOutput")}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    return public_name(__name__, name, _HOMES, over_bmtrain="llama")
