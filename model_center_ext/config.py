"""ModelCenter's configuration of LLaMA with BurstAttention, and its data loader for ranks that share sequences.

Neither needs BMTrain.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from bmburst.checkpoint.model_center import ModelCenterConfig, is_model_center
from bmburst.config import field, read_config_file, write_json
from bmburst.errors import UserError, unknown
from bmburst.mesh import Mesh, require_mesh
from bmburst.recompute.policy import Policy

Self = TypeVar("Self", bound="LlamaConfig")
_CONFIG_FILE = "config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelCenterConfig):
    """ModelCenter's LlamaConfig with the same fields and defaults, and additional fields.

    Additional model fields (`num_heads_kv`, `rope_theta`, `rope_scaling`, `max_position_embeddings`, `dtype`, and
    MiniCPM's `scale_emb`, `scale_depth`, `dim_model_base`) are written to config.json only if they differ from their
    defaults. The runtime fields below are not written.
    """

    layout: Literal["contiguous", "zigzag", "striped", "balanced"] = field(
        "Which rank holds which tokens.", default="zigzag"
    )
    strategy: str = field("Attention strategy; see burst_attention.", default="auto")
    kernel: str = field("Attention kernel; see burst_attention.", default="auto")
    transport: str = field("Transport of attention's tensors; see burst_attention.", default="auto")
    deterministic: bool = field("Whether repeated runs give the same bits. Costs speed on a GPU.", default=False)
    recompute: str = field(
        "Recompute policy: none, block, block-keep-attention and so on. See docs/memory.md.",
        default="block-keep-attention",
    )
    zero_level: Literal[2, 3] = field("3 shards weights, gradients and optimizer; 2 keeps weights whole.", default=3)
    norm_kernel: Literal["auto", "torch", "triton", "cpm-kernels"] = field(
        "Kernel of the norms; cpm-kernels: in float16, on GPUs of compute capability 7.0 to 8.9.", default="auto"
    )
    loss_chunk: int = field("Tokens whose logits exist at once in loss().", default=1024, unit="tokens", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        Policy.parse(self.recompute).require_layers(self.num_layers)

    @classmethod
    def from_json_file(cls: type[Self], json_file: str | os.PathLike[str], **changes: Any) -> Self:
        """Return the configuration in a config.json, with some fields changed; as ModelCenter's method.

        Raises:
            UserError: The file or a value is wrong.
        """
        path = Path(json_file)
        return cls.from_values(read_config_file(path) | changes, str(path))

    @classmethod
    def from_pretrained(cls: type[Self], directory: str | os.PathLike[str], **changes: Any) -> Self:
        """Return the configuration of a directory of ModelCenter or Hugging Face weights; nothing is downloaded.

        Raises:
            UserError: There is no such directory, or its config.json is that of another model.
        """
        from bmburst.checkpoint.hugging_face import read_config

        path = Path(directory) / _CONFIG_FILE
        if not path.parent.is_dir():
            raise UserError(
                f"{path.parent}: no such directory of weights\n"
                "fix: pass the directory of a model; a name of ModelCenter such as llama-7b is not downloaded"
            )
        values = read_config_file(path)
        if is_model_center(values):
            return cls.from_json_file(path, **changes)
        dtype: Any = values.get("dtype") or values.get("torch_dtype") or "float32"
        return dataclasses.replace(cls.of(read_config(Path(directory)), dtype), **changes)

    @classmethod
    def named(cls: type[Self], name: str, **changes: Any) -> Self:
        """Return one of the configurations of this package, for example "llama-2-7b".

        Raises:
            UserError: The name is unknown.
        """
        known = config_files()
        if name not in known:
            raise unknown("configuration", name, known)
        return cls.from_json_file(known[name], **changes)

    @classmethod
    def from_model_center(cls: type[Self], config: object, **changes: Any) -> Self:
        """Return the configuration of an object of ModelCenter's own class.

        Raises:
            UserError: It has a value that this LLaMA does not support.
        """
        given = dict(vars(config))
        dtype = str(given.pop("dtype", "float32")).removeprefix("torch.")
        return cls.from_values(given | {"half": dtype == "float16", "dtype": dtype} | changes)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write the model fields as config.json, without the runtime fields."""
        write_json(Path(json_file), self.to_values())

    def attention_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `bmburst.BurstAttention`, except group and layout."""
        names = ("strategy", "kernel", "transport", "deterministic")
        return {name: getattr(self, name) for name in names} | {"mask": "causal"}


def config_files() -> dict[str, Path]:
    """Return the paths of this package's configurations by name; `bmburst train --config` accepts them too."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "configs").glob("*.json"))}


class DistributedDataLoader:
    """Distributes samples over the sequence groups of a mesh; ModelCenter's loader distributes them over ranks.

    All ranks of a sequence group read the same batches. Group i of n reads what rank i of n would read from
    ModelCenter's loader, in the same order (model-center 1.0.2).

    Args:
        dataset: The samples; every rank has all of them.
        shuffle: Whether to shuffle the samples anew in each epoch.
        seed: Seed of the shuffling.
        mesh: The mesh.
        options: Further arguments of `torch.utils.data.DataLoader`, such as batch_size.

    Raises:
        UserError: `mesh` is not a mesh, or has tensor parallelism.
    """

    def __init__(
        self, dataset: Dataset[Any], shuffle: bool = False, seed: int = 0, *, mesh: Mesh, **options: Any
    ) -> None:
        require_mesh(mesh, "mesh=bmburst.Mesh.over_bmtrain()", "ModelCenter's")
        self.shuffle, self.epoch = shuffle, 0
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=mesh.shape.data, rank=mesh.data_rank, shuffle=shuffle, seed=seed
        )
        self.loader: DataLoader[Any] = DataLoader(dataset, sampler=self.sampler, **options)

    def __iter__(self) -> Iterator[Any]:
        self.epoch += self.shuffle
        self.sampler.set_epoch(self.epoch)
        return iter(self.loader)

    def __len__(self) -> int:
        """Return the number of batches of this rank's group."""
        return len(self.loader)
