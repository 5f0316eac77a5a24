"""Predicts the peak memory of a training step, line by line.

Memory can peak at few moments of a step: in the forward of the last block, when all activations are alive; in the head
and the loss; in the backward of the last norm; in the backward of the last block, at the activation, the products of
the MLP, and attention; and when backward moves to the next block. The bytes of each moment are summed, and the largest
sum is the peak. The step is not the first one, so gradients and optimizer states exist.

If the first layers are recomputed, the last block is one of those that keep everything. When backward reaches the
recomputed layers, the others have freed their activations, so memory does not peak again. This is why policies
recompute the first layers (`bmburst.recompute.policy`).

The moments of plain blocks are in `bmburst.plan.moments`, those of blocks that run as in `bmburst.blocks.lean` here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from bmburst.plan.candidates import Candidate, Offload, Task
from bmburst.plan.counts import (
    CURRENT,
    WIDE,
    Operators,
    adam_bytes,
    block_parameters,
    held_block,
    mlp_matrix,
)
from bmburst.plan.graphs import graph_bytes, runs_graphs
from bmburst.plan.moments import Lines, Moments, OtherBlocks, StepMoments
from bmburst.plan.stages import ends, kept_by_stage, stages_per_node
from bmburst.recompute.policy import BlockBytes
from bmburst.schedule.hardware import Hardware

KEPT = "what blocks keep"
"""Name of the tensors that recompute policies offload, in the bytes of a host."""
KEPT_BY_GRAPHS = "kept by CUDA graphs"
"""Name of the memory of graphs, in the bytes of a GPU."""
HOST_SHARE = 0.9  # usable fraction of a host's memory; the rest is for the system and for processes


@dataclass(frozen=True)
class Memory:
    """Peak memory of a step on a rank.

    Attributes:
        moment: The moment of the peak.
        lines: Bytes in torch's allocator at that moment, by use.
        outside: Bytes outside torch's allocator, by use.
        capacity: Bytes of the GPU.
        moments: Bytes in torch's allocator at each moment.
        host: Bytes in a node's host memory, by use.
        host_capacity: Usable bytes of the host.
    """

    moment: str
    lines: Mapping[str, float]
    outside: Mapping[str, float]
    capacity: float
    moments: Mapping[str, float]
    host: Mapping[str, float]
    host_capacity: float

    @cached_property
    def allocated(self) -> float:
        """Bytes in torch's allocator, as `torch.cuda.max_memory_allocated`."""
        return sum(self.lines.values())

    @cached_property
    def total(self) -> float:
        """All used bytes of the GPU."""
        return self.allocated + sum(self.outside.values())

    @cached_property
    def in_host(self) -> float:
        """All used bytes of the host."""
        return sum(self.host.values())

    @property
    def lacking(self) -> float:
        """Bytes missing on GPU and host at the peak."""
        return max(0.0, self.total - self.capacity) + max(0.0, self.in_host - self.host_capacity)

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the GPU and the host."""
        return not self.lacking


def memory_of(candidate: Candidate, hardware: Hardware, *, operators: Operators = CURRENT) -> Memory:
    """Return the peak memory of a step."""
    if candidate.pipe > 1:
        stages = (_stage_memory(candidate, number, hardware, operators) for number in ends(candidate))
        return max(stages, key=lambda each: (each.lacking, each.total))
    found = _memory_of(candidate, hardware, operators)
    if not runs_graphs(candidate, hardware):
        return found
    graphed = _with_graphs(found, candidate)
    return graphed if graphed.fits else found


def keeps_graphs(candidate: Candidate, hardware: Hardware, *, operators: Operators = CURRENT) -> bool:
    """Return whether the blocks of a run are CUDA graphs: if they should be, and there is memory for them."""
    if not runs_graphs(candidate, hardware):
        return False
    return _with_graphs(_memory_of(candidate, hardware, operators), candidate).fits


def _memory_of(candidate: Candidate, hardware: Hardware, operators: Operators) -> Memory:
    """Return the peak memory of a step without a pipeline and without graphs of blocks."""
    moment, lines, totals, boxes, in_host = _peak(candidate, hardware.workspace, operators)
    outside = boxes | _libraries(candidate.task, hardware)
    most = HOST_SHARE * hardware.host_memory
    return Memory(moment, lines, _used(outside), hardware.memory, totals, in_host, most)


def _with_graphs(found: Memory, candidate: Candidate) -> Memory:
    """Return the memory of a step whose blocks are CUDA graphs."""
    more = graph_bytes(candidate, block_bytes(candidate))
    return replace(found, outside={**found.outside, KEPT_BY_GRAPHS: found.outside.get(KEPT_BY_GRAPHS, 0.0) + more})


@lru_cache(maxsize=1024)  # a search asks for the same ways again, and for their memory on other machines
def _peak(candidate: Candidate, workspace: float, operators: Operators) -> tuple[str, Lines, Lines, Lines, Lines]:
    """Return moment, lines and moments of `Memory`, the bytes of attention outside the allocator, and the host's."""
    blocks = _Blocks(candidate, operators)
    held = blocks.last().states() | {"workspace": workspace}
    found = {name: held | moment() for name, moment in blocks.moments().items()}
    totals = {name: sum(lines.values()) for name, lines in found.items()}
    moment = max(totals, key=lambda name: totals[name])
    return moment, _used(found[moment]), totals, blocks.outside(), _used(blocks.in_host())


def _stage_memory(candidate: Candidate, number: int, hardware: Hardware, operators: Operators) -> Memory:
    """Return the peak memory of a stage of a pipeline."""
    stage = candidate.stages[number]
    own = _memory_of(stage, hardware, operators)
    more = _used(kept_by_stage(candidate, number, StepMoments(stage, operators)))
    others = stages_per_node(candidate)
    return replace(
        own,
        lines={**own.lines, **more},
        outside={**own.outside, **_used(_libraries(candidate.task, hardware))},
        moments={name: nbytes + sum(more.values()) for name, nbytes in own.moments.items()},
        host={name: others * nbytes for name, nbytes in own.host.items()},
    )


def host_state(candidate: Candidate) -> Lines:
    """Return the bytes of weights, gradients and optimizer states in a node's host memory."""
    task, nodes = candidate.task, candidate.shards / candidate.task.gpus_per_node  # that share the bytes
    if candidate.offload is Offload.NOTHING:
        return {}
    if candidate.offload is Offload.OPTIMIZER:
        return {"optimizer": task.trained / nodes * adam_bytes(task.dtype, task.state)}
    blocks = block_parameters(task.model, task.lora) / nodes
    trained, saved = task.trained_in_blocks / nodes, task.four_bit_saving / nodes
    state = trained * adam_bytes(task.dtype, task.state, with_weights=True)
    state += (task.trained / nodes - trained) * adam_bytes(task.dtype, task.state)
    reference = (
        {"reference's weights": block_parameters(task.model) / nodes * task.itemsize} if task.second_model else {}
    )
    return {"optimizer": state, "weights and gradients": (blocks + trained) * task.itemsize - saved, **reference}


def reserved_memory(task: Task, hardware: Hardware) -> float:
    """Return the bytes of a GPU that are not available for tensors: CUDA context, libraries, NCCL."""
    return sum(_libraries(task, hardware).values())


def _libraries(task: Task, hardware: Hardware) -> Lines:
    """Return the bytes of CUDA context, libraries and NCCL; NCCL's buffers for other nodes were not measured."""
    ranks = task.gpus_per_node if task.gpus > 1 else 0
    return {"context and libraries": hardware.reserved, "NCCL": hardware.nccl_memory * ranks}


def block_bytes(candidate: Candidate) -> BlockBytes:
    """Return the bytes of a block's tensors, in the groups that recompute policies distinguish."""
    return StepMoments(candidate, CURRENT).block


class _Blocks:
    """Memory of a model whose blocks may have different policies.

    Args:
        candidate: The way to train.
        operators: The operators between matrix products.
    """

    def __init__(self, candidate: Candidate, operators: Operators) -> None:
        self._candidate, self._task, self._operators = candidate, candidate.task, operators
        self._ways = [kind for kind, _ in candidate.kinds]
        self._kinds = [self._moments(way, OtherBlocks()) for way in self._ways]
        self._of_layers = candidate.policy.kinds_of_layers(candidate.task.model.num_layers)
        kept, hosted = ([take(each) for each in self._kinds] for take in (StepMoments.kept, StepMoments.hosted))
        self._kept_before = list(accumulate((kept[kind] for kind in self._of_layers), initial=0.0))
        stored = (i if self._ways[kind].policy.is_stored else 0 for i, kind in enumerate(self._of_layers))
        self._first_of_segment = list(accumulate(stored, max))
        self._hosted = [hosted[kind] for kind in self._of_layers]
        mlp = [self._kinds[kind].mlp_in_host() for kind in self._of_layers]
        self._chains = ([all_ - own for all_, own in zip(self._hosted, mlp, strict=True)], mlp)

    def last(self) -> StepMoments:
        """Return the moments of the last block."""
        return self._at(len(self._of_layers) - 1)

    def moments(self) -> Moments:
        """Return the moments at which memory can peak: in the last block, and in the backward of blocks of other kinds.

        After the last blocks are done, blocks before them may recompute more and so need more memory.
        """
        found = self.last().moments()
        for kind, way in enumerate(self._ways):
            if way.policy.feeds_next or not way.policy.recomputes:
                continue
            alike = [i for i, each in enumerate(self._of_layers) if each == kind]
            fullest = max(alike, key=lambda i: self._others(i).total)
            if fullest < len(self._of_layers) - 1:
                moments = self._at(fullest).in_backward()
                found |= {f"{name} of block {fullest + 1}": moment for name, moment in moments.items()}
        return found

    def outside(self) -> Lines:
        """Return the bytes of attention outside torch's allocator."""
        calls = [each.attends for each in self._kinds]
        return {
            "boxes that peers read": max(each.outside for each in calls),
            KEPT_BY_GRAPHS: max(each.in_graphs for each in calls),
        }

    def in_host(self) -> Lines:
        """Return the bytes in a node's host memory."""
        task = self._task
        hosted = sum(self._hosted) * task.gpus_per_node
        return {KEPT: hosted, **host_state(self._candidate)}

    def _at(self, layer: int) -> StepMoments:
        """Return the moments of a block that ends a segment."""
        return self._moments(self._ways[self._of_layers[layer]], self._others(layer))

    def _others(self, layer: int) -> OtherBlocks:
        """Return the bytes of other blocks in the backward of a block that ends a segment."""
        first, before = self._first_of_segment[layer], self._kept_before[layer]
        if first < layer:
            kinds = [self._kinds[kind] for kind in self._of_layers[first:layer]]
            segment = sum(each.hidden + each.again() for each in kinds)
            fetched = kinds[0].hidden if self._hosted[first] else 0.0
            return OtherBlocks(before=before, fetched=fetched, segment=segment)
        # A block with tensors of a chain in host memory prefetches those of the chain's block before it.
        earlier = (next(filter(None, reversed(chain[:layer])), 0.0) for chain in self._chains if chain[layer])
        return OtherBlocks(before=before, fetched=sum(earlier))

    def _moments(self, way: Candidate, others: OtherBlocks) -> StepMoments:
        kind = LeanMoments if way.is_lean(self._operators) else StepMoments
        return kind(way, self._operators, others)


def _used(lines: Mapping[str, float]) -> Lines:
    return {name: nbytes for name, nbytes in lines.items() if nbytes}


class LeanMoments(StepMoments):
    """`StepMoments` for a block of `bmburst.blocks.lean`; that module's docstring describes the steps."""

    def __init__(self, candidate: Candidate, operators: Operators, others: OtherBlocks) -> None:
        super().__init__(candidate, operators, others)
        self.part = candidate.mlp_rows / candidate.rows  # fraction of the tokens in one chunk
        at_once = self.attends.candidate.own_heads
        self.heads = at_once / candidate.own_heads  # fraction of the heads in one attention call
        self.projected = self.query + 2 * self.key

    def in_backward(self) -> Moments:
        """See `StepMoments.in_backward`."""
        again = {} if self.policy.attention == 1 else {"attention again": self._attention_again}
        return {
            **again,
            "MLP backward": self._mlp_backward,
            "gate and up backward": self._gate_up_backward,
            "attention backward": self._attention_backward,
            **({"head norms backward": self._head_norms_backward} if self.model.qk_norm else {}),
            "projections backward": self._projections_backward,
        }

    def _recomputed(self) -> float:
        return 0.0

    @property
    def _joins(self) -> bool:
        """Whether forward collects the output of all heads in one tensor, which the returned stream overwrites."""
        return not self.policy.attention and self.hidden == self.query

    def _attention_forward(self) -> Lines:
        whole = self.query if self._joins and self.heads < 1 else (1 - self.heads) * self.attended
        return {
            "kept for backward": self._kept_before(),
            "gathered weights, gradients": self._weights(),
            "embedding and head": self._table(),
            "not yet let go to host memory": self.mlp_in_host(),  # of the block before
            "attention's output": whole,
            "heads in work": self.heads * self.projected + self._attention(self.attends.forward),
        }

    def _mlp_forward(self) -> Lines:
        itemsize = self.task.itemsize
        outputs = self.query if self._joins else self.attended
        return {
            "kept for backward": self._kept_before(),
            "gathered weights, gradients": self._weights(),
            "embedding and head": self._table(),
            "attention's output": outputs + (0.0 if self._joins else self.hidden),
            "not yet let go to host memory": self.mlp_in_host() * (1 - self.part),
            "tokens in work": self.part * (2 * self.hidden + self.norm_statistic) + 2 * self.chunk_inner,
            "elementwise": self._elements(self.operators.swiglu_forward_alive(itemsize), self.chunk_inner),
        }

    def _attention_again(self) -> Lines:
        return {
            **self._block_in_backward(),
            "gradients in flight": self.hidden,
            "attention's output": (1 - self.heads) * self.attended,
            "heads in work": self.heads * self.projected + self._attention(self.attends.forward),
        }

    def _mlp_backward(self) -> Lines:
        inside = self._elements(self.operators.swiglu_backward_alive(self.task.itemsize), self.chunk_inner)
        streams = 3 * self.hidden + self.scaled + self.norm_statistic
        sums = self._sums(3 * mlp_matrix(self.model, 1) + self._output_matrix())
        gone = self.part * self.mlp_in_host()  # when the second chunk begins, which is the first with sums
        return {
            **self._block_in_backward(),
            "gradients in flight": self.hidden,
            "attention's output": self._held_output(),
            "sums of gradients": max(0.0, sums - gone),
            "tokens in work": self.part * streams + (2 if self.mlp_in_host() else 4) * self.chunk_inner,
            "elementwise": inside,
        }

    def _gate_up_backward(self) -> Lines:
        """The input gradient of gate and up is summed in fp32; on a CPU both factors are copied to fp32."""
        numbers = self.part * self.hidden / self.task.itemsize
        copied = (
            mlp_matrix(self.model, 1) + self.chunk_inner / self.task.itemsize if self.operators.wide_copies else 0.0
        )
        return {
            **self._block_in_backward(own=True),
            "gradients in flight": self.hidden,
            "attention's output": self._held_output(),
            "sums of gradients": self._sums(3 * mlp_matrix(self.model, 1)),
            "tokens in work": self.part * (3 * self.hidden + self.scaled)
            + (0 if self.mlp_in_host() else 2) * self.chunk_inner,
            "in fp32": WIDE * (numbers + copied),
        }

    def _held_output(self) -> float:
        """Return the bytes of attention's output, and of its inputs if all heads are in one call."""
        ready = self.projected if self.heads == 1 and self.policy.attention < 1 else 0.0
        return self._output() + ready + (self.part * self.query if self.heads < 1 else 0.0)

    def _attention_backward(self) -> Lines:
        others = 1 - self.heads
        return {
            **self._block_in_backward(gone=others * self._let_go() + self._joined_part(), own=True, is_fed=True),
            "gradients in flight": self.hidden,
            "gradients of heads": others * self.projected,
            "sums of gradients": self._sums(3 * mlp_matrix(self.model, 1) + self._output_matrix()),
            "heads in work": self.heads * (self.projected + self.query + (self.attended if self._output() else 0.0))
            + self._attention(self.attends.backward),
        }

    def _head_norms_backward(self) -> Lines:
        """Queries are projected again and normed, and their norm is differentiated; then the same for keys."""
        again = max(2 * self.query, self.query + 2 * self.key)
        return {
            **self._block_in_backward(gone=self._let_go() + self._joined_part(), own=True, is_fed=True),
            "gradients in flight": self.hidden,
            "gradients of heads": self.projected,
            "sums of gradients": self._sums(held_block(self.model, 1)),
            "tokens in work": self.part
            * (self._turned_gradients() + again + self.statistics + self.hidden + self.norm_statistic),
            "elementwise": self._elements(
                self.operators.norm_backward_alive(self.task.itemsize), self.part * self.query
            ),
        }

    def _turned_gradients(self) -> float:
        """Return the bytes of the gradients of all heads, concatenated if they come in groups, and rotated back."""
        return (self.projected if self.heads < 1 else 0.0) + self.query + self.key

    def _projections_backward(self) -> Lines:
        return {
            **self._block_in_backward(gone=self._let_go() + self._joined_part(), own=True, is_fed=True),
            "gradients in flight": self.hidden,
            "gradients of heads": self.projected,
            "sums of gradients": self._sums(held_block(self.model, 1)),
            "tokens in work": self.part * (self._turned_gradients() + 2 * self.hidden + self.norm_statistic),
            "elementwise": self._elements(
                self.operators.norm_backward_alive(self.task.itemsize), self.part * self.hidden
            ),
        }

    def _block_in_backward(self, *, gone: float = 0.0, own: bool = False, is_fed: bool = False) -> Lines:
        """`is_fed`: whether the MLP's backward is done, which frees what was kept of it.

        `own`: whether gradients of its weights exist.
        """
        visiting = self._visiting(backward=True) - (self.mlp_in_host() if is_fed else 0.0)
        of_host = gone if self.policy.offload == "all" else 0.0  # attention's output came from the host
        return {
            "kept for backward": self._all_kept(gone - of_host),
            "computed again by its segment": self.others.segment,
            "back from host memory": visiting - of_host,
            "gathered weights, gradients": self._weights_and_gradients(own=own),
        }

    def _memories(self) -> int:
        return super()._memories() if self.part == 1 else 1  # sums over chunks of tokens are tensors of their own

    def _let_go(self) -> float:
        """Return the bytes of attention's output, kept or fetched, that backward frees by groups of heads."""
        lets_go = self.policy.in_segment or self.policy.offload == "all"
        return self.attended if self.policy.attention == 1 and lets_go else 0.0

    def _joined_part(self) -> float:
        """Return the bytes of the part of attention's output that is fetched from the host and joined with the rest."""
        kept = self.policy.attention
        return kept * self.attended if self.policy.offload == "all" and kept < 1 else 0.0

    def _output(self) -> float:
        """Return the bytes of attention's output in backward, in addition to the kept or fetched part."""
        kept = self.policy.attention
        return self.attended * (1.0 - kept if self.policy.offload == "all" or kept == 1 else 1.0)

    def _output_matrix(self) -> float:
        return float(self.model.num_heads * self.model.head_dim * self.model.hidden_size)

    def _sums(self, numbers: float) -> float:
        """Return the bytes of fp32 sums over chunks of tokens; gradients of all tokens are not summed."""
        return 0.0 if self.part == 1 else self._of_matrices(numbers * WIDE)
