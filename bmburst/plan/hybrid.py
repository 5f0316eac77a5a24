"""Estimates a training step of a hybrid of transformers: attention beside recurrent layers on split sequences.

This is simpler than the planner of bmburst's own models. All ranks share each sequence in zigzag order, under FSDP2,
with AdamW and the recompute policy "block-keep-attention" of `bmburst.integrations.transformers.recompute`. Counts of
weights and exchanged bytes are exact. Seconds and activations are estimates. They say 1.29 s and 28.4 GiB of torch for
the run of benchmarks/results/hybrid_2xh200_202611.md, which took 1.46 s and 29.0 GiB with older kernels of the gated
delta rule, and 1.19 s for that of benchmarks/results/hybrid_h200_202611.md, which took 1.22 s.

- attention is that of the cost model (`bmburst.schedule.cost`), whose errors are measured;
- a matrix product takes 2 FLOPs for each weight that a token meets, forward, recomputed, and twice backward;
- a recurrence takes `RECURRENCE` for each number of its states, a convolution `CONVOLUTION` for each channel;
- latent attention exchanges and computes keys and values of all heads;
- recurrent layers keep the states between fragments and the factors of chunks as kernels do, and a block in
  backward has their inputs beside the results of its matrix products;
- norms, activations, gates and casts, which transformers computes one by one, take `ELEMENTWISE` for each number that
  the products of a block give;
- routing and the host are not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

from bmburst.amounts import gib, short
from bmburst.blocks.dtypes import ITEMSIZE
from bmburst.errors import UserError
from bmburst.schedule.cost import LinearCost, Placement, Problem
from bmburst.schedule.hardware import Hardware, sustained
from bmburst.schedule.layout import Zigzag
from bmburst.schedule.mask import Causal
from bmburst.schedule.strategy import choose_strategy
from bmburst.schedule.units import HeadShapes
from bmburst_ops.fragments import CHUNK, DELTA_KINDS, fragment_tokens, fragments

_MEASURED = 65_536 * 32 * 128 * 128  # tokens times numbers of a state
RECURRENCE = MappingProxyType(
    {"decay": 6.7e-3 / _MEASURED, "gated_delta": 11.5e-3 / _MEASURED, "kda": 24.6e-3 / _MEASURED}
)
"""Seconds for a token and a number of a state, both passes, by the kind of recurrence. Measured with 65,536 tokens and
32 heads of 128 x 128 on an H200, without exchange. Other machines are assumed to be as fast."""
_KEPT = MappingProxyType({"decay": 0, "gated_delta": CHUNK + 8, "kda": 2 * CHUNK})
"""Numbers in bf16 that kernels keep for a token and head: rows of the matrices of its chunk, and what they keep in fp32
of it: a sum of decays, beta and two norms."""
CONVOLUTION = 1.6e-3 / (32_768 * 8_192)
"""Seconds for a token and a channel, forward twice and backward once, with 4 taps on an H200."""
ELEMENTWISE = 0.33 / (32_768 * 8 * 45_120)
"""Seconds for a token and a number that the matrix products of a block give, in all passes. From a profile of 8 blocks
of Qwen3.5 on an H200, without torch.compile."""
_STATE = 4  # bytes of a number of a state: fp32
_PASSES = 4  # of matrix products: forward, recomputed, and twice backward
_SHARDS = 16  # bytes of a weight: fp32 weight, gradient and both moments of AdamW
_OPTIMIZER = 44  # bytes that AdamW, the norm of gradients, clipping and clearing read and write for each weight
_LINKS = 2  # runs of tokens of a rank in zigzag order
_CHUNK = 3 * _STATE  # bytes of a logit in the loss: logits, their gradient and a copy, of one chunk of tokens
_LOSS_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Sizes of an attention layer: query heads, KV heads, and the dimensions of a key and of a value."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def kept(self) -> int:
        """Numbers that recompute keeps for a token: the output and a logarithm of each head."""
        return self.heads * (self.value_dim + 1)


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """Sizes of a recurrent layer.

    Attributes:
        state: Heads, rows and columns of the state; empty for a convolution alone.
        kind: Of `bmburst_ops.linear.Recurrence`; "" for a convolution alone.
        channels: Channels of its convolution.
        width: Tokens of its convolution.
        gates: Gates of a head for a token, in fp32.
    """

    state: tuple[int, ...]
    kind: str
    channels: int
    width: int
    gates: int

    @property
    def kept(self) -> int:
        """Numbers that recompute keeps for a token: the output of the recurrence, and what its kernels keep."""
        return self.state[0] * (self.state[-1] + _KEPT[self.kind]) if self.state else 0

    @property
    def inputs(self) -> int:
        """Bytes for a token of what a recurrence saves in the block that runs backward: its inputs."""
        heads, rows, columns = self.state or (0, 0, 0)
        return heads * (ITEMSIZE["bfloat16"] * (2 * rows + columns) + _STATE * self.gates)

    def kept_states(self, sequence: int, batch: int, gpus: int, multiprocessors: float) -> int:
        """Return the bytes of states and M that recompute keeps, besides outputs.

        Args:
            sequence: Tokens of a sequence.
            batch: Sequences.
            gpus: GPUs that share them.
            multiprocessors: Those of a GPU.
        """
        if not self.state:
            return 0
        pieces = batch * (_LINKS if gpus > 1 else 1)
        piece = -(-batch * sequence // (gpus * pieces))
        tokens = fragment_tokens(self.kind, piece * pieces, self.state[0], self.state[-1], multiprocessors)
        in_piece = len(fragments((0, piece), tokens)[0]) - 1
        if gpus == 1 and in_piece == 1:  # it begins with a state that is zero, and nobody reads the last one
            return 0
        kept = pieces * (in_piece + (gpus > 1))  # of fragments, and of the links between ranks
        return kept * (self.costs(gpus, batch)[0].transition + _STATE * prod(self.state))

    def costs(self, size: int, batch: int) -> tuple[LinearCost, LinearCost]:
        """Return the exchanges of the recurrence and of the convolution over `size` ranks."""
        heads, rows, _ = self.state or (0, 0, 0)
        m = _STATE * heads * (rows * rows if self.kind in DELTA_KINDS else 1)
        state = _STATE * prod(self.state or (0,))
        links = _LINKS * batch
        halo = ITEMSIZE["bfloat16"] * self.channels * (self.width - 1)
        return (
            LinearCost(size=size, links=links, transition=m, state=state),
            LinearCost(size=size, links=links, transition=0, state=halo),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hybrid:
    """What a step depends on in a model of transformers.

    Attributes:
        name: The model_type.
        layers: Blocks.
        hidden: Width of the residual stream.
        vocabulary: Rows of the head.
        weights: All weights; tied ones count once.
        active: Weights of matrix products that a token meets, those of the head included.
        largest: Weights of the largest block.
        widest: Numbers that the matrix products of a block give for a token, in the widest block.
        attention: Layers of attention, each with its number.
        recurrent: Recurrent layers, each with its number.
    """

    name: str
    layers: int
    hidden: int
    vocabulary: int
    weights: int
    active: float
    largest: int
    widest: float
    attention: Mapping[AttentionLayer, int]
    recurrent: Mapping[RecurrentLayer, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridStep:
    """The estimate of a step.

    Attributes:
        seconds: Seconds by part.
        memory: Bytes of a GPU by part.
        exchanged: Bytes that a rank receives for all recurrent layers, both passes; no estimate.
        capacity: Bytes of the GPU.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    exchanged: int
    capacity: float

    @property
    def fits(self) -> bool:
        """Whether the estimated memory fits into the GPU."""
        return sum(self.memory.values()) <= self.capacity


def hybrid_step(model: Hybrid, sequence: int, batch: int, gpus: int, hardware: Hardware) -> HybridStep:
    """Return the estimate of a step.

    Args:
        model: The model.
        sequence: Tokens of a sequence.
        batch: Sequences of a step.
        gpus: GPUs of one node, which share every sequence.
        hardware: The machine.

    Raises:
        UserError: There are fewer tokens than GPUs.
    """
    if sequence < gpus:
        raise UserError(f"--sequence-length {sequence} is less than a token a GPU\nallowed: at least {gpus}")
    rows, itemsize = batch * -(-sequence // gpus), ITEMSIZE["bfloat16"]
    seconds = dict.fromkeys(
        ("attention", "attention communication", "recurrences", "convolutions", "exchange of states"), 0.0
    )
    for layer, count in model.attention.items():
        kernel, exposed = _attention(layer, sequence, batch, gpus, hardware)
        seconds["attention"] += count * kernel
        seconds["attention communication"] += count * exposed
    exchanged = 0
    for recurrent, count in model.recurrent.items():
        if recurrent.state:
            seconds["recurrences"] += count * rows * prod(recurrent.state) * RECURRENCE[recurrent.kind]
        seconds["convolutions"] += count * rows * recurrent.channels * CONVOLUTION
        state, halo = recurrent.costs(gpus, batch)
        for cost, hops in ((state, state.hops(hardware)), (halo, 1)):
            if gpus > 1 and cost.state:
                exchanged += count * (cost.forward_bytes(hops) + cost.backward_bytes(hops))
                seconds["exchange of states"] += count * cost.seconds(hops, hardware)
    seconds["matmul"] = sustained(hardware).matmul_seconds(2.0 * _PASSES * model.active * rows, rows)
    seconds["norms, activations"] = rows * model.layers * model.widest * ELEMENTWISE
    # Forward and backward gather weights, backward scatters gradients; they overlap with the rest.
    moved = 3.0 * itemsize * model.weights * (1 - 1 / gpus) / hardware.collective_bandwidth
    seconds["FSDP2"] = max(0.0, moved - sum(seconds.values()))
    seconds["optimizer"] = hardware.memory_seconds(_OPTIMIZER * model.weights / gpus)
    kept = sum(count * layer.kept for layer, count in model.attention.items())
    kept += sum(count * layer.kept for layer, count in model.recurrent.items())
    size = sequence, batch, gpus, hardware.multiprocessors
    states = sum(count * layer.kept_states(*size) for layer, count in model.recurrent.items())
    inputs = max((layer.inputs for layer in model.recurrent), default=0)
    memory = {
        "weights, gradients, AdamW": _SHARDS * model.weights / gpus,
        "kept for backward": rows * itemsize * float(model.layers * model.hidden + kept) + states,
        "block in backward": 2.0 * rows * (itemsize * model.widest + inputs),  # activations and their gradients
        "gathered weights": 3.0 * itemsize * model.largest,  # two blocks, and a gradient
        "loss chunk": float(_CHUNK * min(rows, _LOSS_TOKENS) * model.vocabulary),
        "libraries, workspace": hardware.reserved + hardware.workspace + hardware.nccl_memory * gpus * (gpus > 1),
    }
    seconds = {name: spent for name, spent in seconds.items() if spent}
    return HybridStep(seconds=seconds, memory=memory, exchanged=exchanged, capacity=hardware.memory)


def _attention(layer: AttentionLayer, sequence: int, batch: int, gpus: int, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of an attention layer, and those of its exposed transfers."""
    shapes = HeadShapes(
        layout=Zigzag(gpus, 2 * -(-sequence // (2 * gpus))),
        degree=1,
        batch=batch,
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        itemsize=ITEMSIZE["bfloat16"],
        statistics_itemsize=_STATE,
    )
    asked = shapes, sequence, Causal(), Placement("peer"), hardware
    cost = Problem(*asked).cost(choose_strategy("auto", *asked))
    exposed = cost.forward.exposed + cost.backward.exposed
    return cost.total - exposed, exposed


def hybrid_report(model: Hybrid, step: HybridStep, sequence: int, batch: int, gpus: int, hardware: Hardware) -> str:
    """Return the report of an estimate."""
    total, used = sum(step.seconds.values()), sum(step.memory.values())
    attention, recurrent = sum(model.attention.values()), sum(model.recurrent.values())
    lines = [
        f"{model.name}, {short(sequence, commas=True)} tokens x {batch} a step, {gpus} x {hardware.name}, in "
        "transformers under FSDP2",
        f"{model.weights:,} weights, {model.active:,.0f} in the products of a token; {model.layers} blocks with "
        f"{attention} attention and {recurrent} recurrent layers",
        *([f"recurrent layers exchange {step.exchanged:,} bytes a rank and step, for any length"] if recurrent else ()),
        "",
        f"estimated time of a step: {total:.3g} s, {batch * sequence / total / gpus:,.0f} tokens/s/GPU, at best",
        *(f"  {name:26} {seconds:10.3g} s  {seconds / total:6.1%}" for name, seconds in step.seconds.items()),
        "",
        f"estimated peak memory of a GPU: {gib(used)} of {gib(step.capacity)} GiB",
        *(f"  {name:26} {gib(nbytes):>8} GiB" for name, nbytes in step.memory.items()),
        "",
        "Weights and exchanged bytes are exact. Seconds and GiB are estimates, compared with one run of Qwen3.5.",
        "Routing and the host are not counted. Norms and activations are those without torch.compile.",
    ]
    if not step.fits:
        lines[:0] = ["It does not fit into memory: use more GPUs or a shorter sequence.", ""]
    return "\n".join(lines)


def hybrid_json(model: Hybrid, step: HybridStep, sequence: int, batch: int, gpus: int, hardware: Hardware) -> Any:
    """Return an estimate as plain data for JSON, in bytes and seconds."""
    return {
        "task": {"model": model.name, "sequence": sequence, "gpus": gpus, "batch": batch},
        "hardware": hardware.name,
        "weights": model.weights,
        "active": model.active,
        "exchanged": step.exchanged,
        "estimate": {
            "seconds": sum(step.seconds.values()),
            "parts": dict(step.seconds),
            "memory": sum(step.memory.values()),
            "lines": dict(step.memory),
            "fits": step.fits,
        },
    }
