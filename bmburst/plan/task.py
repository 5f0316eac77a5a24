"""What is to be trained on which machines: the question to the planner, checked once."""

from dataclasses import dataclass
from typing import Literal

from bmburst.blocks.config import LlamaConfig
from bmburst.blocks.presets import PRESETS
from bmburst.errors import UserError, unknown

ITEMSIZE = {"bfloat16": 2, "float32": 4}
MOST_GPUS = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A training step of a model on some GPUs.

    Attributes:
        model: The shape.
        preset: The shape's name, for the command line.
        sequence: Tokens of a sequence.
        gpus: GPUs in all.
        nodes: Nodes they are on, as many on each.
        batch: Sequences of a step.
        micro_batch: Sequences that a data rank computes at once.
        dtype: Of weights and activations.
        loss_chunk: Tokens of a rank whose logits exist at once.
        mlp_chunk: Tokens of a rank that pass through an MLP at once: `bmburst.blocks.config`.
        host_optimizer: Whether AdamW's state lies in host memory. Only memory takes that into account.

    Raises:
        UserError: A value is out of range or the values do not fit together.
    """

    model: LlamaConfig
    preset: str = "a model"
    sequence: int
    gpus: int
    nodes: int = 1
    batch: int = 1
    micro_batch: int = 1
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    loss_chunk: int = 1024
    mlp_chunk: int | None = None
    host_optimizer: bool = False

    def __post_init__(self) -> None:
        for name in ("sequence", "gpus", "nodes", "batch", "micro_batch", "loss_chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"--{_option(name)} {getattr(self, name)}\nallowed: 1 and more")
        if self.mlp_chunk is not None and self.mlp_chunk < 0:
            raise UserError(f"--mlp-chunk {self.mlp_chunk}\nallowed: 1 and more, or 0 for all tokens at once")
        if self.gpus > MOST_GPUS:
            raise UserError(f"--gpus {self.gpus}\nallowed: 1 to {MOST_GPUS}")
        if self.gpus % self.nodes:
            near = [n for n in (self.gpus // self.nodes * self.nodes, -(-self.gpus // self.nodes) * self.nodes) if n]
            raise UserError(
                f"--gpus {self.gpus} do not divide over --nodes {self.nodes}: every node has as many\n"
                f"fix: --gpus {' or '.join(map(str, near))}, or another --nodes"
            )
        if self.batch % self.micro_batch:
            raise UserError(
                f"--micro-batch {self.micro_batch} does not divide --batch {self.batch}\n"
                "allowed: a number that does, for example 1"
            )
        if self.dtype not in ITEMSIZE:
            raise unknown("dtype", self.dtype, ITEMSIZE)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node."""
        return self.gpus // self.nodes

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, and of a number of an activation."""
        return ITEMSIZE[self.dtype]


def model_named(name: str) -> LlamaConfig:
    """Return the shape of that name.

    Raises:
        UserError: There is none; the message names the nearest.
    """
    if name not in PRESETS:
        raise unknown("model", name, PRESETS)
    return PRESETS[name]


def _option(name: str) -> str:
    return {"sequence": "seq"}.get(name, name.replace("_", "-"))
