"""The methods of the training benchmark: for each the trainer's configuration and its refusals. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.training.cells import OURS, TrainCell, task_of
from bmburst.amounts import GIB
from bmburst.errors import UserError
from bmburst.plan.candidates import Candidate
from bmburst.plan.search import Prediction, predict
from bmburst.plan.ways import candidates, with_attention_choice
from bmburst.recompute.policy import Policy
from bmburst.schedule.hardware import Hardware, load_hardware
from bmburst.schedule.parallelism import MeshShape
from bmburst.train.config import ParallelConfig, TrainConfig

_KEEP = "block-keep-attention"


@dataclass(frozen=True, kw_only=True)
class TrainMethod:
    """One way to train one sequence on all ranks of a run, under ZeRO-3.

    Attributes:
        name: In cells.
        shares_matrices: Whether ranks share matrices and heads in place of the sequence.
        replicated: With that, whether each rank has all tokens between the matrices, too.
        peer: Method of `benchmarks.attention.methods` that is attention in place of ours, or "".
        layout: Which rank holds which tokens.
        strategy: Of our attention.
        by_messages: Whether our attention's blocks go by NCCL, on CPUs by gloo, in place of what is fastest.
        stores_scores: Whether attention stores each rank's rows of scores, which the planner does not count.
    """

    name: str
    shares_matrices: bool = False
    replicated: bool = False
    peer: str = ""
    layout: str = "zigzag"
    strategy: str = "auto"
    by_messages: bool = False
    stores_scores: bool = False

    def tensor(self, cell: TrainCell) -> int:
        """Return how many ranks share each matrix."""
        return cell.ranks if self.shares_matrices else 1

    def recompute(self, cell: TrainCell) -> str:
        """Return the recompute policy: ours is the trainer's default, peers keep attention's results."""
        default = TrainConfig().recompute if self.name == OURS else _KEEP
        return cell.recompute or default

    def parallel(self, cell: TrainCell) -> ParallelConfig:
        """Return the ranks' part of the trainer's configuration."""
        tensor = self.tensor(cell)
        messages = "nccl" if cell.device == "cuda" else "gloo"
        return ParallelConfig(
            sequence_parallel=cell.ranks // tensor,
            tensor_parallel=tensor,
            layout=self.layout,  # type: ignore[arg-type]  # check_fields looks
            strategy=self.strategy,  # type: ignore[arg-type]
            transport=messages if self.by_messages else "auto",  # type: ignore[arg-type]
            zero_level=cell.zero,  # type: ignore[arg-type]
        )

    def refusal(self, cell: TrainCell) -> str | None:
        """Return why the cell cannot run, as far as it is known before any tensor is made, or None."""
        model = cell.model
        if self.peer and not self.stores_scores and (model.num_heads % cell.ranks or model.num_kv_heads % cell.ranks):
            return f"{model.num_heads} query and {model.num_kv_heads} KV heads cannot be dealt to {cell.ranks} ranks"
        try:
            model.require_mesh(MeshShape(1, cell.ranks // self.tensor(cell), self.tensor(cell)))
            Policy.parse(self.recompute(cell)).require_layers(model.num_layers)
        except UserError as error:
            return str(error).splitlines()[0]
        return None

    def predict(self, cell: TrainCell, machine: str | None) -> Prediction | None:
        """Return what the planner says of a cell; None of other types than bfloat16, and of what it cannot price.

        Args:
            cell: What is asked for.
            machine: A name of `bmburst.schedule.hardware.shipped`; of None nothing is known.
        """
        policy = self.recompute(cell)
        if machine is None or cell.dtype != "bfloat16" or self.stores_scores or self.refusal(cell) is not None:
            return None
        hardware = load_hardware(machine)
        ways = self._ways(cell, policy, hardware)
        return min((predict(way, hardware) for way in ways), key=lambda found: found.seconds)

    def _ways(self, cell: TrainCell, policy: str, hardware: Hardware) -> list[Candidate]:
        task = task_of(cell)
        if self.name == OURS:
            return candidates(task, recompute=(policy,), zero=(cell.zero,), tensor=(1,))
        alone = Candidate(task=task, tensor=self.tensor(cell), recompute=policy, zero=cell.zero, transport="nccl")
        spread = "heads" if self.peer else self.strategy
        return [with_attention_choice(alone, spread, None, hardware)]

    def memory_refusal(self, cell: TrainCell, machine: str | None, capacity: float) -> str | None:
        """Return why the cell would not fit, by the planner's prediction, or None.

        Args:
            cell: What is asked for.
            machine: See `predict`.
            capacity: Bytes of a GPU.
        """
        found = self.predict(cell, machine)
        if found is None:
            return None
        needed = found.memory.total + self.replicated_bytes(cell)
        if needed <= capacity:
            return None
        return f"would not fit: about {needed / GIB:.0f} GiB a rank by the planner, of {capacity / GIB:.0f} GiB"

    def replicated_bytes(self, cell: TrainCell) -> float:
        """Return the bytes of tokens that other ranks hold too: every block's input, and the stream at work."""
        if not self.replicated:
            return 0.0
        others = cell.batch * (cell.tokens - cell.tokens // cell.ranks)
        at_work = 2  # the stream inside a block, and its gradient
        return 2.0 * others * cell.model.hidden_size * (cell.layers + at_work)


METHODS: Mapping[str, TrainMethod] = MappingProxyType(
    {
        method.name: method
        for method in (
            TrainMethod(name=OURS),
            TrainMethod(name="ulysses", peer="ulysses", layout="contiguous"),
            # K and V around a zigzag ring, dK and dV home: what ring-flash-attn does
            TrainMethod(name="zigzag-ring-nccl", strategy="kv", by_messages=True),
            # Megatron tensor parallelism: with all-reduces (arXiv:1909.08053), and without (arXiv:2205.05198)
            TrainMethod(name="tensor-v1", shares_matrices=True, replicated=True, layout="contiguous"),
            TrainMethod(name="tensor-v3", shares_matrices=True, layout="contiguous"),
            # K, then V around a ring, rows of scores in memory (arXiv:2105.13120)
            TrainMethod(name="ring-li", peer="ring-li-2021", layout="contiguous", stores_scores=True),
        )
    }
)
