"""The device mesh: ranks as a grid of pipe x data x sequence x tensor, with a communicator for each group.

`Mesh` holds the communicators; `bmburst.schedule.parallelism` computes the position of each rank in the grid.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from bmburst.amounts import require_flag, short_text
from bmburst.comm.checks import CheckedCommunicator
from bmburst.comm.groups import (
    Split,
    bmtrain_groups,
    bmtrain_pipe_degree,
    bmtrain_tensor_degree,
    process_groups,
    single_rank_group,
)
from bmburst.errors import UserError
from bmburst.schedule.parallelism import MeshShape

__all__ = ["Mesh", "MeshShape", "current_mesh", "require_mesh", "using_mesh"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's position in the grid, with the communicators of its groups.

    `Mesh.over_bmtrain` and `Mesh.over_process_group` make it. Inside `with mesh.current():`, `burst_attention`, `shard`
    and `unshard` use its sequence group by default.

    Attributes:
        shape: Number of ranks on each axis.
        rank: This rank in the world.
        world: All ranks.
        sequence: Ranks that share this rank's sequences (and, under tensor parallelism, its heads).
        data: Ranks of this stage that hold the same part of other sequences.
        tensor: Ranks that share this rank's matrices and hold the same part of the same sequences.
    """

    shape: MeshShape
    rank: int
    world: CheckedCommunicator
    sequence: CheckedCommunicator
    data: CheckedCommunicator
    tensor: CheckedCommunicator = field(default_factory=single_rank_group)

    @property
    def sequence_rank(self) -> int:
        """This rank's index in its sequence group."""
        return self.shape.coordinates(self.rank)[1]

    @property
    def data_rank(self) -> int:
        """This rank's index among data parallel groups."""
        return self.shape.coordinates(self.rank)[0]

    @property
    def tensor_rank(self) -> int:
        """This rank's index in its tensor group."""
        return self.shape.coordinates(self.rank)[2]

    @property
    def stage(self) -> int:
        """This rank's stage of the pipeline; 0 without one."""
        return self.rank // self.shape.stage_size

    @classmethod
    def over_bmtrain(
        cls,
        *,
        data: int | None = None,
        sequence: int | None = None,
        tensor: int | None = None,
        heads: int | None = None,
        nodes: int | None = None,
    ) -> "Mesh":
        """Return the mesh over all ranks of a running BMTrain; every rank must call it.

        If BMTrain was started with stages (`bmburst.start(pipe=N)`, or its own `pipe_size`), the groups are those of
        this rank's stage.

        Args:
            data: See `MeshShape.fit`.
            sequence: See `MeshShape.fit`.
            tensor: Tensor parallel degree. It must be that of the running BMTrain, which is the default.
            heads: See `MeshShape`.
            nodes: See `MeshShape`.

        Raises:
            UserError: BMTrain was not started, or was started with another tensor degree, the axes do not match the
                ranks, or the ranks ask for different axes.
        """
        world, split = bmtrain_groups()
        started = bmtrain_tensor_degree()

        def fit() -> MeshShape:
            if tensor is not None and tensor != started:
                raise UserError(
                    f"tensor {tensor}, but BMTrain was started with {started}\n"
                    f"fix: bmburst.start(tensor={tensor}), or bmtrain.init_distributed(tp_size={tensor})"
                )
            return MeshShape.fit(world.size, data, sequence, started, heads, nodes, bmtrain_pipe_degree())

        return cls._over(world, split, fit)

    @classmethod
    def over_process_group(
        cls,
        *,
        data: int | None = None,
        sequence: int | None = None,
        tensor: int = 1,
        heads: int | None = None,
        nodes: int | None = None,
    ) -> "Mesh":
        """Return the mesh over all ranks of torch.distributed's default group; every rank must call it.

        The arguments are those of `MeshShape.fit`.

        Raises:
            UserError: `torch.distributed` was not initialised, the axes do not match the ranks, or the ranks ask for
                different axes.
        """
        world, split = process_groups()
        return cls._over(world, split, lambda: MeshShape.fit(world.size, data, sequence, tensor, heads, nodes))

    @classmethod
    def _over(cls, world: CheckedCommunicator, split: Split, fit: Callable[[], MeshShape]) -> "Mesh":
        def decide() -> tuple[MeshShape, str]:
            shape = fit()
            return shape, f"mesh\nof {shape}\nheads {shape.heads}\nnodes {shape.nodes}"

        with world.checking():  # ranks that made different groups would wait for each other forever
            shape = world.decided(decide)
        sequence, data = split(shape.sequence_groups()), split(shape.data_groups())
        # A copy with this mesh's hints: another mesh, or a caller without a mesh, may use the same group.
        sequence = sequence.hinted(shape.nodes if shape.nodes > 1 else None, shape.heads)  # nodes=1: detect the nodes
        return cls(shape, world.rank, world, sequence, data, split(shape.tensor_groups()))

    def current(self) -> AbstractContextManager[None]:
        """Make this the current mesh of this thread until the block ends: functions without a group use it.

        `bmburst.recompute.checkpoint` recomputes under the mesh of the first call. Other checkpointing may recompute in
        autograd's thread, which has no current mesh: pass the group there, or use `bmburst.BurstAttention`.
        """
        return using_mesh(self)

    def set_checks(self, active: bool) -> None:
        """Turn the comparison of the ranks' calls on or off. It is always on with BMBURST_CHECK=1 and on CPUs.

        Raises:
            UserError: `active` is no bool.
        """
        require_flag("active", active)
        for comm in (self.world, self.sequence, self.data, self.tensor):
            comm.active = active or comm.always

    def sum(self, value: float) -> float:
        """Return the sum of `value` over all ranks. Collective; the host waits.

        Raises:
            UserError: It is not a number; on every rank.
        """
        try:
            own = float(value)
        except (TypeError, ValueError, RuntimeError):
            self.world.refuse(f"Mesh.sum adds a number of each rank, got {short_text(value)}\nfix: pass a float")
        (total,) = self.world.all_reduce(torch.tensor([own], dtype=torch.float64, device=self.world.device)).wait()
        return float(total.item())


def current_mesh() -> Mesh | None:
    """Return the mesh of the innermost `with mesh.current():`, or None."""
    return _current.get()


@contextmanager
def using_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Make `mesh` the current mesh until the block ends; None: there is no current mesh.

    Raises:
        UserError: It is neither.
    """
    if not isinstance(mesh, Mesh | None):
        raise UserError(
            f"mesh must be a bmburst.Mesh or None, got {type(mesh).__name__}\nfix: bmburst.Mesh.over_bmtrain()"
        )
    token = _current.set(mesh)
    try:
        yield
    finally:
        _current.reset(token)


def require_mesh(mesh: object, made: str, whose: str) -> None:
    """Raise UserError unless an argument is a `Mesh` without tensor parallelism and without a pipeline.

    Args:
        mesh: The argument.
        made: The call that makes such a mesh, for the message.
        whose: The project whose models have neither, for the message.
    """
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh must be a bmburst.Mesh, got {type(mesh).__name__}\nfix: {made}")
    if mesh.shape.tensor > 1:
        raise UserError(
            f"mesh has tensor {mesh.shape.tensor}, but {whose} models cannot split their matrices\n"
            "allowed: tensor 1\nfix: make the mesh with tensor=1"
        )
    require_no_stages(mesh, whose)


def require_no_stages(mesh: Mesh, whose: str) -> None:
    """Raise UserError unless a mesh has no pipeline; `whose` as in `require_mesh`."""
    if mesh.shape.pipe > 1:
        raise UserError(
            f"mesh has {mesh.shape.pipe} stages, but {whose} models cannot be divided into stages\n"
            "allowed: pipe 1\nfix: start BMTrain without pipe_size"
        )


_current: ContextVar[Mesh | None] = ContextVar("bmburst_mesh", default=None)
