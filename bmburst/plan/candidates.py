"""The training task (`Task`), and the ways to train it (`Candidate`).

A way is a mesh of pipe x data x sequence x tensor ranks, an attention strategy, a recompute policy, and a ZeRO stage
and group. Ranks are placed as in `bmburst.schedule.parallelism`, node by node: from the innermost dimension to the
outermost, tensor ranks, ranks that exchange heads (Ulysses), the ring or gather between such groups, data parallel
ranks, and stages of a pipeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import cast

from bmburst.blocks.config import LlamaConfig, LoRAConfig, kv_heads_at_once, mlp_chunk
from bmburst.blocks.dtypes import ITEMSIZE, DtypeName
from bmburst.config import option_name
from bmburst.errors import UserError, require_known
from bmburst.optim.config import MOMENT_BYTES, State
from bmburst.plan.counts import WIDE, Operators, block_parameters, causal_pairs, four_bit_saving, head_layers
from bmburst.recompute.policy import Policy
from bmburst.schedule.cost import AttentionCost, Placement, Problem
from bmburst.schedule.hardware import Hardware
from bmburst.schedule.layout import Balanced, Zigzag
from bmburst.schedule.mask import Mask, causal_mask
from bmburst.schedule.parallelism import MOST_RANKS, Outer, RingTensors, Strategy
from bmburst.schedule.pipeline import stage_layers
from bmburst.schedule.tree import Tree
from bmburst.schedule.units import HeadShapes, Sizes, choose_ring_tensors, with_units
from bmburst_ops.bounded_cache import bounded_cache

MOST_GPUS = MOST_RANKS


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A training step of a model on some GPUs.

    Attributes:
        model: The model's configuration.
        preset: Name of the model, for the command line.
        init_from: Hugging Face directory that training starts from, instead of the preset.
        sequence: Tokens per sequence.
        gpus: Number of GPUs.
        nodes: Number of nodes, with the same number of GPUs each.
        batch: Sequences per step.
        micro_batch: Sequences that a data parallel group computes at once.
        dtype: dtype of weights and activations.
        state: Type of AdamW's moments, as in `OptimizerConfig`.
        loss_chunk: Number of a rank's tokens whose logits are computed at once.
        mlp_chunk: Number of a rank's tokens that an MLP computes at once; see `bmburst.blocks.config.mlp_chunk`.
        lora: Adapters to train with frozen weights; None trains the weights.
        pairs: Whether it is preference training (DPO), in which each step also runs a reference model forward.
        pack: `--pack` of the run's command; None for the default.
        shared_prompt: Tokens of a prompt that the answers in a sequence share (`--pack trees`); 0: a sequence is one
            text.
        answers: Number of these answers, which have the rest of the sequence in equal parts.
        second_model: Whether the reference is a separate model, not the trained model without its adapters.
        host_memory: GiB of a node's host memory in the run's command; None for the free memory.

    Raises:
        UserError: A value is out of range or the values do not fit together.
    """

    model: LlamaConfig
    preset: str = "a model"
    init_from: str | None = None
    sequence: int
    gpus: int
    nodes: int = 1
    batch: int = 1
    micro_batch: int = 1
    dtype: DtypeName = "bfloat16"
    state: State = "float32"
    loss_chunk: int = 1024
    mlp_chunk: int | None = None
    lora: LoRAConfig | None = None
    pairs: bool = False
    pack: str | None = None
    shared_prompt: int = 0
    answers: int = 2
    second_model: bool = False
    host_memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("sequence", "gpus", "nodes", "batch", "micro_batch", "loss_chunk"):
            if getattr(self, name) < 1:
                setting = "nproc" if name == "gpus" else SETTINGS.get(name, name)
                raise UserError(f"{option_name(setting, {})} {getattr(self, name)}\nfix: at least 1")
        if self.mlp_chunk is not None and self.mlp_chunk < 0:
            raise UserError(f"--mlp-chunk-tokens {self.mlp_chunk}\nfix: at least 1, or 0 for all tokens at once")
        if self.gpus > MOST_GPUS or self.gpus % self.nodes:
            raise UserError(
                f"--nproc {self.gpus // self.nodes} with --nodes {self.nodes} is {self.gpus} GPUs\n"
                f"allowed: 1 to {MOST_GPUS}, as many on each node\nfix: another --nproc or --nodes"
            )
        if self.batch % self.micro_batch:
            raise UserError(
                f"--micro-batch-size {self.micro_batch} does not divide --batch-size {self.batch}\n"
                "fix: a divisor of --batch-size, for example 1"
            )
        require_known("dtype", self.dtype, ITEMSIZE)
        require_known("--optimizer.state", self.state, MOMENT_BYTES)

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs per node."""
        return self.gpus // self.nodes

    @property
    def tree(self) -> Tree | None:
        """The prompt and its answers; None for a sequence of one text.

        With more tokens, a step over several ranks may take some tenths of a percent less time: chunks of the layout
        then begin at other places of the answers, so that a rank has fewer tiles or needs fewer keys of others. A run
        has the same layout.
        """
        if not self.shared_prompt:
            return None
        rest = max(0, self.sequence - self.shared_prompt)
        answers = [rest // self.answers + (i < rest % self.answers) for i in range(self.answers)]
        lengths = [min(self.sequence, self.shared_prompt), *filter(None, answers)]
        return Tree([-1, *[0] * (len(lengths) - 1)], lengths)

    @property
    def query_key_pairs(self) -> float:
        """Visible pairs of a query and a key of a step, in one head and layer."""
        tree = self.tree
        if tree is None:
            return self.batch * causal_pairs([self.sequence], self.model.sliding_window)
        return self.batch * (causal_pairs(tree.lengths) + tree.tokens_below_ancestors)

    @property
    def trained(self) -> int:
        """Number of trained parameters: all, or those of adapters and of modules that are trained whole."""
        return self.lora.trained(self.model) if self.lora else self.model.num_parameters

    @property
    def trained_in_blocks(self) -> int:
        """Number of trained parameters of the blocks."""
        if self.lora is None:
            return block_parameters(self.model)
        return self.adapters + self.lora.saved_in_blocks(self.model)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.model.num_parameters + self.adapters

    @property
    def adapters(self) -> int:
        """Number of parameters of the adapters."""
        return self.lora.parameters(self.model) if self.lora else 0

    @property
    def four_bit_saving(self) -> float:
        """Bytes by which the shards of all blocks are smaller because their matrices are in 4 bits."""
        return self.model.num_layers * four_bit_saving(self.model, self.lora, self.itemsize)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight and of an element of an activation."""
        return ITEMSIZE[self.dtype]


SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "sequence": "sequence_length",
        "batch": "batch_size",
        "micro_batch": "micro_batch_size",
        "dtype": "dtype",
        "state": "optimizer.state",
        "loss_chunk": "loss_chunk_tokens",
        "mlp_chunk": "mlp_chunk_tokens",
    }
)
"""Dotted names of the fields of `TrainConfig` that are fields of a `Task`, by their names in it."""


class Offload(Enum):
    """What a rank keeps in host memory, of weights, gradients and optimizer states (`--optimizer.offload`)."""

    NOTHING = "nothing"
    OPTIMIZER = "optimizer"
    """AdamW's state."""
    WEIGHTS = "weights"
    """Optimizer states, and weights and gradients of blocks; needs ZeRO 3."""


ZERO = (2, 3)
ZERO_GROUPS = ("world", "node")
"""Ranks over which ZeRO may shard, as in `--parallel.zero_group`."""
_MOVED = {
    Offload.NOTHING: "",
    Offload.OPTIMIZER: ", optimizer in host",
    Offload.WEIGHTS: ", optimizer and weights in host",
}
_SHORT = {"nothing": "", "inputs": ", inputs to host", "all": ", inputs and attention to host"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train.

    Attributes:
        task: What is trained.
        data: Data parallel degree.
        tensor: Tensor parallel degree.
        ulysses_degree: Number of neighbouring ranks that exchange attention heads; 1 for no exchange.
        outer: Strategy between the groups that exchange heads: "ring", "double-ring" (rings inside nodes and between
            them) or "gather"; "none" with a single group.
        recompute: Recompute policy (`bmburst.recompute.policy`).
        zero: ZeRO stage.
        zero_ranks: Neighbouring ranks over which ZeRO shards; each such group holds everything. None: all ranks.
        transport: Transport inside a node.
        ring_tensors: What a ring sends in backward: "kv", "q", or "auto" for the smaller.
        layer: If `recompute` differs by layer, the policy of the layers that are predicted.
        offload: What is in host memory.
        pipe: Stages of a pipeline.
        block_graphs: Whether blocks may be CUDA graphs (`--parallel.block_graphs`).
    """

    task: Task
    data: int = 1
    tensor: int = 1
    ulysses_degree: int = 1
    outer: str = "none"
    recompute: str = "block-keep-attention"
    zero: int = 3
    zero_ranks: int | None = None
    transport: str = "peer"
    ring_tensors: str = "auto"
    layer: Policy | None = None
    offload: Offload = Offload.NOTHING
    pipe: int = 1
    block_graphs: bool = True

    @cached_property
    def sequence(self) -> int:
        """Number of ranks that share a sequence."""
        return self.task.gpus // (self.pipe * self.data * self.tensor)

    @cached_property
    def groups(self) -> int:
        """Number of groups that exchange heads."""
        return self.sequence // self.ulysses_degree

    @cached_property
    def tokens(self) -> int:
        """Tokens of a sequence on a sequence rank, including padding."""
        chunks = Balanced.chunks if self.is_balanced else 2
        return chunks * -(-self.task.sequence // (chunks * self.sequence))

    @property
    def is_balanced(self) -> bool:
        """Whether the layout is "balanced", made for a tree, and not zigzag."""
        return self.task.tree is not None and self.task.micro_batch == 1 and self.sequence > 1

    @property
    def layout(self) -> str:
        """The layout that the command asks for, explicitly or by default."""
        return "balanced" if self.is_balanced else "zigzag"

    @cached_property
    def rows(self) -> int:
        """Tokens that a sequence rank computes at once."""
        return self.tokens * self.task.micro_batch

    @cached_property
    def policy(self) -> Policy:
        """The recompute policy, of all layers or of those that are predicted."""
        return Policy.parse(self.recompute) if self.layer is None else self.layer

    @cached_property
    def kinds(self) -> tuple[tuple["Candidate", int], ...]:
        """Kinds of layers with their counts: candidates that differ in `layer`."""
        kinds = Policy.parse(self.recompute).kinds(self.task.model.num_layers)
        return tuple((replace(self, layer=policy), layers) for policy, layers in kinds)

    @cached_property
    def mlp_rows(self) -> int:
        """Tokens that an MLP computes at once, in the layers of the policy."""
        return mlp_chunk(self.rows, self.task.mlp_chunk, recomputes=self.policy.recomputes)

    def is_lean(self, operators: Operators) -> bool:
        """Return whether blocks of this policy run as in `bmburst.blocks.lean`."""
        return operators.lean and self.policy.recomputes and self.tensor == 1

    def at_once(self, operators: Operators) -> "Candidate":
        """Return this candidate with only the heads of one attention call of a block."""
        return self._few_heads if self.is_lean(operators) else self

    @cached_property
    def _few_heads(self) -> "Candidate":
        model, every = self.task.model, self.own_kv_heads
        at_once = kv_heads_at_once(every, self.rows * self.own_heads, self.sequence)
        if at_once == every:
            return self
        return replace(self, task=_of_heads(self.task, model.num_heads * at_once // every, at_once))

    @cached_property
    def micro_steps(self) -> int:
        """Forward and backward passes per step."""
        return self.task.batch // (self.data * self.task.micro_batch)

    @cached_property
    def stages(self) -> tuple["Candidate", ...]:
        """The stages of the pipeline, each as a way to train its layers without one."""
        of_stages = _layers_of_stages(self.task, self.pipe)
        return tuple(
            replace(self, task=task, pipe=1, recompute=_policy_of(self.policy, layers)) for layers, task in of_stages
        )

    @cached_property
    def own_heads(self) -> int:
        """Query heads of a tensor rank."""
        return self.task.model.num_heads // self.tensor

    @cached_property
    def own_kv_heads(self) -> int:
        """KV heads of a tensor rank."""
        return max(1, self.task.model.num_kv_heads // self.tensor)

    @cached_property
    def sequence_ranks_per_node(self) -> int:
        """Number of sequence ranks of one group on a node."""
        return max(1, min(self.sequence, self.task.gpus_per_node // self.tensor))

    @cached_property
    def sequence_nodes(self) -> int:
        """Number of nodes that a sequence spans."""
        return -(-self.sequence * self.tensor // self.task.gpus_per_node)

    @cached_property
    def shards(self) -> int:
        """Number of ranks over which ZeRO shards weights, gradients and optimizer states."""
        return self.zero_ranks or self.task.gpus

    @cached_property
    def zero_nodes(self) -> int:
        """Number of nodes that a ZeRO group spans."""
        return -(-self.shards // self.task.gpus_per_node)

    @cached_property
    def shapes(self) -> HeadShapes:
        """Sizes of one layer's attention for a micro-batch, after the exchange of heads."""
        size = self.sequence, self.tokens
        return HeadShapes(
            layout=Balanced.under(self.mask, *size, self.task.sequence) if self.is_balanced else Zigzag(*size),
            degree=self.ulysses_degree,
            batch=self.task.micro_batch,
            heads=self.own_heads,
            kv_heads=self.own_kv_heads,
            head_dim=self.task.model.head_dim,
            itemsize=self.task.itemsize,
            statistics_itemsize=WIDE,
        )

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of attention's transfers and units, with units as if transfers took no time."""
        outer = cast(Outer, "ring" if self.outer == "none" else self.outer)
        least = choose_ring_tensors(self.shapes)
        ring_tensors = least if self.ring_tensors == "auto" else cast(RingTensors, self.ring_tensors)
        strategy = Strategy(self.ulysses_degree, outer, ring_tensors)
        for backward in (False, True):
            strategy = with_units(strategy, self.shapes, self.placement.transport, backward=backward)[-1]
        return Sizes(strategy, self.shapes)

    def with_strategy(self, ulysses_degree: int, outer: str) -> "Candidate":
        """Return this candidate with another attention strategy; a single group has no outer strategy."""
        outer = "none" if ulysses_degree == self.sequence else outer
        return replace(self, ulysses_degree=ulysses_degree, outer=outer)

    def problem(self, hardware: Hardware) -> Problem:
        """Return the input of the cost model for one layer's attention."""
        return Problem(self.shapes, self.task.sequence, self.mask, self.placement, hardware)

    @property
    def placement(self) -> Placement:
        """Placement of the ranks of a sequence. Only a double ring has separate communicators inside nodes."""
        nodes = self.sequence_nodes
        even = self.sequence % self.sequence_ranks_per_node == 0
        return Placement(self.transport if nodes == 1 else "nccl", nodes, even, within=self.transport)

    def attention_cost(self, hardware: Hardware) -> AttentionCost:
        """Return the seconds of one layer's attention for a micro-batch."""
        return _attention_cost(self.problem(hardware), self.sizes.strategy)

    @property
    def mask(self) -> Mask:
        """The attention mask."""
        if (tree := self.task.tree) is not None:
            return tree
        return causal_mask(self.task.model.sliding_window)

    @property
    def strategy(self) -> str:
        """The attention strategy in words."""
        inner = f"heads x{self.ulysses_degree}" if self.ulysses_degree > 1 else ""
        outer = f"{self.outer} x{self.groups}" if self.groups > 1 else ""
        return " + ".join(filter(None, (inner, outer))) or "alone"

    @property
    def name(self) -> str:
        """The candidate in words."""
        tensor = f" x tensor {self.tensor}" if self.tensor > 1 else ""
        pipe = f"pipe {self.pipe} x " if self.pipe > 1 else ""
        mesh = f"{pipe}data {self.data} x sequence {self.sequence}{tensor}"
        policy = _in_words(self.policy) if self.policy.is_uniform else self.recompute
        group = "" if self.shards == self.task.gpus else f" over {self.shards}"
        return f"{mesh}, {self.strategy}, {policy}, ZeRO-{self.zero}{group}{_MOVED[self.offload]}"


@bounded_cache(maxsize=256)
def _attention_cost(problem: Problem, strategy: Strategy) -> AttentionCost:
    return problem.cost(problem.in_units(strategy))


@lru_cache(maxsize=256)
def _of_heads(task: Task, heads: int, kv_heads: int) -> Task:
    return replace(task, model=replace(task.model, num_heads=heads, num_kv_heads=kv_heads))


@lru_cache(maxsize=256)
def _layers_of_stages(task: Task, pipe: int) -> tuple[tuple[range, Task], ...]:
    """Return the layers of each stage of a pipeline, and the task of training them alone."""
    head, gpus = head_layers(task.model, task.sequence), task.gpus // pipe
    nodes = max(1, gpus // task.gpus_per_node)
    found = []
    for number in range(pipe):
        layers = stage_layers(task.model.num_layers, pipe, number, head)
        model = replace(task.model, num_layers=len(layers), tie_embeddings=True)
        found.append((layers, replace(task, model=model, gpus=gpus, nodes=nodes if gpus % nodes == 0 else 1)))
    return tuple(found)


def _policy_of(policy: Policy, layers: range) -> str:
    """Return the recompute policy of a stage, whose layers may be some of the first N that a policy names."""
    if policy.layers is None or policy.layers >= layers.stop:
        return replace(policy, layers=None).name
    if policy.layers <= layers.start:
        return Policy(recomputes=False).name
    return replace(policy, layers=policy.layers - layers.start).name


def _in_words(policy: Policy) -> str:
    if not policy.recomputes:
        return "no recompute"
    part = "" if policy.attention == 1 else f"{policy.attention:g} of "
    kept = f"keep {part}attention" if policy.attention else "recompute all"
    layers = "" if policy.layers is None else f" (first {policy.layers} layers; the rest keep all)"
    return kept + _SHORT[policy.offload] + layers
