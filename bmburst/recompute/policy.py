"""What backward computes again instead of keeping it, as a name, and what that costs: plain data, without torch.

The formulas stand here alone; `bmburst.plan` and the choice of "auto" take them from here. With

    I: bytes of a block's input, `batch * tokens * hidden_size * itemsize` (over the ranks of a tensor group)
    A: of attention's results, `batch * tokens * heads * (head_dim * itemsize + 4)`
    R: of what else a block's backward reads
    F, T: seconds of a block's forward without attention (and, where `repeats_last` is false, without the last product),
        and of attention's forward with its communication
    C: seconds of the copy of what a block has in host memory, one way

| policy | kept on the GPU a block | in host memory | seconds again a block |
|---|---|---|---|
| none | I + A + R | 0 | 0 |
| block | I | 0 | F + T |
| block-keep-attention | I + A | 0 | F |
| block-keep-attention:f | I + f A | 0 | F + T of the first 1 - f of the sequence: (1 - f)^2 T for exchanged heads |
| ... +offload | less I | I | and what of C is longer than the block's forward, and of C than its backward |
| block-keep-attention... +offload-all | 0 | I + A (f A) | the same |
| any of these but none, +first-N | in the first N blocks as it says, in the others as none | likewise | likewise |

The blocks that keep everything are the last ones, because backward comes to them first. A step is the fullest when all
blocks are done with their forward. From there a block that keeps everything only gives memory back, while one that is
computed again first needs `R` more: were it the last, `R` would come on top of all that the others keep; as it is, `R`
comes when those are gone.

With offload, what is in host memory is on the GPU too for one block from its forward until the loss is done, and in
backward for two: the one at work and the next, which is on its way.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from bmburst.errors import UserError, unknown

NAMES = ("none", "block", "block-keep-attention")
"""What is computed again in backward: nothing, the whole block, or the block without its attention."""
AUTO = "auto"
OFFLOADS = {"": "nothing", "+offload": "inputs", "+offload-all": "all"}
POLICIES = (
    *NAMES,
    *("block-keep-attention:0.5", "block+offload", "block-keep-attention+offload"),
    *("block-keep-attention:0.5+offload", "block-keep-attention+offload-all", "block-keep-attention:0.5+offload-all"),
)
"""Those that the planner and "auto" try. Other fractions may be asked for."""
FIRST = "+first-"
MIXED = (
    ("block-keep-attention", "block-keep-attention+offload", "block-keep-attention+offload-all"),
    ("block", "block+offload"),
)
"""Of these they also try how few of the first layers need it, where not all can keep everything.

Of each row the first; where that does not fit, the others, which take memory of the hosts. By the formulas an offload
would need up to an eighth fewer layers where the first fits too, for 1 % of a step at most: less than they are off by.
Parts of attention are not among them: they save less for each second than one of these, at any length.
"""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of a block's tensors on a rank: `I`, `A` and `R` above."""

    input: float
    attended: float
    rest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What a block keeps for its backward, and where.

    The formulas are those of a block that it holds for.

    Attributes:
        recomputes: Whether anything is computed again.
        attention: The part of attention's results that is kept: of the end of the sequence, whose beginning is the
            cheaper one to compute again under a causal mask.
        offload: What of it lies in host memory until backward.
        layers: How many of a model's first layers it holds for; the others keep everything. None: all.
    """

    recomputes: bool = True
    attention: float = 0.0
    offload: Literal["nothing", "inputs", "all"] = "nothing"
    layers: int | None = None

    @classmethod
    def parse(cls, name: str) -> "Policy":
        """Return the policy of a name: one of `NAMES`, "block-keep-attention:0.5", each but "none" with "+offload",
        and behind that with "+first-20" for the first 20 layers.

        Raises:
            UserError: It is none, its fraction is not between 0 and 1, or its layers are not a number from 1 on.
        """
        if isinstance(name, str) and FIRST in name:
            whole, _, count = name.partition(FIRST)
            return replace(cls.parse(whole), layers=_layers(name, whole, count))
        text, plus, rest = name.partition("+") if isinstance(name, str) else (name, "", "")
        base, colon, fraction = text.partition(":") if isinstance(text, str) else (text, "", "")
        if base not in NAMES or plus + rest not in OFFLOADS:
            if name == AUTO:
                raise UserError(
                    "recompute policy 'auto' is decided by what a step needs, which is not known here\n"
                    "fix: block-keep-attention, or what bmburst train --recompute auto says"
                )
            raise unknown("recompute policy", name, POLICIES)
        keeps = base == "block-keep-attention"
        if base == "none" and plus:
            raise UserError(f"recompute policy '{name}' keeps everything\nfix: block{plus}{rest}, or none")
        if colon and not keeps:
            raise UserError(f"recompute policy '{name}': '{base}' keeps no attention\nfix: block-keep-attention:0.5")
        if rest == "offload-all" and not keeps:
            raise UserError(f"recompute policy '{name}' has inputs alone to offload\nfix: {base}+offload")
        attention = (_fraction(name, fraction) if colon else 1.0) if keeps else 0.0
        return cls(recomputes=base != "none", attention=attention, offload=OFFLOADS[plus + rest])  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """What `parse` takes."""
        if not self.recomputes:
            return "none"
        part = f":{self.attention:g}" if 0 < self.attention < 1 else ""
        base = f"block-keep-attention{part}" if self.attention else "block"
        suffix = next(suffix for suffix, what in OFFLOADS.items() if what == self.offload)
        return base + suffix + ("" if self.layers is None else f"{FIRST}{self.layers}")

    def kinds(self, layers: int) -> tuple[tuple["Policy", int], ...]:
        """Return the policies of the blocks of a model of so many layers: one, or the first ones' and the last ones'.

        With each comes the number of its layers.

        Raises:
            UserError: See `require_layers`.
        """
        if self.layers is None:
            return ((self, layers),)
        self.require_layers(layers)
        return (replace(self, layers=None), self.layers), (Policy(recomputes=False), layers - self.layers)

    def require_layers(self, layers: int) -> None:
        """Check that of a model of so many layers some keep everything, where it names the first ones.

        Raises:
            UserError: None does.
        """
        if self.layers is None or self.layers < layers:
            return
        everywhere = replace(self, layers=None).name
        fewer = f", or fewer: {everywhere}{FIRST}1 to {FIRST}{layers - 1}" if layers > 1 else ""
        raise UserError(
            f"recompute policy '{self.name}' names all of the model's {layers} layers, or more\n"
            f"fix: {everywhere}, which holds for all of them{fewer}"
        )

    def of_layers(self, layers: int) -> tuple["Policy", ...]:
        """Return the policy of each block of a model of so many layers; see `kinds`."""
        return tuple(policy for policy, count in self.kinds(layers) for _ in range(count))

    def kept(self, block: BlockBytes) -> float:
        """Return the bytes that each block keeps on the GPU from its forward to its backward."""
        if not self.recomputes:
            return block.input + block.attended + block.rest
        return self._held(block) - self.hosted(block)

    def hosted(self, block: BlockBytes) -> float:
        """Return the bytes that each block keeps in host memory."""
        held = {"nothing": 0.0, "inputs": block.input, "all": self._held(block)}
        return held[self.offload]

    def visiting(self, block: BlockBytes, layers: int, *, backward: bool) -> float:
        """Return the bytes on the GPU of what lies in host memory: after the last block's forward, or in backward."""
        return self.hosted(block) * (min(2, layers) if backward else 1)

    def again(self, forward: float, attention: float, attention_of_beginning: float) -> float:
        """Return the seconds that a block's recomputation takes.

        Args:
            forward: `F`.
            attention: `T`.
            attention_of_beginning: The same, of the part of the sequence whose attention is not kept.
        """
        if not self.recomputes:
            return 0.0
        if self.attention == 1:
            return forward
        return forward + (attention if self.attention == 0 else attention_of_beginning)

    def waiting(self, block: BlockBytes, bandwidth: float, forward: float, backward: float) -> float:
        """Return the seconds of a block's copies that its kernels do not hide.

        Args:
            block: The tensors.
            bandwidth: Bytes a second between the GPU and its host.
            forward: Seconds of a block's forward.
            backward: Of its backward, recomputation included.
        """
        copy = self.hosted(block) / bandwidth
        return max(0.0, copy - forward) + max(0.0, copy - backward)

    def _held(self, block: BlockBytes) -> float:
        return block.input + self.attention * block.attended


def _layers(name: str, whole: str, count: str) -> int:
    if whole == "none":
        raise UserError(
            f"recompute policy '{name}' keeps everything in all layers\n"
            f"fix: block-keep-attention{FIRST}{count}, or none"
        )
    if not re.fullmatch("[1-9][0-9]{0,5}", count):
        raise UserError(
            f"recompute policy '{name}' is to hold for the first '{count}' layers\n"
            f"allowed: 1 and more, below the model's layers, at the very end; fix: {whole}{FIRST}1, or {whole} for all"
        )
    return int(count)


def _fraction(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise UserError(
            f"recompute policy '{name}' keeps the attention of '{text}' of a sequence\n"
            "allowed: above 0 and below 1; fix: block-keep-attention:0.5, or block-keep-attention for all"
        )
    return value


def require_end(kept: float, layout: str, ranks: int) -> None:
    """Check that every rank can keep the attention of the same part of the end of a sequence.

    Args:
        kept: The part.
        layout: Name of the layout.
        ranks: That share the sequence.

    Raises:
        UserError: With this layout some would keep more.
    """
    if ranks == 1 or not 0 < kept < 1 or layout == "striped" or (layout == "zigzag" and kept == 0.5):
        return
    if layout == "zigzag":
        raise UserError(
            f"layout 'zigzag' cuts a sequence into halves, but the attention of {kept:g} of it is to be kept\n"
            "fix: recompute policy block-keep-attention:0.5, or layout striped"
        )
    raise UserError(
        f"layout '{layout}' has the end of a sequence on some of its {ranks} ranks: they would keep more than others\n"
        "fix: recompute policy block-keep-attention, or layout zigzag (0.5) or striped"
    )
