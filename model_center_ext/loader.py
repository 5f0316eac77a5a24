"""ModelCenter's DistributedDataLoader for ranks that share sequences."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from bmburst.mesh import Mesh, require_mesh


class DistributedDataLoader:
    """Distributes samples over the sequence groups of a mesh; ModelCenter's loader distributes them over ranks.

    All ranks of a sequence group read the same batches. Group i of n reads what rank i of n would read from
    ModelCenter's loader, in the same order (model-center 1.0.2).

    Args:
        dataset: The samples; every rank has all of them.
        shuffle: Whether to shuffle the samples anew in each epoch.
        seed: Seed of the shuffling.
        mesh: The mesh.
        options: Further arguments of `torch.utils.data.DataLoader`, such as batch_size.

    Raises:
        UserError: `mesh` is not a mesh, or has tensor parallelism.
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
