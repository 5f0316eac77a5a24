"""Recompute policies: which activations of a block are saved, and their cost in memory and time. Imports no torch.

`bmburst.plan` and `--recompute auto` use these formulas; they are defined only here. With

    I: bytes of a block's input, `batch * tokens * hidden_size * itemsize` (over the ranks of a tensor group)
    A: bytes of attention's results, `batch * tokens * heads * (head_dim * itemsize + 4)`
    R: bytes of the other activations that a block's backward reads
    P: bytes of the outputs of the MLP's gate and up matrices
    F, T: seconds of a block's forward without attention (and, where `repeats_last` is false, without the last product),
        and of attention's forward with its communication
    C: seconds of one copy of a block's tensors in host memory

| policy | saved on the GPU per block | in host memory | recompute seconds per block |
|---|---|---|---|
| none | I + A + R | 0 | 0 |
| block | I | 0 | F + T |
| block-keep-attention | I + A | 0 | F |
| block-keep-attention:f | I + f A | 0 | F + T of the first 1 - f of the sequence: (1 - f)^2 T for exchanged heads |
| ... +offload | less I | I | plus C beyond the block's forward, plus C beyond its backward |
| block-keep-attention... +offload-all | 0 | I + A (f A) | the same |
| any of these but none, +first-N | the first N blocks as above, the others as none | likewise | likewise |
| block..., +every-K | I for every K-th block, else 0 | likewise | plus a forward without attention for K - 1 of K |
| block, +keep-attention-last-N | A more for the last N blocks | 0 | T less for each of them |
| block..., +offload-first-N | I less for the first N blocks | I for these | as +offload |
| ... +offload-attention-first-M | A less for the first M blocks, where saved | A for these | as +offload |
| ..., +offload-mlp-first-N | as without it | P more for the first N blocks | less the products of gate and up |

With +first-N the last blocks save everything, because backward reaches them first. GPU memory peaks at the end of the
forward pass of all blocks. From there, the backward of a block that saves everything only frees memory, but a
recomputed block first allocates `R`: if it were the last, on top of the tensors saved by all other blocks.

+keep-attention-last-N applies to the last blocks for the same reason. With +every-K, K consecutive blocks are a
segment. When backward reaches a segment, the inputs and attention results of its blocks are recomputed from the input
of the first block, and kept until the backward of their block. So each attention is recomputed once.

With offload, the offloaded tensors are also on the GPU for one block from its forward until the loss is computed, and
for two blocks in backward: the current block and the next one, which is being prefetched. Those of a segment are all
copied to the GPU when its backward begins: the input first, then attention results, while inputs are recomputed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from bmburst.errors import UserError, require_known, unknown

NAMES = ("none", "block", "block-keep-attention")
"""Base policies. Backward recomputes nothing, the whole block, or the block without its attention."""
AUTO = "auto"
POLICIES = (
    *NAMES,
    *("block-keep-attention:0.5", "block+offload", "block-keep-attention+offload"),
    *("block-keep-attention:0.5+offload", "block-keep-attention+offload-all", "block-keep-attention:0.5+offload-all"),
)
"""The policies that the planner and "auto" compare. Users can set other fractions."""
_OFFLOADS = MappingProxyType({"offload": "inputs", "offload-all": "all"})
_COUNTS = MappingProxyType(
    {
        "every": "every",
        "keep-attention-last": "keeps_last",
        "offload-first": "offloads_first",
        "offload-attention-first": "offloads_attention",
        "offload-mlp-first": "offloads_mlp",
        "first": "layers",
    }
)
"""Fields of a whole model by the option that sets them, each followed by a number of layers: "+every-4"."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of a block's tensors on a rank: `I`, `A`, `R` and `P` above."""

    input: float
    attended: float
    rest: float
    mlp: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Which activations a block saves for its backward, and where. The cost methods are for one block that follows it.

    Attributes:
        recomputes: Whether anything is recomputed.
        attention: The fraction of attention's results that is saved, for the last tokens of the sequence: under a
            causal mask the first tokens are cheaper to recompute.
        offload: Which saved tensors are in host memory until backward.
        layers: N of "+first-N": only the first N layers of a model recompute, the others save everything. None: all.
        every: K of "+every-K": one of K consecutive layers of a model saves its input.
        keeps_last: N of "+keep-attention-last-N": the last N layers of a model save all of attention's results.
        offloads_first: N of "+offload-first-N": the first N layers of a model offload their saved inputs.
        offloads_attention: M of "+offload-attention-first-M": the first M layers of a model also offload attention's
            results, where they save all of them. At most `offloads_first`.
        offloads_mlp: N of "+offload-mlp-first-N": the first N layers of a model also save the outputs of the MLP's gate
            and up matrices, in host memory. For the policy of one layer: 1 if it does. Not with `every`.
        is_stored: For the policy of one layer: whether its input is saved. Otherwise it is recomputed from the layers
            before.
        feeds_next: For the policy of one layer: whether its output is recomputed, as the input of the next layer.

    Raises:
        UserError: A field is out of range, or fields exclude each other.
    """

    recomputes: bool = True
    attention: float = 0.0
    offload: Literal["nothing", "inputs", "all"] = "nothing"
    layers: int | None = None
    every: int = 1
    keeps_last: int = 0
    offloads_first: int = 0
    offloads_attention: int = 0
    offloads_mlp: int = 0
    is_stored: bool = True
    feeds_next: bool = False

    def __post_init__(self) -> None:
        require_known("offload", self.offload, ("nothing", *_OFFLOADS.values()))
        self._require_numbers()
        for problem, fix in self._problems():
            raise UserError(f"recompute policy '{self.name}' {problem}\nfix: {fix}")

    @classmethod
    def parse(cls, name: "str | Policy") -> "Policy":
        """Return the policy of a name; a policy is returned unchanged.

        A name is one of `NAMES` or "block-keep-attention:0.5". Options follow in any order: "+offload" or
        "+offload-all", "+first-20" (for the first 20 layers), "+every-4", "+keep-attention-last-5", "+offload-first-8",
        "+offload-attention-first-6" and "+offload-mlp-first-20".

        Raises:
            UserError: It is a function, the name is unknown, its fraction is not between 0 and 1, its layers are not an
                integer >= 1, or its options exclude each other.
        """
        if isinstance(name, Policy):
            return name
        if callable(name):  # as in torch's order of arguments; the text of a module has hundreds of lines
            raise UserError(
                f"a recompute policy is text or a Policy, got {type(name).__name__}, which can be called\n"
                "fix: the policy first, checkpoint('block-keep-attention', function, ...)"
            )
        if name == AUTO:
            raise UserError(
                "recompute policy 'auto' depends on the memory of a step, which is not known here\n"
                "fix: block-keep-attention, or the policy that bmburst train --recompute auto prints"
            )
        whole, *options = str(name).split("+")
        base, colon, fraction = whole.partition(":")
        if base not in NAMES:
            raise unknown("recompute policy", whole, POLICIES)
        keeps = base == "block-keep-attention"
        if colon and not keeps:
            raise UserError(f"recompute policy '{name}': '{base}' keeps no attention\nfix: block-keep-attention:0.5")
        fields: dict[str, Any] = {"recomputes": base != "none"}
        fields["attention"] = _fraction(name, fraction) if colon else float(keeps)
        for option in options:
            field, value = _option(name, option)
            if field in fields:
                raise UserError(f"recompute policy '{name}' sets '{option}' twice\nfix: leave one of them out")
            fields[field] = value
        return cls(**fields)

    @property
    def is_of_model(self) -> bool:
        """Whether it differs between layers; `of_layers` returns the policy of each layer."""
        return self.layers is not None or not self.is_uniform

    @property
    def name(self) -> str:
        """The name of the policy, which `parse` accepts."""
        part = f":{self.attention:g}" if self.attention != 1 else ""
        base = f"block-keep-attention{part}" if self.attention else "block"
        return (base if self.recomputes else "none") + self._suffix

    @property
    def _suffix(self) -> str:
        """The options of the name."""
        given = [option for option, what in _OFFLOADS.items() if what == self.offload]
        for option, field in _COUNTS.items():
            count = getattr(self, field)
            if count not in (None, 0) and (field, count) != ("every", 1):
                given.append(f"{option}-{count}")
        return "".join(f"+{option}" for option in given)

    def kinds(self, layers: int) -> tuple[tuple["Policy", int], ...]:
        """Return the distinct policies of the blocks of a model with `layers` layers, each with its number of blocks.

        Raises:
            UserError: See `require_layers`.
        """
        found, of_layers = _kinds(self, layers)
        return tuple((policy, of_layers.count(i)) for i, policy in enumerate(found))

    def kinds_of_layers(self, layers: int) -> tuple[int, ...]:
        """Return for each block the index of its policy among `kinds`."""
        return _kinds(self, layers)[1]

    def require_layers(self, layers: int) -> None:
        """Raise UserError unless "+first-N" names fewer layers than the model has."""
        if self.layers is None or self.layers < layers:
            return
        everywhere = replace(self, layers=None).name
        fewer = f", or fewer: {everywhere}+first-1 to +first-{layers - 1}" if layers > 1 else ""
        raise UserError(
            f"recompute policy '{self.name}' names all of the model's {layers} layers, or more\n"
            f"fix: {everywhere}, which holds for all of them{fewer}"
        )

    def allows_tensor(self, ranks: int) -> bool:
        """Return whether it works with a tensor degree of `ranks`, as +every-K and +offload-mlp-first-N do not."""
        return ranks == 1 or (self.every == 1 and not self.offloads_mlp)

    def require_tensor(self, ranks: int) -> None:
        """Raise UserError unless the policy works with a tensor degree of `ranks`; see `allows_tensor`."""
        if not self.allows_tensor(ranks):
            raise UserError(
                f"recompute policy '{self.name}' with tensor parallelism {ranks}\n"
                f"fix: {replace(self, every=1, offloads_mlp=0).name}, or tensor parallelism 1"
            )

    def allows_stages(self) -> bool:
        """Return whether it works in a pipeline, in which passes of several micro-batches alternate."""
        return self.every == 1 and not self.offloads

    def require_stages(self, stages: int) -> None:
        """Raise UserError unless the policy works in a pipeline of `stages` stages; see `allows_stages`."""
        if not self.allows_stages():
            raise UserError(
                f"recompute policy '{self.name}' in a pipeline of {stages} stages\n"
                "allowed: policies without +every- and without offload\nfix: --recompute block"
            )

    @property
    def is_uniform(self) -> bool:
        """Whether the policy has no option of a whole model except "+first-N"."""
        return self.every == 1 and not (self.keeps_last or self.offloads_first or self.offloads_mlp)

    @property
    def offloads(self) -> bool:
        """Whether blocks keep anything in host memory."""
        return self.offload != "nothing" or self.offloads_first > 0 or self.offloads_mlp > 0

    def of_layers(self, layers: int) -> tuple["Policy", ...]:
        """Return the policy of each block of a model with `layers` layers.

        Raises:
            UserError: See `require_layers`.
        """
        return _of_layers(self, layers)

    def of_layer(self, i: int, layers: int) -> "Policy":
        """Return the policy of one block; see `of_layers`."""
        if self.layers is not None and i >= self.layers:
            return Policy(recomputes=False)
        is_stored = i % self.every == 0
        attention = 1.0 if i >= layers - self.keeps_last else self.attention
        offload = ("inputs" if i < self.offloads_first else self.offload) if is_stored else "nothing"
        return Policy(
            recomputes=self.recomputes,
            attention=attention,
            offload="all" if i < self.offloads_attention and attention == 1 else offload,
            offloads_mlp=int(i < self.offloads_mlp),
            is_stored=is_stored,
            feeds_next=(i + 1) % self.every != 0 and i + 1 < layers,
        )

    def prefetches(self, i: int, layers: int) -> bool:
        """Return whether the backward of layer `i` prefetches what the layer before it has in host memory.

        The first layer that saves everything does, if at least two others follow it. Their backward has then freed
        more memory than the prefetched tensors take.
        """
        # The first layer without +offload-mlp does not prefetch outputs of an MLP where its own inputs are in host
        # memory. The layers behind it have freed attention's results at most, and nothing under "block+offload": those
        # of 7 layers of llama-3-8b take as much as the outputs. So memory could peak there, for one copy a step.
        return self.layers == i and self.of_layer(i - 1, layers).offloads and layers - i > 2

    def _require_numbers(self) -> None:
        """Check that fields from Python are numbers, without which the policy has no name."""
        for name in (*_COUNTS.values(), "attention"):
            value: object = getattr(self, name)
            kinds, allowed = (int | float, "a number") if name == "attention" else (int, "a whole number of layers")
            if (isinstance(value, bool) or not isinstance(value, kinds)) and not (name == "layers" and value is None):
                raise UserError(
                    f"recompute policy with {name} {value!r}\nallowed: {allowed}\nfix: Policy({name}=1), for example"
                )

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield what contradicts itself, with the fix."""
        if not self.recomputes and (self.attention or self._suffix):
            yield "keeps everything", f"block{self._suffix}, or none"
        first = 1 if self.layers is None else self.layers
        counts = self.keeps_last, self.offloads_first, self.offloads_attention, self.offloads_mlp
        if min(*counts, self.every - 1, first - 1) < 0:
            yield "has a number of layers that is too small", "1 layer and more"
        if not 0 <= self.attention <= 1:
            yield f"keeps attention of {self.attention:g} of a sequence", "a fraction from 0 to 1"
        if self.offload == "all" and not self.attention:
            yield "has only inputs to offload", "block+offload"
        if self.layers is not None and (self.every > 1 or self.keeps_last or self.offloads_first):
            yield "has +first- beside an option other than +offload-mlp-first-", "one of them alone"
        if self.keeps_last and self.attention:
            yield "keeps attention in all layers", "block, with +keep-attention-last-"
        if self.offloads_first and self.offload != "nothing":
            yield "offloads all layers", "one offload alone"
        if (count := self.offloads_attention) > self.offloads_first:
            fix = f"+offload-first-{count}+offload-attention-first-{count}"
            yield "offloads attention of layers whose inputs it does not offload", fix
        if self.offloads_attention and self.attention < 1 and not self.keeps_last:
            yield "keeps no attention to offload", "+keep-attention-last-5, or without it"
        if self.every > 1 and (0 < self.attention < 1 or self.offload == "all"):
            fix = f"block+every-{self.every}, or block-keep-attention+every-{self.every}"
            yield "cannot recompute inputs", fix
        if self.every > 1 and self.offloads_mlp:
            yield "has +every- beside +offload-mlp-first-", "one of them alone"
        if self.layers is not None and self.offloads_mlp > self.layers:
            yield "offloads more layers than +first-", f"+offload-mlp-first-{self.layers}"

    def kept(self, block: BlockBytes) -> float:
        """Return the bytes that each block saves on the GPU from its forward to its backward."""
        if not self.recomputes:
            return block.input + block.attended + block.rest
        return self._held(block) - self._moved(block)

    @property
    def in_segment(self) -> bool:
        """For the policy of one layer: whether it is in a segment of several layers ("+every-K")."""
        return self.feeds_next or not self.is_stored

    def hosted(self, block: BlockBytes) -> float:
        """Return the bytes that each block saves in host memory."""
        return self._moved(block) + (block.mlp if self.offloads_mlp else 0.0)

    def _moved(self, block: BlockBytes) -> float:
        """Return the bytes of input and attention's results that are saved in host memory instead of on the GPU."""
        saved = block.input if self.is_stored else 0.0
        held = {"nothing": 0.0, "inputs": saved, "all": self._held(block)}
        return held[self.offload]

    def again(self, forward: float, attention: float, attention_of_beginning: float) -> float:
        """Return the seconds of a block's recompute.

        Args:
            forward: `F`.
            attention: `T`.
            attention_of_beginning: `T` of the first tokens, whose attention is not saved.
        """
        if not self.recomputes:
            return 0.0
        if self.attention == 1:
            return forward
        return forward + (attention if self.attention == 0 else attention_of_beginning)

    def waiting(self, block: BlockBytes, bandwidth: float, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds of a block's copies that its passes do not hide. A segment's input is not prefetched.

        Args:
            block: The tensors.
            bandwidth: Bytes per second between the GPU and its host.
            forward: Seconds of a block's forward.
            backward: Seconds of its backward, including recompute.

        Returns:
            Those of forward, and of backward.
        """
        copy = self.hosted(block) / bandwidth
        first = block.input / bandwidth if self.feeds_next and self.is_stored and copy else 0.0
        return max(0.0, copy - forward), first + max(0.0, copy - first - backward)

    def _held(self, block: BlockBytes) -> float:
        return (block.input if self.is_stored else 0.0) + self.attention * block.attended


@lru_cache(maxsize=1024)  # the planner asks for the same policies at every length that it tries
def _of_layers(policy: Policy, layers: int) -> tuple[Policy, ...]:
    policy.require_layers(layers)
    return tuple(policy.of_layer(i, layers) for i in range(layers))


@lru_cache(maxsize=1024)
def _kinds(policy: Policy, layers: int) -> tuple[tuple[Policy, ...], tuple[int, ...]]:
    every = policy.of_layers(layers)
    index = {each: i for i, each in enumerate(dict.fromkeys(every))}
    return tuple(index), tuple(index[each] for each in every)


def _option(name: str, option: str) -> tuple[str, Any]:
    """Return the field that an option of a name sets, and its value."""
    if option in _OFFLOADS:
        return "offload", _OFFLOADS[option]
    word, _, count = option.rpartition("-")
    if word not in _COUNTS:
        raise unknown("recompute policy", name, POLICIES)
    if not re.fullmatch("[1-9][0-9]{0,5}", count):
        raise UserError(
            f"recompute policy '{name}' has '{count}' layers behind +{word}-\n"
            f"allowed: 1 and more, at most those of the model\nfix: +{word}-4"
        )
    return _COUNTS[word], int(count)


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
    """Check that a fraction of attention, saved for the last tokens, is the same number of tokens on every rank.

    Args:
        kept: The saved fraction of the sequence.
        layout: Name of the layout.
        ranks: Ranks that share the sequence.

    Raises:
        UserError: With this layout, some ranks would save more than others.
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
