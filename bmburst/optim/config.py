"""Configuration of the optimizer. Imports no torch."""

import dataclasses
import math
import types
from collections.abc import Collection, Mapping
from typing import Literal

from bmburst.blocks.kinds import KINDS, MATRICES
from bmburst.config import check_fields, field
from bmburst.errors import UserError

LOSS_SCALE, LOSS_SCALE_STEPS = 65536.0, 1024
"""Defaults of fp16 training for `OptimizerConfig.loss_scale` and `loss_scale_steps`."""
Kernel = Literal["auto", "bmtrain"]
"""Kernels that update weights on a GPU."""
State = Literal["float32", "bfloat16", "8bit"]
"""Types of AdamW's moments."""
MOMENT_BYTES: Mapping[State, float] = types.MappingProxyType({"float32": 8.0, "bfloat16": 4.0, "8bit": 2 + 2 * 4 / 256})
"""Bytes of both moments of a weight, by `OptimizerConfig.state`; 8 bits have an fp32 scale for 256 neighbours."""


def smaller_states(state: State) -> list[State]:
    """Return the types of optimizer state that take fewer bytes, the largest first."""
    return [name for name, nbytes in MOMENT_BYTES.items() if nbytes < MOMENT_BYTES[state]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. `TrainConfig` replaces None by the default for its model (`filled`)."""

    lr: float = field(
        "Peak learning rate.",
        default=None,
        default_text="as published for the preset (llama-3-8b 3e-4, llama-tiny 2e-3), else "
        "2e-3 * (1e6 / parameters)^0.21; a fifteenth of it with init_from, two thirds for adapters; a "
        "twentieth of these with dpo.beta",
        above=0,
    )
    beta1: float = field("Decay rate of the mean of gradients.", default=0.9, unit="per step", minimum=0, below=1)
    beta2: float = field(
        "Decay rate of the mean of squared gradients.",
        default=None,
        default_text="0.95 as for LLaMA, 0.999 for adapters",
        unit="per step",
        minimum=0,
        below=1,
    )
    eps: float = field("Added to the denominator of the update.", default=1e-8, above=0)
    weight_decay: float = field(
        "Weight decay, on the kinds of parameters in optimizer.weight_decay_on.",
        default=None,
        default_text="0.1 as for LLaMA, 0 for adapters",
        unit="per step and lr",
        minimum=0,
    )
    weight_decay_on: tuple[str, ...] = field(
        f"Kinds of parameters with weight decay, some of {', '.join(KINDS)}; adapters are of the kind of their matrix.",
        default=MATRICES,
        choices=KINDS,
    )
    clip_norm: float | None = field("Gradient norm to clip to; none: no clipping.", default=1.0, above=0)
    state: State = field(  # noqa: RUF009
        "Type of AdamW's two moments: 8, 4 or 2 bytes per weight. bfloat16 and 8bit are rounded stochastically; 8bit "
        "has an fp32 scale for 256 neighbours. With them the master of a bfloat16 weight takes 2 bytes instead of 4.",
        default="float32",
    )
    offload: bool = field(
        "Keep the optimizer in host memory: its state and fp32 master weights, and run AdamW there. Saves 12 bytes "
        "of GPU memory per weight of a rank in bfloat16, 8 in float32; fewer with a smaller optimizer.state.",
        default=False,
    )
    offload_weights: bool = field(
        "With optimizer.offload: keep weights and gradients of blocks in host memory too, and copy them to the GPU "
        "block by block. Saves another 4 bytes per weight in bfloat16.",
        default=False,
    )
    kernel: Kernel = field(  # noqa: RUF009
        "AdamW kernel for 16-bit weights on a GPU; auto: the Triton kernel where it runs, else BMTrain's for bfloat16 "
        "and torch's for float16. bmtrain is for bfloat16.",
        default="auto",
    )
    loss_scale: float | None = field(
        "With dtype float16: loss scale of the first step, a power of 2. It halves at each step that is skipped "
        "because its gradient is not finite.",
        default=None,
        default_text=f"{LOSS_SCALE:.0f}",
        minimum=1,
        maximum=2.0**32,
    )
    loss_scale_steps: int | None = field(
        "With dtype float16: steps without a skipped one after which the loss scale doubles.",
        default=None,
        default_text=str(LOSS_SCALE_STEPS),
        unit="steps",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.state != "float32":
            require_kernel(self.kernel, self.state)
        if self.offload_weights and not self.offload:
            raise UserError("optimizer.offload_weights without optimizer.offload\nfix: --optimizer.offload too")
        if self.loss_scale is not None and math.frexp(self.loss_scale)[0] != 0.5:
            raise UserError(
                f"optimizer.loss_scale {self.loss_scale:g} is no power of 2, and scaling by it would round\n"
                f"allowed: 1, 2, 4 and so on\nfix: --optimizer.loss_scale {2 ** math.floor(math.log2(self.loss_scale))}"
            )

    def require_decay(self, trained: Collection[str]) -> None:
        """Check that kinds of parameters with weight decay are named only if it applies to each.

        The default and all kinds are always allowed: they mean those that are trained.

        Raises:
            UserError: There is no weight decay (adapters' default is 0), or no parameter of a kind is trained.
        """
        named, kinds, default = set(self.weight_decay_on), ",".join(self.weight_decay_on), ",".join(MATRICES)
        if named == set(MATRICES):
            return
        if not self.weight_decay:
            raise UserError(
                f"optimizer.weight_decay_on {kinds} has no effect: optimizer.weight_decay is 0\n"
                f"allowed: optimizer.weight_decay above 0, or optimizer.weight_decay_on {default}\n"
                "fix: --optimizer.weight_decay 0.1, or leave optimizer.weight_decay_on out"
            )
        absent = [each for each in KINDS if each in named - set(trained)]
        if absent and named != set(KINDS):
            able = ",".join(each for each in KINDS if each in trained)
            raise UserError(
                f"optimizer.weight_decay_on {kinds} has no effect on {' and '.join(absent)}, of which none is trained\n"
                f"allowed: some of {able}; the default and all kinds stand for those that are trained\n"
                f"fix: --optimizer.weight_decay_on {able}"
            )

    def require_dtype(self, dtype: str) -> None:
        """Check that the fields apply to weights of a dtype.

        Raises:
            UserError: A field has no effect, or the kernel would keep an overflow in its state.
        """
        for name in ("loss_scale", "loss_scale_steps"):
            if dtype != "float16" and getattr(self, name) is not None:
                raise UserError(
                    f"optimizer.{name} {getattr(self, name):g} has no effect with dtype {dtype}, whose gradients need "
                    f"no loss scale\nallowed: dtype float16\nfix: leave optimizer.{name} out, or --dtype float16"
                )
        if dtype == "float16" and self.kernel == "bmtrain" and not self.offload:
            raise UserError(
                "optimizer.kernel bmtrain with dtype float16: it keeps moments in fp16 times the loss scale, where an "
                "overflow stays\nallowed: auto, which keeps them in fp32\nfix: --optimizer.kernel auto"
            )
        if self.kernel == "bmtrain" and (dtype == "float32" or self.offload):
            why = "optimizer.offload: the host updates" if self.offload else "dtype float32: torch's kernel updates"
            raise UserError(
                f"optimizer.kernel bmtrain has no effect with {why} the weights\n"
                "allowed: dtype bfloat16 without optimizer.offload\nfix: leave optimizer.kernel out"
            )


def require_kernel(kernel: str, state: str) -> None:
    """Raise UserError if a kernel cannot keep small moments: BMTrain's, whose moments are fp32."""
    if kernel == "bmtrain":
        raise UserError(
            f"optimizer.kernel bmtrain with optimizer.state {state}: BMTrain's kernel keeps moments in fp32\n"
            "allowed: auto\nfix: --optimizer.kernel auto, or leave --optimizer.state out"
        )
