"""`LoRAConfig`: which matrices of a model have low-rank adapters. Imports no torch."""

import dataclasses
import difflib
from typing import TYPE_CHECKING

from bmburst.config import check_fields, field
from bmburst.errors import UserError

if TYPE_CHECKING:
    from bmburst.blocks.config import LlamaConfig

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a block, by Hugging Face's names."""
ALL = "all-linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters on frozen weights (arXiv:2106.09685), as in PEFT, without dropout."""

    rank: int = field("Rank of the adapters; 0: none, all weights are trained.", default=0, minimum=0, maximum=65536)
    alpha: float = field("Adapters are multiplied by alpha / rank.", default=16.0, above=0)
    targets: tuple[str, ...] = field(
        f"Matrices with adapters: {', '.join(TARGETS)}; or {ALL}.", default=("q_proj", "v_proj")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.targets:
            raise UserError(f"lora.targets is empty\nallowed: {', '.join(TARGETS)}, {ALL}\nfix: q_proj,v_proj")
        for name in self.targets:
            if name not in (*TARGETS, ALL):
                near = difflib.get_close_matches(name, (*TARGETS, ALL), 1)
                raise UserError(
                    f"lora.targets: no layer has a matrix '{name}'\nallowed: {', '.join(TARGETS)}, {ALL}\n"
                    f"fix: {near[0] if near else 'q_proj,v_proj'}"
                )

        if not self.rank:
            for leaf in dataclasses.fields(self):
                if (value := getattr(self, leaf.name)) != leaf.default:
                    said = ",".join(value) if isinstance(value, tuple) else f"{value:g}"
                    raise UserError(
                        f"lora.{leaf.name} {said} has no effect: lora.rank is 0, which trains all weights\n"
                        f"fix: --lora.rank 16, or leave lora.{leaf.name} out"
                    )

    def parameters(self, model: "LlamaConfig") -> int:
        """Return the number of adapter parameters of a model; 0 if there are no adapters."""
        return model.num_layers * self.elements(model)

    def elements(self, model: "LlamaConfig", tensor: int = 1) -> int:
        """Return the number of adapter elements of one block on one tensor rank.

        Tensor parallelism splits the inputs of `o_proj` and `down_proj`, and the outputs of the other matrices.
        """
        hidden, query = model.hidden_size, model.num_heads // tensor * model.head_dim
        kv, inner = max(1, model.num_kv_heads // tensor) * model.head_dim, model.intermediate_size // tensor
        sides = {"q_proj": query, "o_proj": query, "k_proj": kv, "v_proj": kv}
        return sum(self.rank * (hidden + sides.get(name, inner)) for name in self.matrices)

    @property
    def is_on(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor on the adapters, alpha / rank."""
        return self.alpha / self.rank

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices that have an adapter, in the order of `TARGETS`."""
        return TARGETS if ALL in self.targets else tuple(name for name in TARGETS if name in self.targets)
