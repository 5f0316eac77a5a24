"""ModelCenter's DistributedDataLoader for ranks that share sequences."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from bmburst.mesh import Mesh, require_mesh


class DistributedDataLoader:
    """Deals samples to the sequence groups of a mesh, where ModelCenter's deals them to ranks.

    The ranks of a group read the same batches: those that one rank of as many as there are groups reads from
    ModelCenter's loader, in the same order (model-center 1.0.2).

    Args:
        dataset: The samples; every rank has all of them.
        shuffle: Whether each pass over the loader has an order of its own.
        seed: Of the order.
        mesh: The ranks.
        options: Further arguments of `torch.utils.data.DataLoader`, such as batch_size.

    Raises:
        UserError: `mesh` is no mesh, or splits matrices.
    """

    def __init__(
        self, dataset: Dataset[Any], shuffle: bool = False, seed: int = 0, *, mesh: Mesh, **options: Any
    ) -> None:
        require_mesh(mesh, "mesh=bmburst.Mesh.over_bmtrain()", "ModelCenter's")
        self.shuffle, self.epoch = shuffle, 0
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=mesh.shape.data, rank=mesh.data_rank, shuffle=shuffle, seed=seed
        )
        self.loader: DataLoader[Any] = DataLoader(dataset, sampler=self.sampler, **options)

    def __iter__(self) -> Iterator[Any]:
        self.epoch += self.shuffle
        self.sampler.set_epoch(self.epoch)
        return iter(self.loader)

    def __len__(self) -> int:
        """Return the number of batches of this rank's group."""
        return len(self.loader)
